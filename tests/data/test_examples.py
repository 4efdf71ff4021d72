"""Rows to examples: transcripts, conversations and demonstrations, what is refused, and who shares an identity."""

import json
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import PROMPT, assistant, comparison, transcript, user

from infalign.core.errors import DataError
from infalign.data.examples import Example, load_examples, parse_example
from infalign.data.messages import prompt_id

SYSTEM = {"role": "system", "content": "Be brief."}
SHARED = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello."},
    {"from": "human", "value": "Name a colour"},
    {"from": "gpt", "value": "Blue"},
]


def said(example):
    """Return the chosen and the rejected reply, each one plain turn of the assistant, as texts."""
    assert all(turn == assistant(turn["content"]) for turn in (*example.chosen, *example.rejected))
    ((chosen,), (rejected,)) = example.chosen, example.rejected
    return chosen["content"], rejected["content"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "answers"),
    [
        (("Well.", "Hello."), ("Go away.",), ("Well.\n\nHello.", "Go away.")),
        (("Go away.",), ("Well.", "Hello."), ("Go away.", "Well.\n\nHello.")),
        (("Well.", "Hello."), ("Well.", "Bye."), ("Well.\n\nHello.", "Well.\n\nBye.")),
    ],
)
def test_an_answer_in_two_turns_does_not_move_the_cut(chosen, rejected, answers):
    """The prompt ends with the last shared user turn, also where both answers begin with the same Assistant turn."""
    said_in_turns = ["".join(f"\n\nAssistant: {turn}" for turn in side) for side in (chosen, rejected)]
    row = {"chosen": transcript("Hi") + said_in_turns[0], "rejected": transcript("Hi") + said_in_turns[1]}
    example = parse_example(row, "here")
    assert (example.prompt, said(example)) == ((user("Hi"),), answers)


def test_consecutive_turns_of_one_role_merge():
    """Two Human turns in a row become one with a blank line between, and an empty earlier turn stays a turn."""
    start = "\n\nHuman: Hi\n\nHuman: Anybody?\n\nAssistant: \n\nHuman: Hello?"
    row = {"chosen": f"{start}\n\nAssistant: Yes.", "rejected": f"{start}\n\nAssistant: No."}
    assert parse_example(row, "here").prompt == (user("Hi\n\nAnybody?"), assistant(""), user("Hello?"))


def test_inline_speakers_are_text():
    """``Human:`` and ``Assistant:`` that do not follow a blank line are what somebody wrote."""
    first = "Write a play.\nHuman: Hi\nAssistant: Hello. Human: Bye"
    example = parse_example(comparison(first, "Human: Hi\nAssistant: Yes", "No"), "here")
    assert (example.prompt, said(example)) == ((user(first),), ("Human: Hi\nAssistant: Yes", "No"))


SPOKEN = st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1).map(str.strip).filter(bool)


@given(st.lists(SPOKEN, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2), SPOKEN, SPOKEN)
def test_transcripts_round_trip(turns, chosen, rejected):
    """Any alternating conversation survives being written as a transcript and parsed."""
    row = {"chosen": transcript(*turns, chosen), "rejected": transcript(*turns, rejected)}
    if chosen == rejected:
        with pytest.raises(DataError, match="identical"):
            parse_example(row, "here")
        return
    example = parse_example(row, "here")
    assert [turn["content"] for turn in example.prompt] == turns
    assert said(example) == (chosen, rejected)


SAID = transcript("Hi", "Hello.", "Name a colour")

COMPARED = [
    {"chosen": f"{SAID}\n\nAssistant: Blue", "rejected": f"{SAID}\n\nAssistant: 7"},
    {"prompt": PROMPT, "chosen": "Blue", "rejected": "7"},
    {"prompt": json.dumps(PROMPT), "chosen": json.dumps([assistant("Blue")]), "rejected": "7"},
    {"prompt": PROMPT, "chosen": [assistant("Blue")], "rejected": "7"},
    {"prompt": PROMPT, "chosen": [*PROMPT, assistant("Blue")], "rejected": [PROMPT[-1], assistant("7")]},
    {"chosen": [*PROMPT, assistant("Blue")], "rejected": [*PROMPT, assistant("7")]},
    {"chosen": json.dumps([*PROMPT, assistant("Blue")]), "rejected": json.dumps([*PROMPT, assistant("7")])},
    {"messages": [*PROMPT, assistant("Blue")], "rejected_response": "7"},
    {"conversations": SHARED[:-1], "chosen": SHARED[-1], "rejected": {"from": "gpt", "value": "7"}},
]
DEMONSTRATED = [
    {"prompt": PROMPT, "completion": "Blue"},
    {"prompt": PROMPT, "completion": "Blue", "label": "True"},
    {"messages": [*PROMPT, assistant("Blue")]},
    {"messages": json.dumps([*PROMPT, assistant("Blue")])},
    {"messages": [*PROMPT[:1], PROMPT[1] | {"weight": 0}, *PROMPT[2:], assistant("Blue") | {"weight": 1}]},
]


@pytest.mark.parametrize("row", [*COMPARED, *DEMONSTRATED])
def test_forms_agree(row):
    """A row reads the same from transcripts, from an explicit prompt and from conversations, JSON or not."""
    rejected = (assistant("7"),) if row in COMPARED else None
    assert parse_example(row, "here") == Example(tuple(PROMPT), (assistant("Blue"),), rejected, "here")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"system": "Be brief.", "messages": [user("Hi?"), assistant("Yes")]}, [SYSTEM, user("Hi?")]),
        ({"system": "Be brief.", "messages": [SYSTEM, user("Hi?"), assistant("Yes")]}, [SYSTEM, user("Hi?")]),
        ({"system_prompt": "", "prompt": "Hi?", "completion": "Yes"}, [user("Hi?")]),
        ({"prompt": "Translate.", "input": "The cat.", "completion": "Yes"}, [user("Translate.\n\nThe cat.")]),
        ({"instruction": "Who?", "context": "Ann did.", "response": "Yes"}, [user("Who?\n\nAnn did.")]),
    ],
)
def test_system_and_input_are_of_the_prompt(row, prompt):
    """The column of a system turn, and that of what an instruction is about, are parts of the prompt."""
    assert parse_example(row, "here") == Example(tuple(prompt), (assistant("Yes"),), None, "here")


CALLS = [{"type": "function", "function": {"name": "sky"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RED = (assistant("Red."),)
SKY = {"role": "tool", "content": "blue", "name": "sky", "tool_call_id": "1"}
LOOKED = (CALL, SKY, assistant("It is blue."))


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"messages": [user("Sky?"), *LOOKED]}, LOOKED, None),
        ({"prompt": "Sky?", "completion": [*LOOKED]}, LOOKED, None),
        ({"messages": [user("Sky?"), CALL | {"content": None, "tool_calls": json.dumps(CALLS)}]}, LOOKED[:1], None),
        ({"chosen": [user("Sky?"), *LOOKED], "rejected": [user("Sky?"), *RED]}, LOOKED, RED),
        ({"prompt": [user("Sky?")], "chosen": json.dumps(LOOKED), "rejected": "Red."}, LOOKED, RED),
    ],
)  # fmt: skip
def test_a_reply_may_use_tools(row, chosen, rejected):
    """The reply begins after the last turn of the user, and messages keep their fields."""
    assert parse_example(row, "here") == Example((user("Sky?"),), chosen, rejected, "here")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Two and two?", "answer": "4"},
        {"prompt": "Two and two?", "tools": None, "n": 7, "day": "2024-01-02", "more": {"a": [None, 0.5]}},
    ],
)
def test_a_prompt_without_response_is_no_demonstration(row):
    """A prompt alone stays one, and columns that no format defines keep their value and type."""
    example = parse_example(row, "here")
    columns = {name: value for name, value in row.items() if name != "prompt"}
    assert example == Example((user("Two and two?"),), (), None, "here", columns)


FORMS = [
    {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    {"prompt": "Hi", "completion": "Yes"},
    {"instruction": "Hi", "input": "you", "output": "Yes"},
    {"messages": [user("Hi"), assistant("Yes")]},
    {"prompt": "Hi", "response_0": "A", "response_1": "B", "better_response_id": 1},
    {"prompt": "Hi", "completion": "Yes", "label": True},
    {"query": "SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: c\n\nTL;DR:", "reference_responses": "Yes"},
]


@pytest.mark.parametrize("row", FORMS)
def test_a_null_column_of_another_form_counts_as_absent(row):
    """Sets that were concatenated give every row all columns; each keeps the form of its own."""
    filled = dict.fromkeys(name for form in FORMS for name in form) | row
    assert parse_example(filled, "here") == parse_example(row, "here")


@pytest.mark.parametrize("text", [" Blue\n", "    return 1\n", "\tx", "Blue\u00a0", "[1]", '[{"a": 1}]', "[{'a': 1}]"])
def test_text_is_kept_as_it_is(text):
    """Blanks at the ends of a text, and lists that hold no messages, belong to it."""
    example = parse_example({"prompt": f"{text}?", "chosen": text, "rejected": "No"}, "here")
    assert (example.prompt, said(example)) == ((user(f"{text}?"),), (text, "No"))
    example = parse_example({"chosen": transcript(text, text), "rejected": transcript(text, "No")}, "here")
    assert (example.prompt, said(example)) == ((user(text),), (text, "No"))


def test_text_prompt_is_one_user_turn():
    """A text prompt is one user turn, unchanged; the group of a conversation is its first user turn alone."""
    example = parse_example({"prompt": " Name a colour\n", "chosen": "Blue", "rejected": "7"}, "here")
    assert example.prompt == (user(" Name a colour\n"),)
    for prompt in ([{"role": "system", "content": "Be brief."}, *example.prompt], [*example.prompt, *PROMPT[1:]]):
        other = parse_example({"prompt": prompt, "completion": "Blue"}, "here")
        assert other.group == example.group
        assert other.prompt_id != example.prompt_id


def test_tldr_demonstration_has_the_prompt_of_the_comparisons():
    """OpenAI's TL;DR query becomes the one-line prompt of the comparisons; the author's summary is the completion."""
    row = {
        "query": "SUBREDDIT: r/bread\n\nTITLE: My loaf\n\nPOST: It rose.\n\nThen it fell.\n\nTL;DR:",
        "postprocessed_response": " A model wrote this.",
        "reference_responses": " Loaf rose and fell.\n",
    }
    prompt = "SUBREDDIT: bread TITLE: My loaf POST: It rose.\n\nThen it fell."
    demonstration = parse_example(row, "here")
    assert (demonstration.prompt, demonstration.chosen) == ((user(prompt),), (assistant(" Loaf rose and fell.\n"),))
    compared = parse_example({"prompt": prompt, "chosen": "Bread.", "rejected": "No."}, "there")
    assert compared.prompt_id == demonstration.prompt_id


YES, NO = transcript("Hi", "Yes"), transcript("Hi", "No")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (comparison(chosen="Same", rejected="Same"), "responses? are identical"),
        (comparison(rejected=" "), "the rejected response is empty"),
        (comparison(chosen=""), "the chosen response is empty"),
        ({"chosen": YES, "rejected": f"{NO}\n\nHuman: Why?"}, "rejected ends with a user message"),
        ({"chosen": YES + transcript("Why?", "So"), "rejected": NO + transcript("Why?", "So")}, "differ before"),
        ({"chosen": YES, "rejected": transcript("Ho", "No")}, "differ before their last reply"),
        ({"chosen": "Yes", "rejected": "No"}, "there is no column prompt, and chosen is not a transcript"),
        ({"chosen": "Yes", "rejected": "No", "a": "Is it?"}, r"\['a', 'chosen', 'rejected'\]: if another"),
        ({"chosen": transcript("", "Yes"), "rejected": transcript("", "No")}, "last turn of the prompt is empty"),
        ({"chosen": YES}, r"column rejected is missing; the row has \['chosen'\]"),
        ({"chosen": None, "rejected": NO}, "column chosen must be text, found null"),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": 3}, "column rejected must be text, found a value of type int"),
        ({"prompt": None, "completion": "Yes"}, "column prompt must be text, found null"),
        ({"prompt": "\n\nHuman: Hi\n\nAssistant:", "completion": "Yes"}, "prompt is a transcript of several turns"),
        ({"prompt": "Hi\n<extra_id_1>Assistant\nHo", "completion": "Yes"}, "prompt is a transcript of several turns"),
        ({"prompt": [], "completion": "Yes"}, "column prompt must be a list of messages, found \\[\\]"),
        ({"prompt": [user("Hi"), assistant("Ho")], "completion": "Yes"}, "does not end with a user turn"),
        ({"prompt": ["Hi"], "completion": "Yes"}, "1 of prompt must be an object .*, found a value of type str"),
        ({"prompt": [user(None)], "completion": "Yes"}, "message 1 of prompt: column content must be text, found null"),
        ({"prompt": [{"role": "narrator", "content": "1"}], "completion": "Yes"}, "prompt: the role must be"),
        ({"prompt": [{"role": "tool", "content": "1"}], "completion": "Yes"}, "does not end with a user turn"),
        ({"prompt": "[{'role': 'user', 'content': 'Hi'}]", "completion": "Yes"}, "messages in Python's notation"),
        ({"prompt": "Hi", "completion": "Yes", "label": False}, "column label marks the response as"),
        ({"prompt": "Hi", "completion": "Yes", "label": "False"}, "column label marks the response as"),
        ({"messages": [user("Hi"), assistant("Yes")], "kto_tag": False}, "column kto_tag marks the response as"),
        ({"prompt": "Hi", "response": "Yes", "helpfulness": 0}, "column helpfulness is not supported"),
        ({"prompt": "Hi", "completions": [{"response": "Yes"}]}, "column completions is not supported"),
        ({"prompt": "Hi", "completion": "Yes", "weight": 0}, "column weight is 0; only 1 is supported"),
        ({"messages": [user("Hi"), assistant("Yes") | {"weight": 0}]}, "message of the response has weight 0"),
        ({"instruction": "Hi", "history": [["a", "b"]], "output": "Yes"}, "column history is not supported"),
        ({"prompt": PROMPT, "input": "So", "completion": "Yes"}, "column input cannot be combined with messages"),
        ({"system": "A", "messages": [SYSTEM, user("Hi"), assistant("Yes")]}, "column system differs from"),
        ({"messages": [user("Hi"), SKY, assistant("Yes")]}, "messages begins with a message of the tool"),
        ({"messages": [user("Hi"), CALL, SKY]}, "messages ends with a message of the tool"),
        ({"messages": [user("Hi")], "rejected_response": "No"}, "the chosen response is empty"),
        ({"prompt": "Hi", "completion": "Yes", "tools": "[{"}, "column tools is not JSON that can be read"),
        ({"prompt": "Hi", "response_0": "A", "response_1": "B", "better_response_id": 0, "safer_response_id": 1},
         "better_response_id 0 and safer_response_id 1 prefer neither"),
        ({"prompt": "Hi", "response_1": "A", "response_2": "B", "preference_strength": 0}, "strength 0 prefer neither"),
        ({"prompt": "Hi", "completion": "\ud800"}, "column completion contains half a surrogate pair"),
        ({"prompt": "Hi", "completion": " \n"}, "the response is empty"),
        ({"prompt": "Hi", "completion": [user("Ho"), assistant("Yes")]}, "do not match the end of prompt"),
        ({"messages": [assistant("Hi")]}, "does not end with a user turn"),
        ({"messages": "Hi"}, "column messages must be a list of messages, found a value of type str"),
        ({"chosen": [user("A"), assistant("Yes")], "rejected": [user("B"), assistant("No")]}, "differ before"),
        ({"chosen": [user("Hi")], "rejected": [user("Hi"), assistant("No")]}, "chosen ends with a user message"),
        ({"query": "Summarise.", "reference_responses": "No."}, "query must have the form SUBREDDIT"),
        ({"text": "Hi"}, r"the columns \['text'\] contain neither .* nor a prompt: .* problem$"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(row, message):
    """Every row that is not an example is a DataError that names the place, the column and the fault."""
    with pytest.raises(DataError, match=f"^a.jsonl line 7: .*{message}"):
        parse_example(row, "a.jsonl line 7")


def test_load_is_strict_unless_told():
    """An invalid row stops the load with the remedy; skip_invalid keeps the others, if any, and says which went."""
    rows = [("line 1", comparison()), ("line 2", comparison(rejected=" ")), ("line 3", comparison("Hi"))]
    with pytest.raises(DataError, match=r"^line 2: .*; drop the row or pass --skip-invalid$"):
        load_examples(rows)
    examples, skipped = load_examples(rows, skip_invalid=True)
    assert [example.where for example in examples] == ["line 1", "line 3"]
    assert skipped == ["line 2: the rejected response is empty"]
    with pytest.raises(DataError, match="all 1 rows are invalid; first: line 2: the rejected response is empty"):
        load_examples(rows[1:2], skip_invalid=True)
    with pytest.raises(DataError, match="there are no rows"):
        load_examples([])


def test_prompt_id_is_the_hash_of_roles_and_contents():
    """The id is the documented hash, whatever the key order of a message, and changes with any content or role."""
    expected = blake2b(rb'[["user","Gr\u00fc\u00dfe"]]', digest_size=8).hexdigest()
    assert prompt_id([user("Grüße")]) == prompt_id([{"content": "Grüße", "role": "user"}]) == expected
    others = [[user("Grüße ")], [assistant("Grüße")], [user("Grüße"), user("")], [user("Gr"), user("üße")]]
    assert len({expected, *map(prompt_id, others)}) == 5


@pytest.mark.timeout(10)
def test_a_huge_row_takes_no_time():
    """Rows of megabytes are parsed in a time that grows with their size, not with the square of it."""
    turns = ["a"] * 200_001
    example = parse_example({side: transcript(*turns, side) for side in ("chosen", "rejected")}, "here")
    assert [turn["content"] for turn in example.prompt] == turns
    assert said(example) == ("chosen", "rejected")
    post = "SUBREDDIT: r/a\n\nTITLE: b" + "\n\nPOST: c" * 300_000
    with pytest.raises(DataError, match=r"^here: query must have the form SUBREDDIT: r/…, TITLE: …, POST: …, TL;DR:$"):
        parse_example({"query": post, "reference_responses": "d"}, "here")
