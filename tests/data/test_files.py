"""Files to rows: every format gives its rows back, and every bad file is named."""

import gzip
import json
import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import assistant, comparison, user, written

from infalign.core.errors import DataError
from infalign.data import lines
from infalign.data.examples import load_examples
from infalign.data.files import read_rows


@pytest.mark.parametrize("ending", [".jsonl", ".json", "list.json", ".jsonl.gz", ".json.xz", ".csv", ".parquet"])
def test_every_format_gives_the_rows_back(tmp_path, ending):
    """Text with newlines, quotes and Unicode line separators comes back unchanged from every file format."""
    asked = ("One\u2028line, \x85 \x0b \x0c still one", 'Say "hi", please', "Ünïcode 🙂")
    rows = [comparison(first) for first in asked]
    path = written(tmp_path / f"rows{ending}", rows)
    if ending == "list.json":
        path.write_text("\n" + json.dumps(rows, indent=1))
    assert [row for _, row in read_rows(path)] == rows


def test_an_empty_cell_of_csv_is_null(tmp_path):
    """CSV has no other way to say that a row has no value."""
    (tmp_path / "rows.csv").write_text('prompt,chosen,rejected,completion\nHi,Yes,No,\nHo,,"",Yes\n')
    examples, _ = load_examples(read_rows(tmp_path / "rows.csv"))
    assert [(e.rejected is None, dict(e.columns)) for e in examples] == [(False, {}), (True, {})]


MANY = 3_500
SHARED = pa.DictionaryArray.from_arrays(pa.array([0] * MANY, pa.int32()), ["x" * 1_000_000])
BOMBS = {  # a table, and how it is written
    "a text": ({"prompt": SHARED}, {}),
    "a text in messages": ({"messages": pa.ListArray.from_arrays(pa.array(range(MANY + 1), pa.int32()),
        pa.StructArray.from_arrays([SHARED], ["content"]))}, {}),
    "a text in maps": ({"n": pa.MapArray.from_arrays(pa.array(range(MANY + 1), pa.int32()), SHARED, SHARED)}, {}),
    "texts that begin alike": ({"prompt": ["x" * 4_000_000] * 40}, {
        "use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}),
    "bytes of one length": ({"prompt": pa.array([b"x" * 1_000_000] * 200, pa.binary(1_000_000))}, {}),
    "numbers": ({"n": pa.nulls(40_000_000, pa.int8())}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "texts that begin alike")) for name in BOMBS]
)
def test_a_small_parquet_file_does_not_fill_the_memory(tmp_path, name):
    """What stands for many equal values is measured before it is written out, wherever it is in a row."""
    columns, options = BOMBS[name]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False, **options)
    assert path.stat().st_size < 100_000
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match=r"rows.parquet has [\d,]+ bytes and expands to more than 134,217,728"):
        next(read_rows(path))
    assert pa.total_allocated_bytes() - before < 2**20


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_many_columns_are_read_in_the_time_of_their_bytes(tmp_path, ending):
    """A name that occurs twice among them is found as fast as none."""
    names = [f"c{i}" for i in range(40_000)]
    path, seconds = tmp_path / f"rows{ending}", []
    for header in (names, [*names, names[-1]]):
        as_json = ", ".join(f'"{name}": 1' for name in header)
        as_csv = ",".join(header) + "\n" + ",".join("1" * len(header))
        path.write_text(f"{{{as_json}}}\n" if ending == ".jsonl" else as_csv)
        begun = time.process_time()
        with suppress(DataError):
            assert len(next(read_rows(path))[1]) == len(names)
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 4 * seconds[0] + 0.1
    with pytest.raises(DataError, match=f"the name '{names[-1]}' occurs twice"):
        next(read_rows(path))


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
        ("rows.txt", b"[]", r"must end in one of \.jsonl, \.jsonl\.gz, .*\.parquet, \.csv"),
        ("rows.json", b"[]", "holds no rows"),
        ("rows.json", b'[{"a": 1},\n2]', "item 1: the row must be an object with columns, found a value of type int"),
        ("rows.json", b'[{"a": 1},\n{"a": ]', "not JSON"),
        ("rows.jsonl", b"", "holds no rows"),
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "line 2: the row must be an object .* found a value of type list"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        ("rows.jsonl", b"[" * 200_000, "line 1: not JSON"),
        ("rows.jsonl.gz", b'{"a": 1}\n', "cannot be read from the start"),
        ("rows.jsonl.gz", GZIPPED[: len(GZIPPED) // 2], r"cannot be read after .* line \d+"),
        ("rows.jsonl.gz", GZIPPED[:-8] + b"\0" * 8, "cannot be read after .* line 5000"),
        ("rows.parquet", b"PAR1 but not really", "cannot be read from the start"),
        ("rows.csv", b"a,b\n1,2\n3\n", "line 3: the header has 2 cells"),
        ("rows.csv", b'a,b\n1,"2\n', "the row after .*'s header is not valid CSV .*unclosed quote"),
        ("rows.csv", b'a,b\n1,2\n1,"2"3\n1,2\n', "the row after .* line 2 is not valid CSV"),
        ("rows.csv", b"a,b\n1," + b"2" * 200_000, "the row after .*'s header is not valid CSV .*field limit"),
        ("rows.csv", b"a,b\r1,2\r", "is not valid CSV"),
        ("rows.csv", b"a,b,a\n1,2,3\n", "the name 'a' occurs twice.; correct the file"),
        ("rows.csv", b"a;b\n1;2\n", "the only column is 'a;b'; separate columns by commas instead of ';'"),
        ("rows.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "line 1: not JSON that can be read .*5000 digits"),
        ("rows.jsonl", b'{"a": 1, "b": 2, "a": 3}\n', "line 1: not JSON that can be read .the name 'a' occurs twice"),
        ("rows.jsonl", b'{"a": "\0"}\n', "line 1: not JSON that can be read .Invalid control character"),
        ("rows.jsonl", b'{"a": 1}\n\xef\xbb\xbf{"a": 1}\n', "line 2: not JSON .*BOM"),
        ("rows.jsonl", b'{"a": 1}\n{"a": 1}\r{"a": 1}\n', "line 2: not JSON that can be read .Extra data"),
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
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
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
    assert load_examples(read_rows(tmp_path / "rows.parquet"))[0][0].chosen == (assistant("Yes"),)


def test_absent_file_and_directory(tmp_path):
    """A missing file and a directory are told apart."""
    with pytest.raises(DataError, match="does not exist"):
        list(read_rows(tmp_path / "no.jsonl"))
    with pytest.raises(DataError, match="is a directory"):
        list(read_rows(tmp_path))
    with pytest.raises(DataError, match=r"cannot be read from the start .*name too long"):
        list(read_rows(tmp_path / f"{'x' * 300}.jsonl"))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, replaced):
    """Another process adds a row, or puts another file there: what was read is not what is there."""
    path = written(tmp_path / "rows.jsonl", [{"a": 1}, {"a": 2}])
    rows = read_rows(path)
    next(rows)
    if replaced:
        written(tmp_path / "other.jsonl", [{"a": 3}]).replace(path)
    else:
        with path.open("a") as file:
            file.write('{"a": 3}\n')
    with pytest.raises(DataError, match="changed while it was read; rerun"):
        list(rows)
