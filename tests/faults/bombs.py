"""Files from elsewhere that are odd or expand without limit: refused by name."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rows import lines

from faults.data import ROWS
from faults.lab import Lab, Seen, told
from faults.registry import fault
from infalign.data.files import read_rows


def pages(path: Path) -> None:
    """Write a small Parquet file with large pages."""
    pq.write_table(pa.table({"prompt": ["x" * 500_000_000] * 2}), path, compression="brotli", use_dictionary=False)


def gzipped(content: bytes, times: int) -> Callable[[Path], None]:
    """Return what writes a gzipped file that repeats a content."""
    return lambda path: path.write_bytes(b"".join([gzip.compress(content * 1000, mtime=0)] * times)) and None


@fault(
    3,
    {
        "pages of half a gigabyte": ("rows.parquet", pages),
        "blank lines": ("rows.jsonl.gz", gzipped(b"\n" * 1000, 200)),
        "blank lines and a row": ("rows.jsonl.gz", gzipped(b"\n" * 999 + json.dumps(ROWS[0]).encode() + b"\n", 200)),
        "a row two million times": ("rows.jsonl.gz", gzipped(lines(ROWS[:1]), 2_000)),
        "a line of 200 MB": ("rows.jsonl.gz", gzipped(b'"' * 1000, 200)),
    },
    brief=("blank lines",),
)
def bomb(lab: Lab, name: str, write: Callable[[Path], None]) -> Seen:
    """A small data file expands without limit → Its size; write it uncompressed if that is meant."""
    path = lab.folder / name
    write(path)
    assert path.stat().st_size < 4_000_000
    seen = told(lambda: sum(1 for _ in read_rows(path)))
    assert str(path) in seen.said
    return seen


@fault(0, brief=True)
def compress_well(lab: Lab) -> None:
    """Real data compress well → Nothing; the limit is ten times what text compresses to."""
    rows = [row | {"prompt": "You are a helpful assistant. " * 20 + row["prompt"]} for row in ROWS] * 20
    (lab.folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    pq.write_table(pa.Table.from_pylist(rows), lab.folder / "rows.parquet", compression="zstd")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        assert [row for _, row in read_rows(lab.folder / name)] == rows
