"""Dirty data, and recipes that are wrong or evil: refused with the place, or counted; no finished work is touched."""

import gzip
import io
import json
import re
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from faults.registry import Lab, Seen, again, fault, tables
from infalign import cli
from infalign.core.storage import read_record, read_table
from infalign.world import preferences

ROWS = [
    {"prompt": asked, "chosen": chosen, "rejected": rejected}
    for asked, chosen, rejected in preferences(200, seed=0, temperature=1.0)
]


def infalign(*words: object) -> tuple[int, str, str]:
    """Run a command line in this process and return exit code, output and the sentence of the error."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    try:
        with patch.object(sys, "argv", ["infalign", *map(str, words)]), redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as stopped:
        code = stopped.code
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue().removeprefix("infalign: ")


def lines(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as lines of JSON."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def reading(lab: Lab, root: Path, name: str, content: bytes | None) -> str:
    """Write a file of data, or a directory, and a recipe for ``root`` that reads it, and return the recipe's path."""
    if content is None:
        (lab.folder / name).mkdir()
    else:
        (lab.folder / name).write_bytes(content)
    data = {"folder": str(lab.folder), "sources": [{"path": name}], "max_prompt_tokens": 180}
    return recipe(lab, micro.settings(root) | {"data": data})


def recipe(lab: Lab, settings: dict[str, Any]) -> str:
    """Write a recipe and return its path."""
    return micro.write(lab.folder / "recipe.yaml", settings)


def state(root: Path, *but: str) -> dict[str, tuple[int, int]]:
    """Return time and size of every file and folder of a run, without those whose name begins with ``but``."""
    found = {file.relative_to(root).as_posix(): file.stat() for file in root.rglob("*")}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items() if not name.startswith(but)}


def refused(lab: Lab, name: str, content: bytes | None, *words: str) -> Seen:
    """Point the finished run at a file, or at a directory; exit code 3 comes before any work on it is touched."""
    root = lab.copy()
    path = reading(lab, root, name, content)
    names = ("data", "stages", "recipe.yaml", "digests.json", ".lock", "holder.json")
    before = state(root, *names)
    code, _, said = infalign("run", path, *words)
    assert code == 3, said
    assert str(lab.folder / name) in said
    assert state(root, *names) == before
    assert all((root / "stages" / f"{unit}.json").exists() for unit in ("sft", "rollout-0", "train-aware", "results"))
    return Seen(code, said)


def done(lab: Lab, content: bytes, *words: str) -> tuple[Path, str]:
    """Do the data stage of a new run with a file and return the run directory and what was printed."""
    root = lab.folder / "run"
    code, out, said = infalign("data", reading(lab, root, "rows.jsonl", content), *words)
    assert code == 0, said
    return root, out


def counts(out: str) -> str:
    """Return the numbers printed for the data stage, without its seconds."""
    return re.search(r"✓ data +[\d.]+ s +(.*)", out)[1]  # type: ignore[index]


def unread(lab: Lab, text: str | bytes, *words: str) -> Seen:
    """Try to run the finished run with another recipe; exit code 2 comes before any file of it is touched."""
    root = lab.copy()
    path = lab.folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.replace("RUN", str(root)).encode())
    before = state(root)
    code, _, said = infalign("run", path, *words)
    assert code == 2, said
    assert state(root) == before
    return Seen(code, said)


RECIPE = yaml.safe_dump(micro.settings(Path("RUN")), sort_keys=False)


# Files that cannot be read


@fault("a line of the data is not JSON, also with --skip-invalid", brief=True)
def not_json(lab: Lab) -> Seen:
    """The line is named; what could not be read is no row to skip."""
    content = lines(ROWS[:6]) + b'{"prompt": "Hi", "chosen": \n' + lines(ROWS[6:])
    seen = refused(lab, "rows.jsonl", content, "--skip-invalid")
    assert "rows.jsonl line 7: not JSON" in seen.said
    return seen


@fault("a gzipped data file is cut off, also with --skip-invalid")
def torn_gzip(lab: Lab) -> Seen:
    """What was read of it is not used, and the last whole line is named."""
    whole = gzip.compress(lines(ROWS), mtime=0)
    seen = refused(lab, "rows.jsonl.gz", whole[: len(whole) // 2], "--skip-invalid")
    assert re.search(r"cannot be read after \S+ line \d+", seen.said)
    return seen


@fault("the data are in UTF-16")
def utf16(lab: Lab) -> Seen:
    """The first line is named."""
    return refused(lab, "rows.jsonl", lines(ROWS).decode().encode("utf-16"))


@fault("the data file has blank lines only")
def blank(lab: Lab) -> Seen:
    """It holds no rows."""
    return refused(lab, "rows.jsonl", b"\n \r\n\n")


@fault("a directory where the data file should be")
def directory(lab: Lab) -> Seen:
    """One of its files is asked for."""
    return refused(lab, "rows.jsonl", None)


@fault("a quote that is not closed in CSV")
def stray_quote(lab: Lab) -> Seen:
    """The last row before it is named: where the next one ends nobody knows."""
    cells = ["prompt,chosen,rejected", "Hi,Yes,No", 'Ho,"Yes,No', *["Hi,Yes,No"] * 20]
    return refused(lab, "rows.csv", "\n".join(cells).encode())


@fault("Parquet data with bytes where text should be")
def binary_column(lab: Lab) -> Seen:
    """Bytes are not taken for text."""
    file = io.BytesIO()
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    pq.write_table(pa.table(columns | {"chosen": [text.encode() for text in columns["chosen"]]}), file)
    return refused(lab, "rows.parquet", file.getvalue())


# Rows that are no examples

DIRTY = [
    {"prompt": "Hi", "chosen": "Yes"},
    {"prompt": "Hi", "chosen": "Yes", "rejected": None},
    {"prompt": "Hi", "chosen": "Yes", "rejected": " Yes"},
    {"prompt": "Hi", "chosen": " ", "rejected": "No"},
    {"prompt": "Hi", "chosen": "Yes", "rejected": "\ud800"},
    {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Yes", "rejected": "No"},
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: So?", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
]


@fault("a row of the data misses a column", brief=True)
def missing_column(lab: Lab) -> Seen:
    """File and line are named."""
    seen = refused(lab, "rows.jsonl", lines([*ROWS, DIRTY[0]]))
    assert f"rows.jsonl line {len(ROWS) + 1}: column rejected is missing" in seen.said
    return seen


@fault("seven kinds of invalid rows, with --skip-invalid", brief=True)
def skipped_rows(lab: Lab) -> Seen:
    """They are counted, and listed with file, line and reason; the others are used."""
    root, out = done(lab, lines([*ROWS, *DIRTY]), "--skip-invalid")
    listed = (root / "data" / "skipped.txt").read_text(encoding="utf-8").splitlines()
    file = lab.folder / "rows.jsonl"
    places = [f"{file} line {number}" for number in range(len(ROWS) + 1, len(ROWS) + len(DIRTY) + 1)]
    assert [reason.split(": ")[0] for reason in listed] == places
    last = out.splitlines()[-1]
    assert last.startswith(f"{len(DIRTY)} invalid rows were left out")
    return Seen(0, last)


@fault("--skip-invalid is forgotten when the run goes on")
def forgotten(lab: Lab) -> Seen:
    """Without it the run stops, with it nothing is done again."""
    done(lab, lines([*ROWS, *DIRTY]), "--skip-invalid")
    code, _, said = infalign("data", lab.folder / "recipe.yaml")
    assert code == 3, said
    again, out, _ = infalign("data", lab.folder / "recipe.yaml", "--skip-invalid")
    assert (again, out.splitlines()[0]) == (0, "1 of 1 steps are done already")
    return Seen(code, said)


@fault("rows that are in the data twice, and prompts with several pairs")
def repeated(lab: Lab) -> Seen:
    """Rows count as often as they stand there and are counted; a prompt has its rollouts once."""
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[:30]]
    root, out = done(lab, lines([*ROWS, *ROWS[:50], *swapped]))
    distinct = {(row["prompt"], row["chosen"], row["rejected"]) for row in [*ROWS, *swapped]}
    assert f"repeated {len(ROWS) + 80 - len(distinct)} " in counts(out)
    prompts = read_table(root / "data" / "train_prompts.parquet")["prompt_id"].to_pylist()
    assert len(prompts) == len(set(prompts))
    return Seen(0, counts(out))


@fault("a row of 10 MB")
def huge_row(lab: Lab) -> Seen:
    """It is read, left out as too long and counted."""
    row = {"prompt": "spam " * 2_000_000, "chosen": "a" * 100_000, "rejected": "No\0"}
    root, out = done(lab, lines([*ROWS, row]), "--set", "data.test=[{world: 20}]")
    summary = json.loads((root / "stages" / "data.json").read_text())["summary"]
    assert (summary["examples"], summary["train_prompts_too_long"]) == (len(ROWS) + 1, 1)
    return Seen(0, f"{counts(out)}, and in stages/data.json train_prompts_too_long {summary['train_prompts_too_long']}")


@fault("no prompt is within data.max_prompt_tokens, and the setting is put right again")
def too_long(lab: Lab) -> Seen:
    """The limit is named, and the old setting leads to the old tables."""
    root = lab.copy()
    code, _, said = infalign("run", recipe(lab, micro.settings(root)), "--set", "data.max_prompt_tokens=3")
    assert code == 3, said
    repeated = again(root)
    assert tables(root) == tables(lab.finished)
    return Seen(code, said, f"time: {len(repeated)} steps are done again" if repeated else "nothing")


# Recipes


@fault("a prompt and its response can exceed the model's context")
def beyond_context(lab: Lab) -> Seen:
    """It is found before anything runs."""
    return unread(lab, RECIPE, "--set", "rollout.max_new_tokens=100")


@fault("a key stands in the recipe twice", brief=True)
def key_twice(lab: Lab) -> Seen:
    """YAML would take the last one."""
    return unread(lab, RECIPE.replace("rollout:\n", "rollout:\n  k: 100\n"))


@fault("a misspelled key", brief=True)
def misspelled(lab: Lab) -> Seen:
    """The nearest key is named."""
    return unread(lab, RECIPE.replace("max_new_tokens", "max_new_token"))


@fault("`k: yes`")
def switch_for_a_number(lab: Lab) -> Seen:
    """YAML reads it as true, and that is not 1."""
    return unread(lab, RECIPE.replace("k: 6", "k: yes"))


@fault("--set rollout.k=1000000000000000000")
def enormous(lab: Lab) -> Seen:
    """It is refused before anything is reckoned with it."""
    return unread(lab, RECIPE, "--set", f"rollout.k={10**18}")


@fault("a recipe that calls Python", brief=True)
def python_object(lab: Lab) -> Seen:
    """Nothing runs."""
    marker = lab.folder / "marker"
    seen = unread(lab, f"{RECIPE}report_to: !!python/object/apply:os.system ['touch {marker}']\n")
    assert not marker.exists()
    return seen


@fault("a recipe whose aliases make a billion values")
def billion_laughs(lab: Lab) -> Seen:
    """It is refused while it is small."""
    bomb = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 9}]}}\n" for i in range(1, 10))
    return unread(lab, bomb + RECIPE)


@fault("the name of a policy is a path")
def path_for_a_name(lab: Lab) -> Seen:
    """Names have no slashes and dots."""
    return unread(lab, RECIPE.replace("  plain:", "  ../../plain:"))


@fault("a model's weights for a recipe")
def not_a_recipe(lab: Lab) -> Seen:
    """It is refused without reading it whole."""
    return unread(lab, (lab.finished / "models" / "reward" / "model.safetensors").read_bytes())


fault("`seed: 0123`, which YAML 1.1 reads as 83", brief=True)(
    lambda lab: unread(lab, yaml.safe_dump(micro.settings(lab.folder / "run")), "--set", "seed=0123")
)
fault("`k: 1:30`, which YAML 1.1 reads as 90", brief=True)(
    lambda lab: unread(lab, yaml.safe_dump(micro.settings(lab.folder / "run")), "--set", "rollout.k=1:30")
)


@fault("pairs are in the data both ways round", brief=True)
def contradictory(lab: Lab) -> Seen:
    """They are counted where the data stage says what it read."""
    found = [{"prompt": f"Say {i}.", "chosen": f"Here is {i}.", "rejected": "No."} for i in range(200)]
    found += [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in found[:7]]
    root, out = done(lab, lines(found))
    assert read_record(root / "stages" / "data.json")["summary"]["contradictory"] == 14
    return Seen(0, counts(out))
