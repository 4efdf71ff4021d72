"""Draw K responses to each prompt with an engine, and store them as Parquet shards."""

import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infalign.core.errors import DataError, PartialError, first_line
from infalign.core.memory import free_memory, out_of_memory
from infalign.core.sequences import Lazy, in_blocks
from infalign.core.storage import read_table, write_table
from infalign.sampling.engine import Asked, BatchEngine, ConcurrentEngine, Engine, Prompt, Response

SHARD_PROMPTS = 16  # number of prompts whose rollouts are written and read together
RESPONSES_PER_BATCH = 128  # responses that are drawn at once, of several prompts where one has fewer and the engine can
COLUMNS: dict[str, pa.DataType] = {
    "prompt_id": pa.string(),
    "index": pa.int32(),
    "token_ids": pa.list_(pa.int32()),
    "text": pa.string(),
    "finish": pa.string(),
    "logprob": pa.float64(),
}
SCHEMA = pa.schema(COLUMNS)


def draw(
    engine: Engine,
    prompts: Sequence[Prompt],
    k: int,
    directory: Path,
    *,
    shard_prompts: int = SHARD_PROMPTS,
    on_progress: Callable[[int, int], None],
) -> None:
    """Draw rollouts 0 … k-1 of each prompt into ``directory``/part-00000.parquet, part-00001.parquet, …

    Skips existing rollouts, so a stopped run continues and ``k`` can grow. A shard holds ``shard_prompts`` prompts in
    their order, or those drawn before an exception, and is written atomically; an engine that draws for many prompts
    at once is asked for what follows meanwhile. Calls ``on_progress(drawn, all)`` with numbers of responses after each
    batch. If memory runs out, half as many responses are drawn at once from then on. Raises
    DataError if two prompts share an id, PartialError if there is not enough memory for one response.
    """
    if repeated := [prompt_id for prompt_id, count in Counter(p.prompt_id for p in prompts).items() if count > 1]:
        raise DataError(f"{len(repeated)} prompts occur more than once, the first {repeated[0]!r}; keep one of each")
    directory.mkdir(parents=True, exist_ok=True)
    place = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
    have_PK = np.zeros((len(prompts), k), bool)
    for shard in _shards(directory):
        have_PK.flat[_locate_rollouts(shard, place, k)[0]] = True
    todo: list[int] = np.flatnonzero(~have_PK.all(axis=1)).tolist()
    drawn, total = int(have_PK.sum()), have_PK.size
    number = 1 + max((int(shard.stem.removeprefix("part-")) for shard in _shards(directory)), default=-1)
    on_progress(drawn, total)
    asked = ((prompts[i], np.flatnonzero(~have_PK[i]).tolist()) for i in todo)
    finished = _draw_in_any_order(engine, asked, k, shard_prompts)
    shards = deque(todo[start : start + shard_prompts] for start in range(0, len(todo), shard_prompts))
    rows: dict[int, list[dict[str, Any]]] = {}  # of the prompts that are drawn and not yet written

    def write(chosen: Sequence[int]) -> None:
        nonlocal number
        table = pa.Table.from_pylist([row for i in chosen for row in rows.pop(i)], schema=SCHEMA)
        write_table(shard_path(directory, number), table)
        number += 1

    try:
        with closing(finished):
            for batch in finished:
                rows |= {place[one.prompt_id]: _rows(one, missing, given) for one, missing, given in batch}
                drawn += sum(len(missing) for _, missing, _ in batch)
                on_progress(drawn, total)
                while shards and rows.keys() >= set(shards[0]):
                    write(shards.popleft())
    finally:
        if rows:
            write(sorted(rows))


def draw_shard(engine: Engine, prompts: Sequence[Prompt], k: int, path: Path) -> None:
    """Draw rollouts 0 … k-1 of each prompt into one shard, which is written whole, prompt by prompt, or not at all."""
    rows = dict[str, list[dict[str, Any]]]()
    with closing(_draw_in_any_order(engine, ((prompt, range(k)) for prompt in prompts), k, SHARD_PROMPTS)) as finished:
        for batch in finished:
            rows |= {one.prompt_id: _rows(one, indices, given) for one, indices, given in batch}
    ordered = [row for prompt in prompts for row in rows[prompt.prompt_id]]
    write_table(path, pa.Table.from_pylist(ordered, schema=SCHEMA))


def shard_path(directory: Path, number: int) -> Path:
    """Return the path of a shard."""
    return directory / f"part-{number:05d}.parquet"


Batch = list[tuple[Prompt, Sequence[int], list[Response]]]
"""Prompts that were drawn for together, with the numbers of their rollouts, and these."""


def _draw_in_any_order(engine: Engine, asked: Iterable[Asked], k: int, shard_prompts: int) -> Generator[Batch]:
    if not isinstance(engine, ConcurrentEngine):
        yield from _draw_in_batches(engine, asked, k, shard_prompts)
        return
    with closing(engine.sample_each(asked)) as finished:
        for (prompt, indices), responses in finished:
            yield [(prompt, indices, responses)]


def _rows(prompt: Prompt, indices: Sequence[int], responses: Sequence[Response]) -> list[dict[str, Any]]:
    said = [field.name for field in fields(Response)]
    return [
        {"prompt_id": prompt.prompt_id, "index": index} | {name: getattr(response, name) for name in said}
        for index, response in zip(indices, responses, strict=True)
    ]


def prompts_together(k: int, shard_prompts: int = SHARD_PROMPTS) -> int:
    """Return for how many prompts an engine that can draws in one batch, ``k`` rollouts each."""
    sizes = (size for size in range(1, shard_prompts + 1) if shard_prompts % size == 0)
    return max(size for size in sizes if size == 1 or size * k <= RESPONSES_PER_BATCH)


def _draw_in_batches(engine: Engine, asked: Iterable[Asked], k: int, shard_prompts: int) -> Generator[Batch]:
    """Yield prompts with their rollouts, as many at once as fit in memory, at first `RESPONSES_PER_BATCH` or ``k``.

    A run that goes on has the batches of one that was not stopped, since rounding depends on them: a whole number of
    them is a shard.
    """
    at_once, together = k, prompts_together(k, shard_prompts) if isinstance(engine, BatchEngine) else 1
    waiting = iter(asked)
    while batch := list(islice(waiting, together)):
        if isinstance(engine, BatchEngine) and together > 1:
            try:
                found = engine.sample_together(batch)
                yield [(*one, responses) for one, responses in zip(batch, found, strict=True)]
                continue
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            together = 1  # outside the handler, which keeps the tensors of the failed attempt alive
            free_memory()
        for prompt, missing in batch:
            responses, at_once = _draw_in_parts(engine, prompt, missing, at_once)
            yield [(prompt, missing, responses)]


def _draw_in_parts(engine: Engine, prompt: Prompt, indices: Sequence[int], at_once: int) -> tuple[list[Response], int]:
    """Return rollouts number ``indices`` of the prompt, and how many at once fit in memory."""
    responses: list[Response] = []
    while missing := indices[len(responses) : len(responses) + at_once]:
        try:
            responses += engine.sample(prompt.token_ids, prompt.prompt_id, missing)
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if len(missing) == 1:
                raise PartialError(
                    f"memory ran out with one response to prompt {prompt.prompt_id!r} ({first_line(error)}); what is "
                    "drawn is kept, so free memory, or take a machine with more, and run the same command again"
                ) from error
        at_once = len(missing) // 2  # outside the handler, which keeps the tensors of the failed attempt alive
        free_memory()
    return responses, at_once


def read_rollouts(directory: Path, prompt_ids: Sequence[str], k: int) -> pa.Table:
    """Return the rollouts of `find_rollouts` in one table, with all token ids in memory."""
    return pa.concat_tables([SCHEMA.empty_table(), *find_rollouts(directory, prompt_ids, k).tables()])


def find_rollouts(directory: Path, prompt_ids: Sequence[str], k: int) -> "Drawn":
    """Return rollouts 0 … k-1 of ``prompt_ids`` (P·k rows), ordered by prompt as given and then by index.

    Raises DataError naming the first missing or duplicated rollout.
    """
    place, shards = {prompt_id: number for number, prompt_id in enumerate(prompt_ids)}, _shards(directory)
    shard_R, row_R, count_R = np.zeros((3, len(prompt_ids) * k), np.int32)
    for number, shard in enumerate(shards):
        keys, rows = _locate_rollouts(shard, place, k)
        shard_R[keys], row_R[keys] = number, rows
        np.add.at(count_R, keys, 1)
    for wrong, what in (
        (count_R == 0, "missing; remove this folder and run the same command again"),
        (count_R > 1, "duplicated; delete one of the shards"),
    ):
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{directory}: {wrong.sum()} of {len(wrong)} rollouts, the first number {first % k} of prompt "
                f"{prompt_ids[first // k]!r}, are {what}"
            )
    return Drawn(directory, shards, shard_R, row_R, k * SHARD_PROMPTS)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rollouts in a given order; their shards are read on demand, a few at a time."""

    directory: Path
    shards: list[Path]
    shard_of: NDArray[np.int32]  # the shard number of each rollout
    row_of: NDArray[np.int32]
    block: int  # number of rollouts held in memory at once

    def __len__(self) -> int:
        return len(self.shard_of)

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rollouts, or their named ``columns``, in order, one block at a time."""
        return (self._table(start, columns) for start in range(0, len(self), self.block))

    def values(self, column: str) -> Lazy[Any]:
        """Return the values of a column; reading them in order reads every shard about once."""
        return in_blocks(len(self), self.block, lambda start: self._table(start, [column])[column].to_pylist())

    def _table(self, start: int, columns: Sequence[str] | None) -> pa.Table:
        rows = slice(start, start + self.block)
        needed, which = np.unique(self.shard_of[rows], return_inverse=True)
        tables = [read_table(self.shards[number], columns) for number in needed]
        offset = np.cumsum([0, *(table.num_rows for table in tables)])
        return pa.concat_tables(tables).take(offset[which] + self.row_of[rows])


def _locate_rollouts(shard: Path, place: Mapping[str, int], k: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return prompt · k + index of the requested rollouts in a shard, and their rows."""
    table = read_table(shard, ["prompt_id", "index"])
    prompt = np.array([place.get(str(prompt_id), -1) for prompt_id in table["prompt_id"].to_pylist()], dtype=np.intp)
    index = table["index"].to_numpy()
    rows = np.flatnonzero((prompt >= 0) & (index < k))
    return prompt[rows] * k + index[rows], rows


def _shards(directory: Path) -> list[Path]:
    """Return the finished shards, in the order they were written."""
    return sorted(path for path in directory.glob("part-*.parquet") if re.fullmatch(r"part-\d{5,}", path.stem))
