"""Whatever a user's file, recipe, name or server holds, only errors of infalign come out, and soon.

A few inputs of each kind, always the same, are tried in every run of the tests;
`make fuzz` draws new ones for ten minutes.
"""

import gzip
import io
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rows import lines

from infalign.core.errors import InfalignError
from infalign.core.storage import read_table
from infalign.data.examples import from_table, load_examples, to_table
from infalign.data.files import read_rows
from infalign.evaluation.table_files import read_reward_table
from infalign.method.procedures import parse_procedure
from infalign.method.reward import CalibratedReward
from infalign.method.shapings import parse_shaping
from infalign.method.transforms import Identity, Tabulated, parse_transform
from infalign.recipe.built_in import built_in, find
from infalign.recipe.reading import dump_recipe, load_recipe
from infalign.rewards.base import score
from infalign.theory.curve import parse_transform_or_optimum

RECIPES = [find(name) for name in built_in()]
SIGNS = [b'"', b"\0", b"\r", b"\xef\xbb\xbf"]
SOURCES = (".jsonl", ".jsonl.gz", ".csv", ".parquet")

# What files hold

ODD = [10**400, "x" * 200_000, "\ud800", "\0", "\ufeff", "\n\nHuman: Hi\n\nAssistant:", "NaN", "1e999", ""]
TEXTS = st.text(st.characters(), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from(ODD)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)
MESSAGES = [{"role": "user", "content": "Hi"}]
EXAMPLES = [
    {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    {"prompt": 'Say "hi",\nplease', "chosen": "Hi", "rejected": "\u2028"},
    {"prompt": "Name a colour", "chosen": "Blue", "rejected": "7"},
]
TALKS = [{"messages": [*MESSAGES, {"role": "assistant", "content": "Hey"}]}, {"prompt": MESSAGES, "completion": "Hey"}]
REWARDS = [{"prompt_id": p, "reward": r, "length": 3} for p in ("a", "b") for r in (0.5, -1.0, 2.0)]
COLUMNS = ([0, 0.5, 1], [2, 1, 0], [0, 1, 2])
TABLE = json.loads(Tabulated("t", *(np.array(column, float) for column in COLUMNS)).to_json())


def csv(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as CSV, every cell quoted."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    quoted = (",".join('"' + str(cell).replace('"', '""') + '"' for cell in row) for row in cells)
    return "".join(f"{row}\n" for row in quoted).encode(errors="replace")


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as Parquet with checksums."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, write_page_checksum=True)
    return file.getvalue()


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return a valid file with bytes flipped, cut out or put in, lines swapped, or its end torn off."""

    @st.composite
    def change(draw: Any) -> bytes:
        content = bytearray(valid)
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, max(0, len(content) - 1)))
            kind = draw(st.sampled_from(["flip", "cut", "put", "swap", "tear"]))
            if kind == "flip" and content:
                content[start] ^= 1 << draw(st.integers(0, 7))
            elif kind == "cut":
                del content[start : start + draw(st.integers(1, 20))]
            elif kind == "put":
                content[start:start] = draw(st.binary(max_size=8) | st.sampled_from(SIGNS))
            elif kind == "swap":
                rows = bytes(content).splitlines(keepends=True)
                content = bytearray(b"".join(draw(st.permutations(rows)) if len(rows) < 100 else rows))
            else:
                del content[start:]
        return bytes(content)

    return change()


def replaced(rows: list[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return rows of which some values are other JSON values, or gone."""
    columns = sorted({name for row in rows for name in row})
    changes = st.lists(st.tuples(st.sampled_from(rows), st.dictionaries(st.sampled_from(columns), VALUES)), min_size=1)
    return changes.map(lambda pairs: [row | new for row, new in pairs])


def files(rows: list[dict[str, Any]]) -> st.SearchStrategy[tuple[str, bytes]]:
    """Return the ending and the content of a file that some reader may meet."""
    valid = {".jsonl": lines(rows), ".csv": csv(rows), ".parquet": parquet(rows)}
    named = [st.tuples(st.just(ending), mutated(content)) for ending, content in valid.items()]
    named += [
        st.tuples(st.sampled_from(SOURCES), st.binary(max_size=60)),
        st.tuples(st.just(".jsonl.gz"), mutated(gzip.compress(lines(rows), mtime=0))),
        st.tuples(st.just(".jsonl.gz"), mutated(lines(rows)).map(gzip.compress)),
        st.tuples(st.just(".jsonl"), replaced(rows).map(lines)),
        st.tuples(st.just(".csv"), replaced(rows).map(csv)),
    ]
    return st.one_of(named)


def recipes() -> st.SearchStrategy[bytes]:
    """Return texts made of YAML's own words, and the recipes of the repository with something changed."""
    signs = ["\n", "\n  ", "\t", "&a ", "<<: *a", "? ", "- ", ": ", "---\n", "# ", *"{}[],|'", "*a"]
    tags = [f"!!{name} " for name in ("int", "bool", "timestamp", "float", "set", "omap", "python/object:os.system")]
    words = "run_dir data sources policies k 1 1:2 0x_ .nan 1e9 yes ~ 2024-13-01"
    text = st.lists(st.sampled_from([*signs, *tags, *words.split()]), max_size=20)
    return st.one_of(text.map(lambda parts: "".join(parts).encode()), *(mutated(path.read_bytes()) for path in RECIPES))


def overrides() -> st.SearchStrategy[str]:
    """Return what may follow ``--set``."""
    parts = "data sources 0 -1 policies aware fit rollout evaluate samples k"
    values = ["1", "1e18", "-1", "0x" + "f" * 5000, "9" * 18, ".inf", "yes", "!!int ''"]
    values += ["{a: 1, a: 2}", '"\\0"', '"\\ud800"']
    key = st.lists(st.sampled_from(["", "9" * 5000, *parts.split()]), max_size=5).map(".".join)
    return st.builds("{}={}".format, key, st.sampled_from(values) | st.text(max_size=8)) | st.text(max_size=12)


def names() -> st.SearchStrategy[str]:
    """Return names of procedures and transformations, and what looks like them."""
    words = "best-of- worst-of- 2nd-best-of- top-3-of- rewind: standard identity log exp: power: lsc: "
    words += "par raw optimal .json / 0 1 2 4 9 0.5 0.85 -1 1e e308 nan inf _ * + : :best ٣"
    odd = ["\0", "x" * 300, "1*" * 3000, "99999999"]
    return st.lists(st.sampled_from([*words.split(), *odd]), max_size=6).map("".join) | st.text(max_size=12)


# What is done with it


@dataclass(frozen=True)
class Target:
    """What a user hands in, and the function that takes it; ``folder`` is where it finds files."""

    name: str
    inputs: st.SearchStrategy[Any]
    take: Callable[[Path, Any], object]


NUMBER = count()


def written(folder: Path, ending: str, content: bytes) -> Path:
    """Write a file under a name of its own, so that nothing is remembered of another, and return its path."""
    path = folder / f"{next(NUMBER)}{ending}"
    path.write_bytes(content)
    return path


def examples_of(folder: Path, file: tuple[str, bytes]) -> None:
    """Read examples strictly and not, which agree wherever the strict one finds no fault; each is sound and is kept."""
    path = written(folder, *file)
    kept, skipped = load_examples(read_rows(path), skip_invalid=True)
    assert all(reason.startswith(f"{path} ") for reason in skipped)
    for example in kept:
        assert example.prompt[-1]["role"] in ("user", "tool")
        assert example.chosen == () or example.chosen[-1]["role"] == "assistant"
        assert example.chosen != example.rejected
        assert from_table(to_table([example])) == [example]
    if not skipped:
        assert load_examples(read_rows(path)) == (kept, [])


def recipe_of(folder: Path, content: bytes) -> None:
    """Load a recipe, and what it says of itself."""
    recipe = load_recipe(written(folder, ".yaml", content))
    assert load_recipe(written(folder, ".yaml", dump_recipe(recipe).encode())) == recipe


def good_recipe(folder: Path, override: str) -> None:
    """Change a good recipe."""
    load_recipe(micro.write(folder / "good.yaml", micro.settings(Path("run"))), [override])


def rewarded(_: Path, references: Any) -> None:
    """Rank two responses among what a user's table has as reference rewards."""
    reward = CalibratedReward(lambda prompts, responses: [0.0, 1.0], Identity())
    ranks = reward(["a", "b"], ["x", "y"], reference_rewards=references)
    assert all(0 <= rank <= 1 for rank in ranks)


def scored(_: Path, answer: Any) -> None:
    """Take the answer of a reward for two responses."""
    values = score(lambda prompts, responses: answer, [[{"role": "user", "content": "Hi"}]] * 2, ["a", "b"], name="r")
    assert all(np.isfinite(value) or told is None for value, told in zip(values, answer, strict=True))


LISTS = st.lists(st.lists(st.floats(-2, 2) | VALUES, max_size=4) | VALUES, min_size=2, max_size=2)
TARGETS = [
    Target("pairs", files(EXAMPLES), examples_of),
    Target("conversations", files(TALKS * 2), examples_of),
    Target("rewards", files(REWARDS), lambda folder, file: read_reward_table(written(folder, *file))),
    Target("tables", mutated(parquet(REWARDS)), lambda f, c: read_table(written(f, ".parquet", c))),
    Target("transformations", replaced([TABLE]).map(lines) | mutated(lines([TABLE])) | st.just(b"[" * 100_000),
           lambda folder, content: parse_transform(str(written(folder, ".json", content)))),
    Target("recipes", recipes(), recipe_of),
    Target("overrides", overrides(), good_recipe),
    Target("procedures", names(), lambda _, name: parse_procedure(name)),
    Target("shapings", names(), lambda _, name: parse_shaping(name)),
    Target("aims", names(), lambda _, name: parse_transform_or_optimum(name)),
    Target("reference-rewards", LISTS, rewarded),
    Target("answers", VALUES | st.lists(st.floats() | SCALARS, min_size=2, max_size=2), scored),
]  # fmt: skip


def fuzz(target: Target, folder: Path, *, new: bool) -> None:
    """Try a few inputs; each has 5 seconds of the processor."""

    @settings(
        max_examples=25,
        derandomize=not new,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(target.inputs)
    def attempt(given_in: Any) -> None:
        begun = time.process_time()
        with suppress(InfalignError):
            target.take(folder, given_in)
        assert time.process_time() - begun < 5

    attempt()


@pytest.mark.parametrize("new", [False, pytest.param(True, marks=pytest.mark.fuzz)], ids=["known", "new"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_inputs_of_every_kind_raise_only_our_errors(target: Target, new: bool, tmp_path: Path) -> None:
    """Whatever comes in is taken or refused by an InfalignError, in no time; new inputs for a share of FUZZ_MINUTES."""
    end = time.monotonic() + (60 * float(os.environ["FUZZ_MINUTES"]) / len(TARGETS) if new else 0)
    fuzz(target, tmp_path, new=new)
    while time.monotonic() < end:
        fuzz(target, tmp_path, new=new)
