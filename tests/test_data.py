import csv
import gzip
import json
import os
import re
from collections import Counter
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infalign import storage as data
from infalign.data.examples import MESSAGES, Example, load_examples, parse_example, prompt_id
from infalign.data.files import read_rows
from infalign.data.hub import hub_rows
from infalign.data.splits import split_by_group, without_groups_of
from infalign.errors import ConfigError, DataError, InfalignError
from infalign.storage import atomic_path, read_table, write_table, write_text

DATA = Path(os.environ.get("INFALIGN_DATA", Path(__file__).parents[2] / "shared" / "data"))
OFFICIAL = ["helpful-base", "harmless-base", "helpful-online", "helpful-rejection-sampled"]


def user(text):
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text):
    """Return an assistant message."""
    return {"role": "assistant", "content": text}


def transcript(*turns):
    """Alternate Human and Assistant, as Anthropic's files do."""
    return "".join(f"\n\n{'Assistant' if n % 2 else 'Human'}: {turn}" for n, turn in enumerate(turns))


def comparison(first="Why is the sky blue?", chosen="Air scatters blue light.", rejected="It is paint."):
    """Return a row of Anthropic's files."""
    return {"chosen": transcript(first, chosen), "rejected": transcript(first, rejected)}


def examples_of(*starts):
    """Return one example for each first user turn."""
    return [parse_example(comparison(start), f"row {n}") for n, start in enumerate(starts)]


# Files to rows


def write_jsonl(path, rows):
    """Write rows as lines of JSON."""
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())


def write_gzip(path, rows):
    """Write rows as gzipped lines of JSON."""
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write_csv(path, rows):
    """Write rows as CSV as Excel does, byte-order mark included."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    """Write rows as Parquet."""
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("ending", "write"),
    [(".jsonl", write_jsonl), (".jsonl.gz", write_gzip), (".csv", write_csv), (".parquet", write_parquet)],
)
def test_every_format_gives_the_rows_back(tmp_path, ending, write):
    """Text with newlines, quotes and Unicode line separators comes back unchanged from every file format."""
    rows = [
        comparison("One\u2028line, \x85 \x0b \x0c still one"),
        comparison('Say "hi", please'),
        comparison("Ünïcode 🙂"),
    ]
    path = tmp_path / f"rows{ending}"
    write(path, rows)
    assert [row for _, row in read_rows(path)] == rows


def test_lines_end_at_newline_only(tmp_path):
    """Raw U+2028, U+0085 and form feeds inside a line do not end it; a trailing carriage return and blank line may."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"a": "x\u2028y\x85z"}\r\n\r\n{"a": "b"}\n'.encode())
    assert list(read_rows(path)) == [(f"{path} line 1", {"a": "x\u2028y\x85z"}), (f"{path} line 3", {"a": "b"})]


def test_rows_stream(tmp_path):
    """The rows before a broken line arrive before the error."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n')
    rows = read_rows(path)
    assert next(rows) == (f"{path} line 1", {"a": 1})
    with pytest.raises(DataError, match="line 2: not JSON"):
        next(rows)


GZIPPED = gzip.compress(b"".join(b'{"a": %d}\n' % n for n in range(5000)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b"[]", r"the ending is none of \.jsonl, \.jsonl\.gz, \.parquet, \.csv"),
        ("rows.jsonl", b"", "holds no rows"),
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "line 2: the line is of type list, not an object"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        ("rows.jsonl", b"[" * 200_000, "line 1: not JSON"),
        ("rows.jsonl.gz", b'{"a": 1}\n', "cannot be read from its start"),
        ("rows.jsonl.gz", GZIPPED[: len(GZIPPED) // 2], r"cannot be read after .* line \d+"),
        ("rows.jsonl.gz", GZIPPED[:-8] + b"\0" * 8, "cannot be read after .* line 5000"),
        ("rows.parquet", b"PAR1 but not really", "cannot be read from its start"),
        ("rows.csv", b"a,b\n1,2\n3\n", "line 3: the header names 2 cells"),
        ("rows.csv", b"a,b\n1,2\n3,4,5\n", "line 3: the header names 2 cells"),
        ("rows.csv", b'a,b\n1,"2\n', "the row after .*'s header is no CSV .*is a quote not closed"),
        ("rows.csv", b'a,b\n1,2\n1,"2"3\n1,2\n', "the row after .* line 2 is no CSV"),
        ("rows.csv", b"a,b\n1," + b"2" * 200_000, "the row after .*'s header is no CSV .*field limit"),
        ("rows.csv", b"a,b\r1,2\r", "is no CSV"),
        ("rows.csv", b"a,b,a\n1,2,3\n", "the name 'a' stands there twice"),
        ("rows.jsonl", b'{"a": 1, "b": 2, "a": 3}\n', "line 1: not JSON .the name 'a' stands there twice"),
        ("rows.jsonl", b'{"a": "\0"}\n', "line 1: not JSON .Invalid control character"),
        ("rows.jsonl", b'{"a": 1}\n\xef\xbb\xbf{"a": 1}\n', "line 2: not JSON .*BOM"),
        ("rows.jsonl", b'{"a": 1}\n{"a": 1}\r{"a": 1}\n', "line 2: not JSON .Extra data"),
        ("rows.jsonl", b'{"a": 1}\n'.decode().encode("utf-16"), "line 1: not UTF-8"),
        ("rows.jsonl", b"\n \r\n\n", "holds no rows"),
        ("rows.jsonl.gz", GZIPPED + b"{}", "cannot be read after .* line 5000"),
        ("rows.csv", b"a,b\n", "holds no rows"),
        ("rows.csv", b"a,b\n1,\xff\n", "line 2: not UTF-8"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    """Every damaged, empty or foreign file is a DataError that names the file, the line and the fault."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)


def test_a_line_without_an_end_is_not_read_whole(tmp_path, monkeypatch):
    """A file that unpacks to one endless line is refused at the limit of a line, however big it is."""
    monkeypatch.setattr(data, "LONGEST_LINE", 1000)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' + b" " * 2000))
    with pytest.raises(DataError, match="line 2: longer than 1,000 bytes"):
        list(read_rows(path))


@pytest.mark.parametrize(
    "text", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_text_of_any_type_is_text(tmp_path, text):
    """Text columns may be large, views or dictionaries, and messages may have their fields in any order."""
    message = pa.struct([("content", pa.string()), ("name", pa.string()), ("role", pa.string())])
    columns = {"prompt": pa.array([[user("Hi")]], pa.large_list(message)), "completion": pa.array(["Yes"]).cast(text)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert load_examples(read_rows(tmp_path / "rows.parquet"))[0][0].chosen == "Yes"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([b"Yes"]), "row 0: column completion is of type bytes, not text"),
        (pa.array([1]), "row 0: column completion is of type int, not text"),
        (pa.nulls(1), "row 0: column completion is null, not text"),
        (pa.array([2**62], pa.duration("s")), "cannot be read from its start"),
    ],
)
def test_parquet_of_other_types_is_refused(tmp_path, column, message):
    """What is no text is not made one, and a value that Python cannot hold is an error of ours."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["Hi"], "completion": column}), path)
    with pytest.raises(DataError, match=message):
        load_examples(read_rows(path))
    pq.write_table(pa.Table.from_arrays([pa.array(["Hi"])] * 2, ["prompt", "prompt"]), path)
    with pytest.raises(DataError, match="the name 'prompt' stands there twice"):
        list(read_rows(path))


@pytest.mark.parametrize(
    "row",
    [
        {"query": "SUBREDDIT: r/a\n\nTITLE: b" + "\n\nPOST: c" * 300_000, "reference_responses": "d"},
        {side: transcript(*["a"] * 200_001, side) for side in ("chosen", "rejected")},
    ],
    ids=["posts", "turns"],
)
@pytest.mark.timeout(10)
def test_a_huge_row_takes_no_time(row):
    """A row of megabytes is parsed in a time that grows with its size, not with the square of it."""
    with suppress(DataError):
        parse_example(row, "here")


def test_absent_file_and_directory(tmp_path):
    """A missing file and a directory are told apart."""
    with pytest.raises(DataError, match="does not exist"):
        list(read_rows(tmp_path / "no.jsonl"))
    with pytest.raises(DataError, match="is a directory"):
        list(read_rows(tmp_path))
    with pytest.raises(DataError, match=r"cannot be read from its start .*name too long"):
        list(read_rows(tmp_path / f"{'x' * 300}.jsonl"))


# Rows to examples


def test_transcript_becomes_prompt_and_two_responses():
    """A transcript pair is cut where the last shared Assistant turn starts, and whitespace around turns goes."""
    row = {
        "chosen": transcript("Hi", "Hello.", "Name a colour ", "Blue.\n"),
        "rejected": transcript("Hi", "Hello.", "Name a colour ", " Seven."),
    }
    example = parse_example(row, "a.jsonl line 3")
    assert example == Example(
        (user("Hi"), assistant("Hello."), user("Name a colour")), "Blue.", "Seven.", "a.jsonl line 3"
    )


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_an_answer_in_two_turns_does_not_move_the_cut(longer):
    """Where one side answers in two consecutive turns, the prompt is the shared one and the answer has both parts."""
    shorter = "rejected" if longer == "chosen" else "chosen"
    row = {longer: transcript("Hi", "Well.") + "\n\nAssistant: Hello.", shorter: transcript("Hi", "Go away.")}
    example = parse_example(row, "here")
    assert example.prompt == (user("Hi"),)
    assert getattr(example, longer) == "Well.\n\nHello."
    assert getattr(example, shorter) == "Go away."


def test_a_shared_first_half_of_the_answer_belongs_to_the_answer():
    """When both answers start with one Assistant turn and go on in another, the prompt still ends with the user."""
    start = transcript("Hi", "Well.")
    row = {"chosen": f"{start}\n\nAssistant: Hello.", "rejected": f"{start}\n\nAssistant: Bye."}
    example = parse_example(row, "here")
    assert (example.prompt, example.chosen, example.rejected) == ((user("Hi"),), "Well.\n\nHello.", "Well.\n\nBye.")


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
PROMPT = [user("Hi"), assistant("Hello."), user("Name a colour")]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": f"{SAID}\n\nAssistant: Blue", "rejected": f"{SAID}\n\nAssistant: 7"},
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
    """A text prompt is one user turn, unchanged, and a system message before it does not change the group."""
    example = parse_example({"prompt": " Name a colour\n", "chosen": "Blue", "rejected": "7"}, "here")
    assert example.prompt == (user(" Name a colour\n"),)
    with_system = {"prompt": [{"role": "system", "content": "Be brief."}, *example.prompt], "completion": "Blue"}
    assert parse_example(with_system, "here").group == example.group
    assert parse_example(with_system, "here").prompt_id != example.prompt_id


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
    """An invalid row stops the load with the remedy; skip_invalid keeps the others and says which went."""
    rows = [("line 1", comparison()), ("line 2", comparison(rejected=" ")), ("line 3", comparison("Hi"))]
    with pytest.raises(DataError, match=r"^line 2: .*; drop the row or pass --skip-invalid$"):
        load_examples(rows)
    examples, skipped = load_examples(rows, skip_invalid=True)
    assert [example.where for example in examples] == ["line 1", "line 3"]
    assert skipped == ["line 2: the rejected response is empty"]


def test_nothing_left_is_an_error():
    """A load that ends with no example fails and says what was wrong with the first row."""
    with pytest.raises(DataError, match="all 1 are invalid, the first: line 1: the rejected response is empty"):
        load_examples([("line 1", comparison(rejected=" "))], skip_invalid=True)
    with pytest.raises(DataError, match="there are none"):
        load_examples([])


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


# Identities and splits


def test_prompt_id_is_the_hash_of_roles_and_contents():
    """The id is the documented hash, whatever the key order of a message, and changes with any content or role."""
    expected = blake2b(rb'[["user","Gr\u00fc\u00dfe"]]', digest_size=8).hexdigest()
    assert prompt_id([user("Grüße")]) == prompt_id([{"content": "Grüße", "role": "user"}]) == expected
    others = [[user("Grüße ")], [assistant("Grüße")], [user("Grüße"), user("")], [user("Gr"), user("üße")]]
    assert len({expected, *map(prompt_id, others)}) == 5


def test_group_is_the_first_user_turn():
    """Two conversations with one start share the group, not the prompt id."""
    short, long = (
        parse_example({"prompt": prompt, "completion": "Blue"}, "here")
        for prompt in ([user("Hi")], [user("Hi"), assistant("Hello."), user("Name a colour")])
    )
    assert short.group == long.group
    assert short.prompt_id != long.prompt_id


def test_no_group_is_in_two_parts():
    """Every part holds whole groups, the parts hold every example once, and their sizes are near the fractions."""
    short = examples_of(*[f"Question {n}" for n in range(3000)])
    longer = [Example((*e.prompt, assistant("Hm."), user("So?")), "Yes", "No", f"{e.where}, longer") for e in short]
    examples = short + longer
    parts = split_by_group(examples, {"train": 0.7, "valid": 0.1, "test": 0.2}, seed=3)
    assert sorted(e.where for part in parts.values() for e in part) == sorted(e.where for e in examples)
    groups = {name: {example.group for example in part} for name, part in parts.items()}
    assert sum(map(len, groups.values())) == len(set.union(*groups.values())) == 3000
    for name, fraction in {"train": 0.7, "valid": 0.1, "test": 0.2}.items():
        assert abs(len(groups[name]) - 3000 * fraction) < 4 * np.sqrt(3000 * fraction * (1 - fraction))


def test_a_group_stays_in_its_part():
    """The part of a group does not depend on the other rows, and does depend on the seed."""
    examples = examples_of(*[f"Question {n}" for n in range(200)])
    fractions = {"train": 0.5, "test": 0.5}
    whole = split_by_group(examples, fractions, seed=0)
    some = split_by_group(reversed(examples[50:90]), fractions, seed=0)
    assert {e.group for e in some["test"]} == {e.group for e in whole["test"]} & {e.group for e in examples[50:90]}
    assert split_by_group(examples, fractions, seed=1) != whole


def test_a_part_may_be_empty():
    """A fraction of zero gives an empty part, and a fraction of one gives everything."""
    examples = examples_of(*[f"Question {n}" for n in range(100)])
    parts = split_by_group(examples, {"none": 0.0, "all": 1.0, "last": 0.0}, seed=0)
    assert parts == {"none": [], "all": examples, "last": []}


@pytest.mark.parametrize(
    "fractions", [{"a": 0.5}, {"a": 1.5, "b": -0.5}, {}, {"a": float("nan")}, {"a": 0.7, "b": 0.7}]
)
def test_fractions_must_sum_to_one(fractions):
    """Fractions that are negative, not numbers or do not sum to 1 are a ConfigError."""
    with pytest.raises(ConfigError, match="sum to 1"):
        split_by_group([], fractions, seed=0)


def test_without_groups_of_drops_the_leak():
    """Train rows that start like a test row go, and their number is told."""
    train, test = examples_of("a", "b", "a", "c"), examples_of("a", "d")
    assert without_groups_of(train, test) == ([train[1], train[3]], 2)


# Files


def test_tables_round_trip(tmp_path):
    """A table of conversations comes back equal, whole or by column, and leaves one file."""
    rows = [{"prompt": PROMPT, "reward": 0.5}, {"prompt": [user("Hi")], "reward": 1.5}]
    table = pa.Table.from_pylist(rows, schema=pa.schema([("prompt", MESSAGES), ("reward", pa.float64())]))
    path = tmp_path / "shard=1" / "rows.parquet"  # a folder's name must not become a column
    path.parent.mkdir()
    write_table(path, table)
    assert read_table(path).equals(table)
    assert read_table(path, ["reward"]).to_pylist() == [{"reward": 0.5}, {"reward": 1.5}]
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(DataError, match=r"has no column \['score'\]"):
        read_table(path, ["reward", "score"])


def test_written_text_is_exact_and_follows_the_umask(tmp_path):
    """Text keeps its newlines, replaces the old file, and gets the mode of an ordinary new file."""
    path = tmp_path / "report.md"
    path.write_text("old")
    before = os.umask(0o027)
    try:
        write_text(path, "Φ\r\nβ\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == "Φ\r\nβ\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("old", [None, "old"])
def test_a_failed_write_leaves_what_was_there(tmp_path, old):
    """A write that fails half way leaves the old file, or none, and no temporary file."""
    path = tmp_path / "report.md"
    if old is not None:
        path.write_text(old)

    def stop_half_way():
        with atomic_path(path) as temporary:
            temporary.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == ({} if old is None else {"report.md": old})


def test_a_write_over_a_folder_leaves_no_temporary_file(tmp_path):
    """When the last step cannot replace the target, the temporary file goes too."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_flipped_byte_is_found(tmp_path):
    """One changed byte in a page of rewards fails its checksum, here and in read_rows, instead of becoming a reward."""
    path = tmp_path / "rewards.parquet"
    write_table(path, pa.table({"reward": np.random.default_rng(0).normal(size=1000)}))
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged .*CRC.*; delete it and run"):
        read_table(path)
    with pytest.raises(DataError, match=r"cannot be read from its start .*CRC"):
        list(read_rows(path))


def test_unreadable_tables_say_what_to_do(tmp_path):
    """A missing and a truncated table name the file and the next step."""
    path = tmp_path / "rewards.parquet"
    with pytest.raises(DataError, match="does not exist; run the step that writes it"):
        read_table(path)
    write_table(path, pa.table({"reward": [1.0, 2.0]}))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="is damaged"):
        read_table(path)


# The hub's layout


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder in the layout of Anthropic/hh-rlhf."""
    datasets = pytest.importorskip("datasets", reason="needs infalign[train]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hh" / "harmless-base"
    folder.mkdir(parents=True)
    write_gzip(folder / "train.jsonl.gz", [comparison("Hi"), comparison("Ho")])
    write_gzip(folder / "test.jsonl.gz", [comparison("Hey")])
    return tmp_path / "hh"


def test_hub_rows_of_a_local_folder(hub_folder):
    """A folder in the hub's layout gives the rows of its split, each with its place."""
    rows = list(hub_rows(str(hub_folder), split="train", data_dir="harmless-base"))
    source = f"{hub_folder}/harmless-base[train]"
    assert rows == [(f"{source} row 0", comparison("Hi")), (f"{source} row 1", comparison("Ho"))]


def test_hub_errors_are_ours(hub_folder):
    """An unknown split or folder is a ConfigError and a broken file a DataError, each in one line."""
    with pytest.raises(ConfigError, match=r'\[valid\] cannot be loaded \(Unknown split "valid"'):
        next(hub_rows(str(hub_folder), split="valid", data_dir="harmless-base"))
    with pytest.raises(ConfigError, match=r"/nowhere\[train\] cannot be loaded"):
        next(hub_rows(str(hub_folder), split="train", data_dir="nowhere"))
    (hub_folder / "broken").mkdir()
    (hub_folder / "broken" / "train.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"broken\[train\]: the files cannot be read .*row 1\)$"):
        next(hub_rows(str(hub_folder), split="train", data_dir="broken"))


# The real files


@cache
def real(name):
    """Return the rows of a real file by place, its examples, and why the others were skipped."""
    path = DATA / name
    if not path.exists():
        pytest.skip("the real preference data is absent (set INFALIGN_DATA to its folder)")
    rows = dict(read_rows(path))
    return rows, *load_examples(rows.items(), skip_invalid=True)


def official():
    """Return the official HH test files."""
    return [real(f"hh/{name}/test.jsonl.gz") for name in OFFICIAL]


def test_official_counts():
    """Of the 8,552 official HH test rows all parse but 36 identical pairs, 11 empty responses and 2 bad final turns."""
    faults = Counter(reason.split(": ", 1)[1] for _, _, skipped in official() for reason in skipped)
    assert sum(len(rows) for rows, _, _ in official()) == 8552
    assert faults["the chosen and the rejected response are identical, which says nothing"] == 36
    assert faults["the chosen response is empty"] + faults["the rejected response is empty"] == 11
    assert faults["the rejected transcript ends with a Human turn"] == 2
    assert faults.total() == 49
    bad_turns = [reason for reason in real("hh/helpful-online/test.jsonl.gz")[2] if "ends with a Human turn" in reason]
    assert [re.search(r"line (\d+)", reason)[1] for reason in bad_turns] == ["786", "1056"]


def test_the_common_prefix_fixes_seventeen_rows():
    """Split at the last Assistant turn, 17 parsed rows would have two prompts; here each has one."""

    def last_cut(text):
        return text[: text.rindex("\n\nAssistant:")]

    apart = sum(
        1
        for rows, examples, _ in official()
        for example in examples
        if last_cut(rows[example.where]["chosen"]) != last_cut(rows[example.where]["rejected"])
    )
    assert apart == 17


def test_official_transcripts_reassemble():
    """Prompt and response, written as a transcript, are the official text byte for byte unless turns were merged."""
    exact = merged = 0
    for rows, examples, _ in official():
        for example in examples:
            for side in ("chosen", "rejected"):
                text = rows[example.where][side]
                if re.search(r"\n\n(Human|Assistant):((?!\n\n(Human|Assistant):).)*\n\n\1:", text, re.DOTALL):
                    merged += 1
                    continue
                turns = [turn["content"] for turn in example.prompt] + [getattr(example, side)]
                exact += transcript(*turns) == text
    assert (exact, merged) == (16968, 38)


def test_the_leak_of_harmless_base():
    """2,054 harmless test rows, 2,050 of them valid, start like a train row; without_groups_of removes every one."""
    test_rows, test, _ = real("hh/harmless-base/test.jsonl.gz")
    train_rows, train, _ = real("hh/harmless-base/train.recovered.jsonl.gz")

    def first_turn(row):
        return row["chosen"].split("\n\nAssistant:")[0].strip()

    starts = {first_turn(row) for row in train_rows.values()}
    assert sum(first_turn(row) in starts for row in test_rows.values()) == 2054
    groups = {example.group for example in train}
    assert sum(example.group in groups for example in test) == 2050
    kept, dropped = without_groups_of(train, test)
    assert not {example.group for example in kept} & {example.group for example in test}
    assert (len(train), dropped) == (39880, 4526)


def test_tldr_files_agree():
    """All TL;DR rows parse, and 396 posts with a demonstration are prompts of the comparisons, letter for letter."""
    _, compared, not_compared = real("tldr/comparisons.validation.10000.jsonl.gz")
    _, demonstrated, not_demonstrated = real("tldr/sft.validation.1945.jsonl.gz")
    assert (len(compared), not_compared, len(demonstrated), not_demonstrated) == (10000, [], 1945, [])
    assert len({e.prompt_id for e in compared} & {e.prompt_id for e in demonstrated}) == 396
