"""Rows to examples: transcripts, conversations and demonstrations, what is refused, and who shares an identity."""

import re
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import PROMPT, assistant, comparison, transcript, user

from infalign.core.errors import DataError, InfalignError
from infalign.data.examples import Example, load_examples, parse_example, prompt_id


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
    sides = ("".join(f"\n\nAssistant: {turn}" for turn in side) for side in (chosen, rejected))
    example = parse_example(
        dict(zip(("chosen", "rejected"), (transcript("Hi") + s for s in sides), strict=True)), "here"
    )
    assert (example.prompt, example.chosen, example.rejected) == ((user("Hi"),), *answers)


def test_consecutive_turns_of_one_role_merge():
    """Two Human turns in a row become one with a blank line between, and an empty earlier turn stays a turn."""
    start = "\n\nHuman: Hi\n\nHuman: Anybody?\n\nAssistant: \n\nHuman: Hello?"
    row = {"chosen": f"{start}\n\nAssistant: Yes.", "rejected": f"{start}\n\nAssistant: No."}
    assert parse_example(row, "here").prompt == (user("Hi\n\nAnybody?"), assistant(""), user("Hello?"))


def test_inline_speakers_are_text():
    """``Human:`` and ``Assistant:`` that do not follow a blank line are what somebody wrote."""
    first = "Write a play.\nHuman: Hi\nAssistant: Hello. Human: Bye"
    example = parse_example(comparison(first, "Human: Hi\nAssistant: Yes", "No"), "here")
    assert (example.prompt, example.chosen) == ((user(first),), "Human: Hi\nAssistant: Yes")


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
    assert (example.chosen, example.rejected) == (chosen, rejected)


SAID = transcript("Hi", "Hello.", "Name a colour")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": f"{SAID} \n\nAssistant: Blue\n", "rejected": f"{SAID} \n\nAssistant:  7"},
        {"prompt": PROMPT, "chosen": " Blue\n", "rejected": "7"},
        {"prompt": PROMPT, "chosen": [assistant("Blue")], "rejected": "7"},
        {"prompt": PROMPT, "chosen": [*PROMPT, assistant("Blue")], "rejected": [PROMPT[-1], assistant("7")], "n": 3},
        {"chosen": [*PROMPT, assistant("Blue")], "rejected": [*PROMPT, assistant("7")]},
    ],
)  # fmt: skip
def test_comparison_forms_agree(row):
    """One comparison reads the same from transcripts, from an explicit prompt and from conversations."""
    assert parse_example(row, "here") == Example(tuple(PROMPT), "Blue", "7", "here")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "completion": "Blue "},
        {"prompt": PROMPT, "completion": [assistant("Blue")]},
        {"messages": [*PROMPT, assistant("Blue")]},
        {"messages": [*PROMPT, assistant("Blue")], "prompt": "ignored beside messages"},
    ],
)
def test_demonstration_forms_agree(row):
    """One demonstration reads the same from prompt and completion and from messages, and rejects nothing."""
    assert parse_example(row, "here") == Example(tuple(PROMPT), "Blue", None, "here")


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
    assert demonstration == Example((user(prompt),), "Loaf rose and fell.", None, "here")
    compared = parse_example({"prompt": prompt, "chosen": "Bread.", "rejected": "No."}, "there")
    assert compared.prompt_id == demonstration.prompt_id


YES, NO = transcript("Hi", "Yes"), transcript("Hi", "No")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (comparison(chosen="Same", rejected=" Same "), "identical, which says nothing"),
        (comparison(rejected=" "), "the rejected response is empty"),
        (comparison(chosen=""), "the chosen response is empty"),
        ({"chosen": YES, "rejected": f"{NO}\n\nHuman: Why?"}, "rejected transcript ends with a Human turn"),
        ({"chosen": YES + transcript("Why?", "So"), "rejected": NO + transcript("Why?", "So")}, "their last Human"),
        ({"chosen": YES, "rejected": transcript("Ho", "No")}, "share no prompt"),
        ({"chosen": "Yes", "rejected": "No"}, "there is no prompt, and chosen is no transcript"),
        ({"chosen": "Yes", "rejected": "No", "id": "a"}, r"\['chosen', 'id', 'rejected'\] and needs prompt, chosen"),
        ({"chosen": "Yes", "rejected": "No", "a": "Is it?", "b": "It is."}, "and needs prompt, chosen and rejected"),
        ({"chosen": transcript("", "Yes"), "rejected": transcript("", "No")}, "last turn of the prompt is empty"),
        ({"chosen": YES}, r"column rejected is missing; the row has \['chosen'\]"),
        ({"chosen": None, "rejected": NO}, "column chosen is null, not text"),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": 3}, "column rejected is of type int, not text"),
        ({"prompt": None, "completion": "Yes"}, "column prompt is null, not text"),
        ({"prompt": "\n\nHuman: Hi\n\nAssistant:", "completion": "Yes"}, "prompt is a Human/Assistant transcript"),
        ({"prompt": [], "completion": "Yes"}, "column prompt is empty, not a list of messages"),
        ({"prompt": [user("Hi"), assistant("Ho")], "completion": "Yes"}, "does not end with a user turn"),
        ({"prompt": ["Hi"], "completion": "Yes"}, "message 1 of prompt is of type str, not an object"),
        ({"prompt": [user(None)], "completion": "Yes"}, "message 1 of prompt: column content is null"),
        ({"prompt": [{"role": "tool", "content": "1"}], "completion": "Yes"}, "message 1 of prompt has the role"),
        ({"prompt": "Hi", "completion": "\ud800"}, "column completion holds half a surrogate pair"),
        ({"prompt": "Hi", "completion": " \n"}, "the response is empty"),
        ({"prompt": "Hi", "completion": [user("Ho"), assistant("Yes")]}, "that are not the end of prompt"),
        ({"messages": [user("Hi")]}, "messages ends with a message of the user"),
        ({"messages": [assistant("Hi")]}, "does not end with a user turn"),
        ({"messages": "Hi"}, "column messages is of type str, not a list"),
        ({"chosen": [user("Hi"), assistant("Yes")], "rejected": [user("Ho"), assistant("No")]}, "their last message"),
        ({"query": "Summarise.", "reference_responses": "No."}, "query is not of the form SUBREDDIT"),
        ({"text": "Hi"}, r"the columns \['text'\] hold neither"),
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
    with pytest.raises(DataError, match="all 1 are invalid, the first: line 2: the rejected response is empty"):
        load_examples(rows[1:2], skip_invalid=True)
    with pytest.raises(DataError, match="there are none"):
        load_examples([])


def test_a_misnamed_column_is_to_be_renamed():
    """Where one other column holds text, it may be the prompt of every row, so none is dropped for it."""
    row = {"id": "a7", "question": "Name a colour", "chosen": "Blue", "rejected": "7"}
    said = r"; the row has \['chosen', 'id', 'question', 'rejected'\]: rename question to prompt$"
    with pytest.raises(DataError, match=said):
        load_examples([("line 1", row)])
    with pytest.raises(DataError, match=f"all 1 are invalid, the first: line 1: .*{said}"):
        load_examples([("line 1", row)], skip_invalid=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
        | st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": inner})
    ),
    max_leaves=8,
)
TRANSCRIPTS = st.lists(st.sampled_from(["\n\nHuman:", "\n\nAssistant:", " Hi", "\n", ""]), max_size=8).map("".join)
COLUMNS = ["prompt", "chosen", "rejected", "completion", "messages", "query", "reference_responses", "text"]


@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES | TRANSCRIPTS), max_size=4), st.booleans())
def test_arbitrary_rows_raise_only_our_errors(rows, skip_invalid):
    """Whatever JSON a row holds, loading returns sound examples or raises an error of infalign."""
    try:
        examples, skipped = load_examples([("here", row) for row in rows], skip_invalid=skip_invalid)
    except InfalignError:
        return
    assert len(examples) + len(skipped) == len(rows)
    for example in examples:
        assert example.prompt[-1]["role"] == "user"
        assert example.chosen.strip()
        assert example.chosen != example.rejected
        assert re.fullmatch("[0-9a-f]{16}", example.group)


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
    assert (example.chosen, example.rejected) == ("chosen", "rejected")
    post = "SUBREDDIT: r/a\n\nTITLE: b" + "\n\nPOST: c" * 300_000
    with pytest.raises(DataError, match=r"^here: query is not of the form SUBREDDIT: r/…, TITLE: …, POST: …, TL;DR:$"):
        parse_example({"query": post, "reference_responses": "d"}, "here")
