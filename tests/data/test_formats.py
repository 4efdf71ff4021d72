"""Files in the formats of public data sets: rows, roles and columns come out right, or are refused by name."""

import pytest
from rows import assistant, transcript, user, written

from infalign.data.examples import Example, load_examples
from infalign.data.files import read_rows


def talk(i):
    """Return a conversation of three turns."""
    return [user(f"Hi {i}"), assistant("Hello."), user(f"Name a thing with {i} legs.")]


def asked(i):
    """Return a question, as text."""
    return f"Name a thing with {i} legs."


def parts(i):
    """Return columns that are kept, of several types."""
    return {"id": f"00{i}", "score": i / 2, "turns": i, "day": "2024-01-02", "empty": "NA", "tags": ["a", str(i)]}


SYSTEM = {"role": "system", "content": "Be brief."}
GOOD, BAD = "  A table.\n", "No idea."
PAIR = (assistant(GOOD),), (assistant(BAD),)
DEMO = (assistant(GOOD),), None
ALONE = (), None


def two(i, first, second):
    """Return the columns of two answers, of which the first is the good one in every other row."""
    return {first: GOOD, second: BAD} if i % 2 else {first: BAD, second: GOOD}


FORMATS = {
    "HH": (
        lambda i: {"chosen": transcript("Hi", "Ho", asked(i), GOOD), "rejected": transcript("Hi", "Ho", asked(i), BAD)},
        lambda i: ([user("Hi"), assistant("Ho"), user(asked(i))], *PAIR), ()),
    "UltraFeedback, binarized": (
        lambda i: {"prompt": asked(i), "prompt_id": "a", "messages": [user(asked(i)), assistant(GOOD)],
                   "score_chosen": 8.5, "chosen": [user(asked(i)), assistant(GOOD)],
                   "rejected": [user(asked(i)), assistant(BAD)]},
        lambda i: ([user(asked(i))], *PAIR), ("prompt_id", "messages", "score_chosen")),
    "UltraFeedback, of TRL": (
        lambda i: {"chosen": [user(asked(i)), assistant(GOOD)], "rejected": [user(asked(i)), assistant(BAD)],
                   "score_chosen": 8.5},
        lambda i: ([user(asked(i))], *PAIR), ("score_chosen",)),
    "HelpSteer2": (
        lambda i: {"prompt": asked(i), **two(i, "response_1", "response_2"), "preference_strength": -2 if i % 2 else 3,
                   "split": "train", "preference_statement": "One is better."},
        lambda i: ([user(asked(i))], *PAIR), ("split", "preference_statement")),
    "HelpSteer3": (
        lambda i: {"context": talk(i), **two(i, "response1", "response2"), "overall_preference": -1 if i % 2 else 2,
                   "domain": "general", "individual_preference": [{"score": -1, "reasoning": "So."}]},
        lambda i: (talk(i), *PAIR), ("domain", "individual_preference")),
    "SHP": (
        lambda i: {"post_id": f"p{i}", "history": asked(i), "score_A": 7, "score_B": 3, "labels": i % 2,
                   **two(i, "human_ref_A", "human_ref_B")},
        lambda i: ([user(asked(i))], *PAIR), ("post_id", "score_A", "score_B")),
    "PKU-SafeRLHF": (
        lambda i: {"prompt": asked(i), **two(i, "response_0", "response_1"), "is_response_0_safe": i > 5,
                   "better_response_id": 1 - i % 2, "safer_response_id": 1 - i % 2},
        lambda i: ([user(asked(i))], *PAIR), ("is_response_0_safe",)),
    "Capybara": (
        lambda i: {"source": "a", "conversation": [{"input": asked(i), "output": GOOD}]},
        lambda i: ([user(asked(i))], *DEMO), ("source",)),
    "Capybara, of TRL": (
        lambda i: {"source": "a", "messages": [*talk(i), assistant(GOOD)], "num_turns": 2},
        lambda i: (talk(i), *DEMO), ("source", "num_turns")),
    "GSM8K": (
        lambda i: {"question": asked(i), "answer": f"So\n#### {i}"}, lambda i: ([user(asked(i))], *ALONE), ("answer",)),
    "Tulu 3, demonstrations": (
        lambda i: {"id": f"a{i}", "messages": [*talk(i), assistant(GOOD)], "source": "b"},
        lambda i: (talk(i), *DEMO), ("id", "source")),
    "Tulu 3, preferences": (
        lambda i: {"id": f"a{i}", "prompt": asked(i), "chosen": [user(asked(i)), assistant(GOOD)], "chosen_model": "m",
                   "rejected": [user(asked(i)), assistant(BAD)], "rejected_model": "n"},
        lambda i: ([user(asked(i))], *PAIR), ("id", "chosen_model", "rejected_model")),
    "Tulu 3, verifiable": (
        lambda i: {"messages": [user(asked(i))], "ground_truth": str(i), "dataset": "gsm8k"},
        lambda i: ([user(asked(i))], *ALONE), ("ground_truth", "dataset")),
    "Tulu 3, verifiable, answered": (
        lambda i: {"messages": [user(asked(i))], "ground_truth": str(i), "completion": GOOD},
        lambda i: ([user(asked(i))], *DEMO), ("ground_truth",)),
    "KTO-mix, desirable": (
        lambda i: {"prompt": talk(i), "completion": [assistant(GOOD)], "label": True}, lambda i: (talk(i), *DEMO), ()),
    "Alpaca": (
        lambda i: {"instruction": "Name a thing.", "input": f"{i} legs" if i % 2 else "", "output": GOOD, "text": "A"},
        lambda i: ([user(f"Name a thing.\n\n{i} legs" if i % 2 else "Name a thing.")], *DEMO), ("text",)),
    "ShareGPT": (
        lambda i: {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": asked(i)},
                                     {"from": "gpt", "value": GOOD}]},
        lambda i: ([SYSTEM, user(asked(i))], *DEMO), ()),
    "Orca's pairs": (
        lambda i: {"system": "Be brief." if i % 2 else "", "question": asked(i), "chosen": GOOD, "rejected": BAD},
        lambda i: ([*([SYSTEM] if i % 2 else []), user(asked(i))], *PAIR), ()),
}  # fmt: skip


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_documented(tmp_path, name, ending):
    """Prompts, replies and roles of ten rows are those that the format means, and other columns are kept."""
    row, expected, kept = FORMATS[name]
    rows = [row(i) | parts(i) | {name: row(i)[name] for name in kept} for i in range(10)]
    examples, _ = load_examples(read_rows(written(tmp_path / f"rows.{ending}", rows)))
    for i, example in enumerate(examples):
        prompt, chosen, rejected = expected(i)
        columns = {name: rows[i][name] for name in (*kept, *parts(i)) if name in rows[i]}
        assert example == Example(tuple(prompt), chosen, rejected, example.where, columns)
