"""Files from elsewhere that are odd or expand without limit: refused by name."""

import gzip
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import micro
import pyarrow as pa
import pyarrow.parquet as pq

from faults.artefacts import model
from faults.data import ROWS, infalign, lines, recipe
from faults.registry import Lab, Seen, fault
from faults.rewards import told
from infalign.data.files import read_rows
from infalign.models.pretrained import conversation_ids, load_tokenizer, model_digest

# Model folders


def split_by(folder: Path, regex: str) -> None:
    """Let the tokenizer of a model folder split text by a regular expression."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": split}))


@fault("a tokenizer's regular expression makes Rust panic at one text only", brief=True)
def rare_panic(lab: Lab) -> Seen:
    """The prompt is named."""
    folder = model(lab, "reference")
    split_by(folder, "(z|z|zz)+x")
    talk = [{"role": "user", "content": "z" * 2000}]
    return told(lambda: conversation_ids(load_tokenizer(folder), talk, add_generation_prompt=True))


@fault("a named pipe lies in a model folder", brief=True)
def pipe(lab: Lab) -> Seen:
    """Nobody waits for its writer."""
    folder = model(lab, "reference")
    os.mkfifo(folder / "added_tokens.json")
    return told(lambda: model_digest(str(folder)))


@fault("a directory has the name of a model's file")
def directory(lab: Lab) -> Seen:
    """It is named before anything is loaded."""
    folder = model(lab, "reference")
    (folder / "vocab.json").mkdir()
    return told(lambda: model_digest(str(folder)))


# Data


def bad_file(lab: Lab, name: str, write: Callable[[Path], object]) -> Seen:
    """It is refused by name, with few bytes read of what it would expand to."""
    path = lab.folder / name
    write(path)
    assert path.stat().st_size < 4_000_000
    seen = told(lambda: sum(1 for _ in read_rows(path)))
    assert (seen.code, str(path) in seen.said) == (3, True)
    return seen


def pages(path: Path) -> None:
    """Write a small Parquet file with large pages."""
    column = {"prompt": ["x" * 500_000_000] * 2}
    pq.write_table(pa.table(column), path, compression="brotli", use_dictionary=False)


def gzipped(content: bytes, times: int) -> Callable[[Path], None]:
    """Return what writes a gzipped file that repeats a content."""

    def write(path: Path) -> None:
        with gzip.open(path, "wb") as file:
            for _ in range(times):
                file.write(content * 1000)

    return write


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a Parquet file of 2 kB has pages of half a gigabyte": ("rows.parquet", pages),
    "a gzipped file of 1 MB has a thousand million blank lines": ("rows.jsonl.gz", gzipped(b"\n", 1_000_000)),
    "a gzipped file of blank lines has a row now and then": (
        "rows.jsonl.gz",
        gzipped(b"\n" * 999 + json.dumps(ROWS[0]).encode() + b"\n", 200),
    ),
    "a gzipped file repeats a row two million times": ("rows.jsonl.gz", gzipped(lines(ROWS[:1]), 2_000)),
    "a gzipped file is one line of 200 MB": ("rows.jsonl.gz", gzipped(b'"' * 1000, 200)),
}
for what, (name, write) in FILES.items():
    fault(what, brief="blank lines" in what)(partial(bad_file, name=name, write=write))


@fault("a data set's folder has a Parquet file that expands without limit")
def in_a_folder(lab: Lab) -> Seen:
    """It is refused before datasets reads it."""
    folder = lab.folder / "rows"
    folder.mkdir()
    pages(folder / "train.parquet")
    settings = micro.settings(lab.folder / "run") | {
        "data": {"sources": [{"hub": str(folder)}], "max_prompt_tokens": 180}
    }
    code, _, said = infalign("data", recipe(lab, settings))
    assert "train.parquet" in said
    return Seen(code, said)


@fault("real data compress well", brief=True)
def compress_well(lab: Lab) -> Seen:
    """Rows that share a long text are read: what is refused is a hundred times more than text compresses to."""
    rows = [row | {"prompt": "You are a helpful assistant. " * 20 + row["prompt"]} for row in ROWS] * 20
    (lab.folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    pq.write_table(pa.Table.from_pylist(rows), lab.folder / "rows.parquet", compression="zstd")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        assert [row for _, row in read_rows(lab.folder / name)] == rows
    return Seen(0, "")
