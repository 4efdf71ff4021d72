"""Draw K responses to each prompt with an engine, and store them as Parquet shards."""

import re
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infalign.core.errors import DataError, PartialError, first_line
from infalign.core.memory import at_once, free_memory, out_of_memory
from infalign.core.progress import OnProgress
from infalign.core.sequences import Lazy, in_blocks
from infalign.core.storage import column_values, read_table, write_table
from infalign.sampling.engine import AskedDraws, ConcurrentEngine, Engine, Prompt, Response

SHARD_PROMPTS = 16  # number of prompts whose rollouts are written and read together
RESPONSES_PER_BATCH = 128  # responses that a CPU draws at once, of several prompts where one has fewer
COLUMNS: dict[str, pa.DataType] = {
    "prompt_id": pa.string(),
    "index": pa.int32(),
    "token_ids": pa.list_(pa.int32()),
    "text": pa.string(),
    "finish": pa.string(),
    "logprob": pa.float64(),
    "columns": pa.string(),  # of the prompt's row, as JSON
}
SCHEMA = pa.schema(COLUMNS)


def draw(
    engine: Engine | ConcurrentEngine, prompts: Sequence[Prompt], k: int, directory: Path, *, on_progress: OnProgress
) -> None:
    """Draw rollouts 0 … k-1 of each prompt into ``directory``/part-00000.parquet, part-00001.parquet, …

    Skips existing rollouts, so a stopped run continues and ``k`` can grow. A shard holds `SHARD_PROMPTS` prompts in
    their order, or those drawn before an exception, and is written atomically; an engine that draws for many prompts
    at once is asked for what follows meanwhile. ``on_progress`` gets numbers of responses after each batch.
    If memory runs out, half as many responses are drawn at once from then on. Raises DataError if two prompts
    share an id, PartialError if there is not enough memory for one response.
    """
    place = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
    if len(place) < len(prompts):
        prompt_id, count = Counter(prompt.prompt_id for prompt in prompts).most_common(1)[0]
        raise DataError(f"prompt {prompt_id!r} occurs {count} times; keep one")
    directory.mkdir(parents=True, exist_ok=True)
    have_PK = _locate(directory, list(place), k)[1].reshape(-1, k) > 0
    todo: list[int] = np.flatnonzero(~have_PK.all(axis=1)).tolist()
    drawn, total = int(have_PK.sum()), have_PK.size
    number = 1 + max((int(shard.stem.removeprefix("part-")) for shard in _shards(directory)), default=-1)
    on_progress(drawn, total, "responses")
    asked = ((prompts[i], np.flatnonzero(~have_PK[i]).tolist()) for i in todo)
    shards = deque(todo[start : start + SHARD_PROMPTS] for start in range(0, len(todo), SHARD_PROMPTS))
    rows: dict[int, list[dict[str, Any]]] = {}  # of the prompts that are drawn and not yet written

    def write(chosen: Sequence[int]) -> None:
        nonlocal number
        _write(shard_path(directory, number), [row for i in chosen for row in rows.pop(i)])
        number += 1

    try:
        with closing(_draw_in_any_order(engine, asked, k)) as finished:
            for batch in finished:
                rows |= {place[one[0].prompt_id]: _rows(one, responses) for one, responses in batch}
                drawn += sum(len(responses) for _, responses in batch)
                on_progress(drawn, total, "responses")
                while shards and rows.keys() >= set(shards[0]):
                    write(shards.popleft())
    finally:
        if rows:
            write(sorted(rows))


def draw_shard(engine: Engine | ConcurrentEngine, prompts: Sequence[Prompt], k: int, path: Path) -> None:
    """Draw rollouts 0 … k-1 of each prompt into one shard, which is written whole, prompt by prompt, or not at all."""
    with closing(_draw_in_any_order(engine, ((prompt, range(k)) for prompt in prompts), k)) as finished:
        rows = {one[0].prompt_id: _rows(one, responses) for batch in finished for one, responses in batch}
    _write(path, [row for prompt in prompts for row in rows[prompt.prompt_id]])


def shard_path(directory: Path, number: int) -> Path:
    """Return the path of a shard."""
    return directory / f"part-{number:05d}.parquet"


def _rows(asked: AskedDraws, responses: Sequence[Response]) -> list[dict[str, Any]]:
    numbered = zip(asked[1], responses, strict=True)
    prompt = {"prompt_id": asked[0].prompt_id, "columns": asked[0].columns}
    return [prompt | {"index": index, **response._asdict()} for index, response in numbered]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_table(path, pa.Table.from_pylist(rows, schema=SCHEMA))


def _draw_in_any_order(
    engine: Engine | ConcurrentEngine, asked: Iterable[AskedDraws], k: int
) -> Generator[list[tuple[AskedDraws, list[Response]]]]:
    """Yield batches of ``asked`` with their rollouts, as many at once as the engine can and memory holds.

    A resumed run has the batches of one that was not stopped, since rounding depends on them: a whole number of
    them is a shard, and none is kept in part.
    """
    if isinstance(engine, ConcurrentEngine):
        yield from ([one] for one in engine.sample_each(asked))
        return
    sizes = (size for size in range(1, SHARD_PROMPTS + 1) if SHARD_PROMPTS % size == 0)
    most = at_once(RESPONSES_PER_BATCH, engine.device_type)
    together = max(size for size in sizes if size == 1 or size * k <= most)
    rows, waiting = together * k, iter(asked)
    while batch := list(islice(waiting, together)):
        draws = [(prompt, index) for prompt, indices in batch for index in indices]
        responses: list[Response] = []
        while missing := draws[len(responses) : len(responses) + rows]:
            try:
                responses += engine.sample_together(missing)
                continue
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if len(missing) == 1:
                    raise PartialError(
                        f"out of memory with a single response to prompt {missing[0][0].prompt_id!r} "
                        f"({first_line(error)}); finished responses are kept: free memory or use a larger machine, "
                        "then rerun the same command"
                    ) from error
            rows = len(missing) // 2  # outside the handler, which keeps the tensors of the failed attempt alive
            free_memory()
        left = iter(responses)
        yield [(one, list(islice(left, len(one[1])))) for one in batch]


def read_rollouts(directory: Path, prompt_ids: Sequence[str], k: int) -> pa.Table:
    """Return the rollouts of `find_rollouts` in one table, with all token ids in memory."""
    return pa.concat_tables([SCHEMA.empty_table(), *find_rollouts(directory, prompt_ids, k).tables()])


def find_rollouts(directory: Path, prompt_ids: Sequence[str], k: int) -> "Drawn":
    """Return rollouts 0 … k-1 of ``prompt_ids`` (P·k rows), ordered by prompt as given and then by index.

    Raises DataError naming the first missing or duplicated rollout.
    """
    drawn, count_R = _locate(directory, prompt_ids, k)
    for wrong, what in (
        (count_R == 0, "missing; remove this folder and rerun the same command"),
        (count_R > 1, "duplicated; delete one of the shards"),
    ):
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{directory}: {wrong.sum()} of {len(wrong)} rollouts (first: number {first % k} of prompt "
                f"{prompt_ids[first // k]!r}) are {what}"
            )
    return drawn


def count_drawn(directory: Path, prompt_ids: Sequence[str], k: int) -> int:
    """Return how many of rollouts 0 … k-1 of ``prompt_ids`` a folder has."""
    return int(np.count_nonzero(_locate(directory, prompt_ids, k)[1]))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rollouts in a given order; their shards are read on demand, a few at a time."""

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


def _locate(directory: Path, prompt_ids: Sequence[str], k: int) -> tuple[Drawn, NDArray[np.int32]]:
    """Return where rollouts are, and how often each occurs."""
    place, shards = {prompt_id: number for number, prompt_id in enumerate(prompt_ids)}, _shards(directory)
    shard_R, row_R, count_R = np.zeros((3, len(prompt_ids) * k), np.int32)
    for number, shard in enumerate(shards):
        table = read_table(shard, ["prompt_id", "index"])
        prompt = np.array([place.get(prompt_id, -1) for prompt_id in column_values(table, "prompt_id")], np.intp)
        index = table["index"].to_numpy()
        rows = np.flatnonzero((prompt >= 0) & (index < k))
        keys = prompt[rows] * k + index[rows]
        shard_R[keys], row_R[keys] = number, rows
        np.add.at(count_R, keys, 1)
    return Drawn(shards, shard_R, row_R, k * SHARD_PROMPTS), count_R


def _shards(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("part-*.parquet") if re.fullmatch(r"part-\d{5,}", path.stem))
