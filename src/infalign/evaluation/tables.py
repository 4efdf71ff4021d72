"""Compare tables of rewards from any source: one row a response, with the columns ``prompt_id`` and ``reward``.

``judge_reward`` and ``length`` are optional: responses are selected by ``reward`` and judged by ``judge_reward``, or by
``reward`` itself where neither table has a judge; lengths, in any unit, give a length-controlled win rate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.console import Console

from infalign.core.display import amount, heading, plain_table, say, share
from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.evaluation.intervals import estimate, estimate_share
from infalign.evaluation.length import length_controlled
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws, tie_rate, win_rates_of
from infalign.method.calibration import Array
from infalign.method.procedures import Procedure, parse_procedure, rewinds

NUMBERS = ("reward", "judge_reward", "length")
REQUIRED = ("prompt_id", "reward")
LONGEST_LINE = 2**24  # bytes


@dataclass(frozen=True, slots=True)
class Rewards:
    """A table of rewards: the prompt of each row as text, and the number columns that the file has."""

    path: Path
    prompt_ids: "pa.ChunkedArray[Any]"
    numbers: Mapping[str, Array]

    @property
    def judge(self) -> str:
        """The column whose values say which response is better."""
        return "judge_reward" if "judge_reward" in self.numbers else "reward"


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts with equal numbers of samples: their places in the order of the policy's table, and the samples."""

    places: NDArray[np.intp]
    example: str  # a prompt
    policy: Samples
    base: Samples


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two tables side by side: the blocks of the prompts that both have, and how many prompts only one has."""

    blocks: list[Block]
    policy_only: int
    base_only: int


def compare_tables(
    policy_path: str | Path,
    base_path: str | Path,
    procedures: Sequence[str],
    *,
    base_procedure: str | None = None,
    common_prompts: bool = False,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the win rate of a policy's responses over a base's under each procedure, one record each.

    ``base_procedure`` serves the base, by default the policy's own. ``common_prompts`` leaves out, and counts, prompts
    that only one table has; otherwise they are an error. Prompts may have different numbers of samples: every prompt
    counts once, and ``policy_samples`` and ``base_samples`` are the fewest of any prompt. ``win_rate`` with ``low`` and
    ``high`` is from `estimate_share`, ``length_controlled`` the same at equal length, ``ties`` the share of pairs of
    samples that the judge finds equal, ``draws`` how many a procedure that rewinds takes. ``notes`` say in sentences
    what is missing or does not mean what it seems to.

    Raises DataError for tables that cannot be read (`read_rewards`) or paired (`pair`), for fewer samples than a
    procedure needs and for a single prompt; ConfigError for an unknown procedure.
    """
    ours = [parse_procedure(name) for name in procedures]
    theirs = [parse_procedure(base_procedure) if base_procedure else procedure for procedure in ours]
    policy, base = read_rewards(policy_path), read_rewards(base_path)
    pairing = pair(policy, base, common_prompts=common_prompts, seed=seed)
    blocks = pairing.blocks

    def measured(values: Array) -> dict[str, float]:
        return estimate(values, confidence=confidence, seed=seed).as_dict()

    def measured_at_equal_length(values: Array) -> dict[str, float]:
        return {key: min(max(value, 0.0), 1.0) for key, value in measured(values).items()}

    wins_RP = _by_prompt(blocks, lambda block: win_rates_of(block.policy, block.base, ours, theirs))
    shared = {
        "confidence": confidence,
        "prompts": wins_RP.shape[1],
        "policy_samples": min(block.policy.selected.shape[1] for block in blocks),
        "base_samples": min(block.base.selected.shape[1] for block in blocks),
        "policy_only_prompts": pairing.policy_only,
        "base_only_prompts": pairing.base_only,
        "judge": policy.judge,
        "ties": float(_by_prompt(blocks, lambda block: tie_rate(block.policy, block.base)).mean()),
    }
    rows = []
    for procedure, served, wins in zip(ours, theirs, wins_RP, strict=True):
        win_rate = estimate_share(wins, confidence=confidence, seed=seed).as_dict()
        notes = []
        if win_rate["high"] - win_rate["low"] < 1e-12:
            notes.append(
                "every prompt has the same win rate, so the interval has no width and says nothing about others"
            )
        controlled, missing = _controlled(policy, base, blocks, procedure, served)
        notes += [f"no length-controlled win rate: {missing}"] if missing else []
        rows.append(
            {
                "procedure": procedure.name,
                "base_procedure": served.name,
                "win_rate": win_rate.pop("mean"),
                **win_rate,
                **shared,
                "length_controlled": None if controlled is None else measured_at_equal_length(controlled),
                "draws": {model: measured(draws) for model, draws in _draws(blocks, procedure, served).items()},
                "notes": notes,
            }
        )
    return rows


def _controlled(
    policy: Rewards, base: Rewards, blocks: Sequence[Block], procedure: Procedure, served: Procedure
) -> tuple[Array | None, str]:
    """Return values of prompts whose mean is the win rate at equal length, or why there is none."""
    if lengths_missing := [str(table.path) for table in (policy, base) if "length" not in table.numbers]:
        return None, f"no column length in {' and '.join(lengths_missing)}"
    try:
        values = length_controlled([(block.policy, block.base) for block in blocks], procedure, served)
    except DataError as error:
        return None, str(error)
    return values[_order(blocks)], ""


def print_comparison(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the records of `compare` as a table, below what they share and above their notes."""
    first = rows[0]
    left_out = first["policy_only_prompts"] + first["base_only_prompts"]
    heading(
        console,
        f"Win rate of the policy over the base, judged by {first['judge']}",
        f"{first['prompts']:,} prompts × {first['policy_samples']} policy and {first['base_samples']} base samples"
        f"{f' ({left_out:,} prompts of one table left out)' if left_out else ''}, {first['confidence']:.0%} intervals, "
        f"{first['ties']:.1%} of pairs tie",
    )
    table = plain_table("procedure", breaking=[0])
    controlled, draws = (any(row[column] for row in rows) for column in ("length_controlled", "draws"))
    for name in ["win rate, %", *["at equal length, %"] * controlled, *["draws"] * draws]:
        table.add_column(name, no_wrap=True)
    for row in rows:
        pair = dict.fromkeys((row["procedure"], row["base_procedure"]))
        cells = [" against ".join(pair), share({**row, "mean": row["win_rate"]})]
        if controlled:
            found = row["length_controlled"]
            cells.append(share(found) if found else "–")
        if draws:
            taken = [f"{model} {amount(n, digits=1)}" for model, n in row["draws"].items()]
            cells.append("\n".join(taken))
        table.add_row(*cells)
    console.print(table)
    for note, names in _notes(rows).items():
        say(console, f"{', '.join(names)}: {note}", markup=False)


def _notes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in row["notes"]:
            notes.setdefault(note, []).append(row["procedure"])
    return notes


def read_rewards(path: str | Path) -> Rewards:
    """Return the rewards of a .parquet, .csv, .jsonl or .jsonl.gz file.

    ``prompt_id`` is text or a whole number and compared as text: 1 and "1" are one prompt, "01" is another. Numbers
    keep the precision of the file. An optional column without any value counts as absent; other columns are ignored.

    Raises DataError that names row and column for a number that is absent, NaN, infinite or text (but in CSV all is
    text), for an absent prompt_id, for an absent column, and for a file that is missing, empty, damaged or of another
    kind.
    """
    path = Path(path)
    try:
        table = _read(path)
        names = [name for name in NUMBERS if name in REQUIRED or table[name].null_count < table.num_rows]
        return Rewards(path, _texts(table["prompt_id"]), {name: _numbers(table[name]) for name in names})
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:  # KeyError: a duplicate column
        raise DataError(_fault(path) or f"{path} cannot be read ({error}); write it again") from error


def judged_samples(path: str | Path, *, seed: int = 0) -> Samples:
    """Return a table's responses as samples, as many of every prompt as the prompt with the fewest has, shuffled.

    Raises DataError as `read_rewards`, and for a table without ``judge_reward``.
    """
    rewards = read_rewards(path)
    if rewards.judge != "judge_reward":
        raise DataError(f"{path} has no column judge_reward; add the judge's score of every response")
    blocks = pair(rewards, rewards, seed=seed).blocks
    fewest = min(block.policy.selected.shape[1] for block in blocks)
    columns = [
        np.concatenate([values[:, :fewest] for values in found])
        for found in zip(*((block.policy.selected, block.policy.judged) for block in blocks), strict=True)
    ]
    return Samples(*columns)


def _read(path: Path) -> pa.Table:
    """Return the four columns, nulls where the file has none."""
    names, types = ["prompt_id", *NUMBERS], dict.fromkeys(NUMBERS, pa.float64())
    if path.name.endswith(".parquet"):
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read([name for name in names if name in file.schema_arrow.names])
        for name in set(names).difference(table.column_names):
            table = table.append_column(name, pa.nulls(table.num_rows))
        return table
    if path.name.endswith(".csv"):
        return pa_csv.read_csv(
            path,
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types={"prompt_id": pa.string(), **types},
                include_columns=names,
                include_missing_columns=True,
                null_values=[""],  # NaN and NA are errors that name the row
            ),
        )
    try:
        return _read_jsonl(path, {"prompt_id": pa.string(), **types})
    except pa.ArrowInvalid:
        return _read_jsonl(path, {"prompt_id": pa.int64(), **types})


def _read_jsonl(path: Path, types: Mapping[str, pa.DataType]) -> pa.Table:
    return pa_json.read_json(
        path,
        read_options=pa_json.ReadOptions(block_size=LONGEST_LINE),
        parse_options=pa_json.ParseOptions(
            explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior="ignore"
        ),
    )


def _texts(column: "pa.ChunkedArray[Any]") -> "pa.ChunkedArray[Any]":
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_integer(column.type) or column.type in (pa.string(), pa.large_string(), pa.string_view())):
        raise ValueError(f"prompt_id is of type {column.type}, neither text nor a whole number")
    texts: pa.ChunkedArray[Any] = column.cast(pa.large_string())
    if len(texts) == 0 or texts.null_count or pc.min(pc.binary_length(texts)).as_py() == 0:
        raise ValueError("rows without prompt_id")
    return texts


def _numbers(column: "pa.ChunkedArray[Any]") -> Array:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.string()).cast(pa.float64())  # pyarrow's direct cast rounds 0.30 up
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)) or column.null_count:
        raise ValueError(f"a column of numbers is of type {column.type} and has {column.null_count} empty cells")
    values = cast(Array, np.from_dlpack(column.combine_chunks()))  # to_numpy imports pandas
    if not np.isfinite(values).all():
        raise ValueError("a column has numbers that are not finite")
    return values


def _fault(path: Path) -> str | None:
    """Return what is wrong with the first invalid row, found by reading row by row."""
    present: set[str] = set()
    absent: dict[str, str] = {}
    for where, row in read_rows(path):
        for name in ("prompt_id", *NUMBERS):
            value = row.get(name)
            if value is None or value == "":
                if name in REQUIRED:
                    return f"{where}: column {name} is missing or empty; the row has {sorted(row)}"
                absent.setdefault(name, where)
            elif problem := _problem(name, value, is_text=path.name.endswith(".csv")):
                return f"{where}, prompt {row['prompt_id']!r}: {name} is {problem}"
            else:
                present.add(name)
            if name in present and name in absent:
                return f"{absent[name]}: column {name} is missing or empty, other rows have it"
    return None


def _problem(name: str, value: object, *, is_text: bool) -> str | None:
    if name == "prompt_id":
        good = isinstance(value, str | int) and not isinstance(value, bool)
        return None if good else f"of type {type(value).__name__}, neither text nor a whole number"
    try:
        if isinstance(value, bool) or (isinstance(value, str) and not is_text):
            raise ValueError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # whole numbers in JSON can be arbitrarily large
        number = math.inf
    except (TypeError, ValueError):
        return f"{value!r}, not a number; write the number"
    return None if math.isfinite(number) else f"{number}, which cannot be ranked; score the response again"


def pair(policy: Rewards, base: Rewards, *, common_prompts: bool = False, seed: int = 0) -> Pairing:
    """Return the samples of both tables for the same prompts, in blocks of equal numbers of samples.

    The samples of a prompt are shuffled: a table sorted by reward would give Rewind-and-Repeat a wrong threshold.

    Raises DataError for prompts that only one table has, unless ``common_prompts`` leaves them out; if none is common;
    and if only one table has a judge.
    """
    if policy.judge != base.judge:
        has, lacks = (policy, base) if policy.judge == "judge_reward" else (base, policy)
        raise DataError(f"{has.path} has the column judge_reward, {lacks.path} has not; add it or drop it")
    texts, codes = _codes(policy.prompt_ids, base.prompt_ids)
    ours, theirs = (np.bincount(code, minlength=len(texts)) for code in codes)
    common = np.flatnonzero((ours > 0) & (theirs > 0))
    alone = [np.flatnonzero(theirs == 0), np.flatnonzero(ours == 0)]
    if any(places.size for places in alone) and not common_prompts:
        found = [
            f"{places.size:,} prompts are only in {table.path}, such as {texts[places[0]].as_py()!r}"
            for table, places in zip((policy, base), alone, strict=True)
            if places.size
        ]
        raise DataError(f"{'; '.join(found)}; {common.size:,} are in both, --common-prompts compares those")
    if common.size == 0:
        raise DataError(f"{policy.path} and {base.path} have no prompt in common")
    shapes, shape_of = np.unique(np.stack([ours, theirs], axis=1)[common], axis=0, return_inverse=True)
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(code.size) for code in codes]
    rows = [order[np.argsort(code[order], kind="stable")] for code, order in zip(codes, shuffled, strict=True)]
    starts = [np.cumsum(count) - count for count in (ours, theirs)]
    blocks = []
    for number, shape in enumerate(shapes):
        places = np.flatnonzero(shape_of == number)
        prompts = common[places]
        policy_samples, base_samples = (
            _samples(table, order[start[prompts][:, None] + np.arange(samples)])
            for table, order, start, samples in zip((policy, base), rows, starts, shape, strict=True)
        )
        blocks.append(Block(places, texts[prompts[0]].as_py(), policy_samples, base_samples))
    return Pairing(blocks, *(places.size for places in alone))


def _codes(*columns: "pa.ChunkedArray[Any]") -> tuple[Any, list[NDArray[np.intp]]]:
    """Return the distinct texts of all columns in the order of their first occurrence, and each column by number."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    encoded: Any = pa.chunked_array(chunks).dictionary_encode().unify_dictionaries()
    codes = np.concatenate([np.from_dlpack(chunk.indices) for chunk in encoded.chunks]).astype(np.intp)
    return encoded.chunk(0).dictionary, np.split(codes, np.cumsum([len(column) for column in columns])[:-1])


def _samples(table: Rewards, rows_PM: NDArray[np.intp]) -> Samples:
    lengths = table.numbers["length"][rows_PM] if "length" in table.numbers else None
    return Samples(table.numbers["reward"][rows_PM], table.numbers[table.judge][rows_PM], lengths)


def _by_prompt(blocks: Sequence[Block], measure: Callable[[Block], Array]) -> Array:
    """Return what ``measure`` finds for the prompts of each block, the last axis in the order of the prompts."""
    found = []
    for block in blocks:
        try:
            found.append(measure(block))
        except DataError as error:
            raise DataError(f"prompt {block.example!r}: {error}") from error
    return np.concatenate(found, axis=-1)[..., _order(blocks)]


def _order(blocks: Sequence[Block]) -> NDArray[np.intp]:
    return np.argsort(np.concatenate([block.places for block in blocks]))


def _draws(blocks: Sequence[Block], procedure: Procedure, served: Procedure) -> dict[str, Array]:
    """Return the expected draws of policy and base for every prompt, where they are served by one that rewinds."""
    draws = {}
    if rewinds(procedure):
        draws["policy"] = _by_prompt(blocks, lambda block: rewind_draws(block.policy, block.base, procedure))
    if rewinds(served):
        draws["base"] = _by_prompt(blocks, lambda block: rewind_draws(block.base, block.base, served))
    return draws
