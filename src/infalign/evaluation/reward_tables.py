"""Tables of rewards from any source: one row per response, with the columns ``prompt_id`` and ``reward``.

``judge_reward`` and ``length`` are optional: responses are selected by ``reward`` and judged by ``judge_reward``, or by
``reward`` itself where neither table has a judge; lengths, in any unit, give a length-controlled win rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.evaluation.samples import Samples
from infalign.method.calibration import Array, as_rewards, not_a_number

REQUIRED = ("prompt_id", "reward")
COLUMNS = (*REQUIRED, "judge_reward", "length")


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

    def rows_by_prompt(self) -> list[NDArray[np.intp]]:
        """Return the rows of each prompt in their order."""
        texts = np.asarray(self.prompt_ids.to_pylist())
        _, prompt_of, counts = np.unique(texts, return_inverse=True, return_counts=True)
        return np.split(np.argsort(prompt_of, kind="stable"), np.cumsum(counts)[:-1])

    def samples(self, rows_PM: NDArray[np.intp]) -> Samples:
        """Return the samples at these rows."""
        lengths = self.numbers["length"][rows_PM] if "length" in self.numbers else None
        return Samples(self.numbers["reward"][rows_PM], self.numbers[self.judge][rows_PM], lengths)


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

    policy: Rewards
    base: Rewards
    blocks: Sequence[Block]
    policy_only: int = 0
    base_only: int = 0


def read_rewards(path: str | Path) -> Rewards:
    """Return the rewards of a .parquet, .csv, .jsonl or .jsonl.gz file.

    ``prompt_id`` is text or a whole number and compared as text: 1 and "1" are one prompt, "01" is another. Numbers
    keep the precision of the file. An optional column without any value counts as absent; other columns are ignored.

    Raises DataError that names row and column for a number that is absent, NaN, infinite or text (but in CSV all is
    text), for an absent prompt_id, for an absent column, and for a file that is missing, empty, damaged or of another
    kind.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        try:
            return _read_columns(path)
        except (OSError, pa.ArrowException, DataError, ValueError, KeyError):  # KeyError: an absent or duplicate column
            pass  # its rows say where
    return _read_by_row(path)


def _read_columns(path: Path) -> Rewards:
    """Return the rewards of a Parquet file whose columns are as they should be. Raises ValueError for others."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read([name for name in COLUMNS if name in file.schema_arrow.names])
    ids, _ = table["prompt_id"], table["reward"]
    if pa.types.is_dictionary(ids.type):
        ids = ids.cast(ids.type.value_type)
    if not (pa.types.is_integer(ids.type) or ids.type in (pa.string(), pa.large_string(), pa.string_view())):
        raise ValueError(ids.type)
    texts: pa.ChunkedArray[Any] = ids.cast(pa.large_string())
    names = [name for name in table.column_names if name in REQUIRED or table[name].null_count < table.num_rows]
    numbers = {name: _finite(table[name]) for name in names if name != "prompt_id"}
    if len(texts) == 0 or texts.null_count or pc.min(pc.binary_length(texts)).as_py() == 0:
        raise ValueError("rows without prompt_id")
    return Rewards(path, texts, numbers)


def _finite(column: "pa.ChunkedArray[Any]") -> Array:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)) or column.null_count:
        raise ValueError(column.type)
    values = cast(Array, np.from_dlpack(column.combine_chunks()))  # to_numpy imports pandas
    if not np.isfinite(as_rewards(values)).all():
        raise ValueError("not finite")
    return values


def _read_by_row(path: Path) -> Rewards:
    found: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    absent: dict[str, str] = {}
    for where, row in read_rows(path):
        for name, values in found.items():
            value = row.get(name)
            if value is None or value == "":
                if name in REQUIRED:
                    raise DataError(f"{where}: column {name} is missing or empty; the row has {sorted(row)}")
                absent.setdefault(name, where)
            else:
                try:
                    values.append(_prompt_text(value) if name == "prompt_id" else _number(value, path))
                except ValueError as error:
                    raise DataError(f"{where}, prompt {row['prompt_id']!r}: {name} is {error}") from None
            if name in absent and values:
                raise DataError(f"{absent[name]}: column {name} is missing or empty, but other rows have it")
    texts = pa.chunked_array([pa.array(found.pop("prompt_id"), pa.large_string())])
    return Rewards(path, texts, {name: np.array(values, float) for name, values in found.items() if values})


def _prompt_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"of type {type(value).__name__}; it must be text or a whole number")
    return str(value)


def _number(value: Any, path: Path) -> float:
    try:
        if isinstance(value, bool) or (isinstance(value, str) and (path.suffix != ".csv" or "_" in value)):
            raise ValueError
        number = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else value
        found = float(number)
    except OverflowError:  # whole numbers in JSON can be arbitrarily large
        found = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"{value!r}; it must be a number") from None
    if not math.isfinite(found):
        raise ValueError(f"{found}, which cannot be ranked; score the response again")
    if isinstance(number, int) and (problem := not_a_number(number)):
        raise ValueError(problem.removeprefix("found "))
    return found


def pair(policy: Rewards, base: Rewards, *, common_prompts: bool = False, seed: int = 0) -> Pairing:
    """Return the samples of both tables for the same prompts, in blocks of equal numbers of samples.

    The samples of a prompt are shuffled: a table sorted by reward would give Rewind-and-Repeat a wrong threshold.

    Raises DataError for prompts that only one table has, unless ``common_prompts`` leaves them out; if none is common;
    and if only one table has a judge.
    """
    if policy.judge != base.judge:
        has, lacks = (policy, base) if policy.judge == "judge_reward" else (base, policy)
        raise DataError(f"{has.path} has the column judge_reward, {lacks.path} does not; add it or drop it")
    tables = (policy, base)
    texts, codes = _codes([table.prompt_ids for table in tables])
    counts = np.stack([np.bincount(code, minlength=len(texts)) for code in codes])
    common = np.flatnonzero((counts > 0).all(axis=0))
    alone = [np.flatnonzero(counts[other] == 0) for other in (1, 0)]
    if any(places.size for places in alone) and not common_prompts:
        found = [
            f"{places.size:,} prompts are only in {table.path}, such as {texts[places[0]].as_py()!r}"
            for table, places in zip(tables, alone, strict=True)
            if places.size
        ]
        raise DataError(f"{'; '.join(found)}; pass --common-prompts to compare the {common.size:,} prompts in both")
    if common.size == 0:
        raise DataError(f"{policy.path} and {base.path} have no prompts in common")
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(code.size) for code in codes]
    rows = [order[np.argsort(code[order], kind="stable")] for code, order in zip(codes, shuffled, strict=True)]
    starts = np.cumsum(counts, axis=1) - counts
    shapes, shape_of = np.unique(counts.T[common], axis=0, return_inverse=True)
    blocks = []
    for number, shape in enumerate(shapes):
        places = np.flatnonzero(shape_of == number)
        prompts = common[places]
        both = (
            table.samples(order[start[prompts][:, None] + np.arange(samples)])
            for table, order, start, samples in zip(tables, rows, starts, shape, strict=True)
        )
        blocks.append(Block(places, texts[prompts[0]].as_py(), *both))
    return Pairing(policy, base, blocks, *(places.size for places in alone))


def _codes(columns: Sequence["pa.ChunkedArray[Any]"]) -> tuple[Any, list[NDArray[np.intp]]]:
    """Return the distinct texts of all columns in the order of their first occurrence, and each column by number."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    encoded: Any = pa.chunked_array(chunks).dictionary_encode().unify_dictionaries()
    codes = np.concatenate([np.from_dlpack(chunk.indices) for chunk in encoded.chunks]).astype(np.intp)
    return encoded.chunk(0).dictionary, np.split(codes, np.cumsum([len(column) for column in columns])[:-1])


def judged_samples(path: str | Path, *, seed: int = 0) -> Samples:
    """Return a table's responses as samples, as many of every prompt as the prompt with the fewest has, shuffled.

    Raises DataError as `read_rewards`, and for a table without ``judge_reward``.
    """
    rewards = read_rewards(path)
    if rewards.judge != "judge_reward":
        raise DataError(f"{path} has no column judge_reward; add the judge's score of each response")
    blocks = pair(rewards, rewards, seed=seed).blocks
    fewest = min(block.policy.selected.shape[1] for block in blocks)
    columns = [
        np.concatenate([values[:, :fewest] for values in found])
        for found in zip(*((block.policy.selected, block.policy.judged) for block in blocks), strict=True)
    ]
    return Samples(*columns)
