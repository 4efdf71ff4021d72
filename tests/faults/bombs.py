"""Small files that ask for much: refused by name before they take the machine."""

import gzip
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from faults.artefacts import model
from faults.data import ROWS, infalign, lines, recipe
from faults.registry import Lab, Seen, fault
from faults.rewards import told
from infalign import confined
from infalign.data.files import read_rows
from infalign.models.pretrained import conversation_ids, load_tokenizer, model_digest
from infalign.models.rehearsal import check_harmless

MOST = {confined.GIGABYTES: "2", confined.SECONDS: "12"}  # of which importing transformers takes a third

# Model folders


def bomb(lab: Lab, change: Callable[[Path], None]) -> Seen:
    """A dry run refuses the folder by name, in one sentence, and leaves no process behind."""
    folder, root = model(lab, "reference"), lab.folder / "run"
    change(folder)
    settings = micro.settings(root) | {"policy": {"model": str(folder)}}
    before = psutil.Process().children()
    with patch.dict(os.environ, MOST):
        code, _, said = infalign("run", recipe(lab, settings), "--dry-run")
    assert (code, root.exists()) == (2, False), said
    assert said.count("\n") == 1
    assert str(folder) in said
    assert psutil.Process().children() == before
    return Seen(code, said)


def template(source: str) -> Callable[[Path], None]:
    """Return what gives a model folder another chat template."""
    return lambda folder: (folder / "chat_template.jinja").write_text(source) and None


def change_json(folder: Path, name: str, changes: dict[str, Any]) -> None:
    """Change keys of a JSON file of a model folder."""
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def configured(**changes: Any) -> Callable[[Path], None]:
    """Return what changes keys of a model folder's config.json."""
    return lambda folder: change_json(folder, "config.json", changes)


def split_by(regex: str) -> Callable[[Path], None]:
    """Return what lets a tokenizer split text by a regular expression."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return lambda folder: change_json(folder, "tokenizer.json", {"pre_tokenizer": split})


BOMBS = {
    "a chat template has a loop in a loop": template(
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    ),
    "a chat template multiplies a letter by five thousand millions": template("{{ 'x' * 5000000000 }}"),
    "a chat template formats the time a hundred million times": template("{{ strftime_now('%Y' * 10**8) }}"),
    "a chat template pads a letter to five thousand million": template("{{ 'x' | center(5 * 10**9) }}"),
    "a chat template doubles a text forty times": template(
        "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "a chat template calls itself twice, sixty deep": template(
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a chat template is a bomb for conversations of several turns only": template(
        "{% if messages | length > 2 %}{{ 'x' * 5000000000 }}{% endif %}{{ messages[0]['content'] }}"
    ),
    "config.json asks for ten million layers": configured(num_hidden_layers=10**7),
    "config.json asks for a vocabulary of a thousand million": configured(vocab_size=10**9),
    "config.json asks for a width of a million": configured(hidden_size=2**20),
    "a tokenizer's regular expression makes Rust panic": split_by("(l|l|ll)+x|(.|.|..)+$(?<!.)"),
}
for what, change in BOMBS.items():
    fault(what, brief=what.startswith("config.json asks for a vocabulary"))(partial(bomb, change=change))


@fault("the reward model of a run is a bomb")
def in_a_run(lab: Lab) -> Seen:
    """No stage is begun."""
    folder, root = model(lab, "reward"), lab.folder / "run"
    configured(vocab_size=10**9)(folder)
    code, _, said = infalign("run", recipe(lab, micro.settings(root) | {"reward": {"model": str(folder)}}))
    assert (code, str(folder) in said) == (2, True), said
    assert not list(root.glob("stages/*"))
    return Seen(code, said)


@fault("a tokenizer's regular expression makes Rust panic at one text only", brief=True)
def rare_panic(lab: Lab) -> Seen:
    """The prompt is named."""
    folder = model(lab, "reference")
    split_by("(z|z|zz)+x")(folder)
    check_harmless(folder)
    talk = [{"role": "user", "content": "z" * 2000}]
    return told(lambda: conversation_ids(load_tokenizer(folder), talk, add_generation_prompt=True))


@fault("a named pipe lies in a model folder", brief=True)
def pipe(lab: Lab) -> Seen:
    """Nobody waits for its writer."""
    folder = model(lab, "reference")
    os.mkfifo(folder / "added_tokens.json")
    seen = told(lambda: model_digest(str(folder)))
    assert told(lambda: check_harmless(folder)) == seen
    return seen


@fault("a directory has the name of a model's file")
def directory(lab: Lab) -> Seen:
    """It is named before anything is loaded."""
    folder = model(lab, "reference")
    (folder / "vocab.json").mkdir()
    return told(lambda: model_digest(str(folder)))


@fault("a limit on what a file may ask for is no number", brief=True)
def no_number(lab: Lab) -> Seen:
    """The variable is named."""
    with patch.dict(os.environ, {confined.GIGABYTES: "much"}):
        return told(lambda: check_harmless(lab.finished / "models" / "reference"))


@fault("a model folder needs more than the limit, and the limit is raised")
def raised(lab: Lab) -> Seen:
    """The sentence names the variable, with which the same folder is taken."""
    folder = model(lab, "reference")
    with patch.dict(os.environ, {confined.SECONDS: "1"}):
        seen = told(lambda: check_harmless(folder))
    assert confined.SECONDS in seen.said
    with patch.dict(os.environ, {confined.SECONDS: "300"}):
        check_harmless(folder)
    return seen


# Data


def bad_file(lab: Lab, name: str, write: Callable[[Path], object]) -> Seen:
    """It is refused by name, with few bytes read of what it would expand to."""
    path = lab.folder / name
    write(path)
    assert path.stat().st_size < 4_000_000
    seen = told(lambda: sum(1 for _ in read_rows(path)))
    assert (seen.code, str(path) in seen.said) == (3, True)
    return seen


def table(column: Any, **options: Any) -> Callable[[Path], None]:
    """Return what writes a Parquet file with one column."""
    return lambda path: pq.write_table(pa.table({"prompt": column}), path, **options)


def repeated(text: str, rows: int) -> Any:
    """Return a column that stores a text once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def talk(text: str, rows: int) -> Any:
    """Return a column of conversations that store a text once."""
    turn = pa.StructArray.from_arrays([repeated("user", rows), repeated(text, rows)], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), turn)


def gzipped(content: bytes, times: int) -> Callable[[Path], None]:
    """Return what writes a gzipped file that repeats a content."""

    def write(path: Path) -> None:
        with gzip.open(path, "wb") as file:
            for _ in range(times):
                file.write(content * 1000)

    return write


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a Parquet file of 1 kB repeats a text of a megabyte 5,000 times": (
        "rows.parquet",
        table(repeated("x" * 10**6, 5000), compression="zstd"),
    ),
    "a Parquet file of 2 kB has pages of half a gigabyte": (
        "rows.parquet",
        table(["x" * 500_000_000] * 2, compression="brotli", use_dictionary=False),
    ),
    "a Parquet file repeats a conversation of a megabyte 5,000 times": (
        "rows.parquet",
        table(talk("x" * 10**6, 5000), compression="zstd"),
    ),
    "a gzipped file of 1 MB has a thousand million blank lines": ("rows.jsonl.gz", gzipped(b"\n", 1_000_000)),
    "a gzipped file of blank lines has a row now and then": (
        "rows.jsonl.gz",
        gzipped(b"\n" * 999 + json.dumps(ROWS[0]).encode() + b"\n", 200),
    ),
    "a gzipped file repeats a row two million times": ("rows.jsonl.gz", gzipped(lines(ROWS[:1]), 2_000)),
    "a gzipped file is one line of 200 MB": ("rows.jsonl.gz", gzipped(b'"' * 1000, 200)),
}
for what, (name, write) in FILES.items():
    fault(what, brief="blank lines" in what or "5,000" in what)(partial(bad_file, name=name, write=write))


@fault("a data set's folder has a Parquet file that expands without limit")
def in_a_folder(lab: Lab) -> Seen:
    """It is refused before datasets reads it."""
    folder = lab.folder / "rows"
    folder.mkdir()
    table(repeated("x" * 10**6, 5000), compression="zstd")(folder / "train.parquet")
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
