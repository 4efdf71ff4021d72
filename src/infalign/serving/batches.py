"""Rows of many requests, done together in one thread."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from infalign.core.errors import ConfigError, PartialError, RequestError

Row = TypeVar("Row")
Found = TypeVar("Found")

MAX_ROWS = 1024  # rows in one batch


class Batches(Generic[Row, Found]):
    """Does rows of all requests in one thread: what waits while a batch is done is the next batch.

    ``do`` returns what it finds for each row, in their order. `counts` has rows, failed, batches and microseconds.
    """

    def __init__(self, do: Callable[[list[Row]], Sequence[Found]]) -> None:
        self._do = do
        self.counts: Counter[str] = Counter()
        self._waiting: asyncio.Queue[tuple[Row, asyncio.Future[Found]]] = asyncio.Queue()

    async def done(self, rows: Sequence[Row]) -> list[Found]:
        """Return what is found for the rows of one request; raises as ``do``, for these rows only."""
        futures: list[asyncio.Future[Found]] = [asyncio.get_running_loop().create_future() for _ in rows]
        for pair in zip(rows, futures, strict=True):
            self._waiting.put_nowait(pair)
        return await asyncio.gather(*futures)

    async def work(self) -> None:
        """Do what comes, for ever; rows that nobody waits for any more are left out."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < MAX_ROWS and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(row, future) for row, future in batch if not future.cancelled()]
            begun = time.perf_counter()
            outcomes = await asyncio.to_thread(self._found, [row for row, _ in batch])
            self.counts["batches"] += bool(batch)
            self.counts["rows"] += len(batch)
            self.counts["microseconds"] += round(1e6 * (time.perf_counter() - begun))
            for (_, future), one in zip(batch, outcomes, strict=True):
                if future.cancelled():
                    continue
                if isinstance(one, Exception):
                    self.counts["failed"] += 1
                    future.set_exception(one)
                else:
                    future.set_result(one)

    def _found(self, rows: list[Row]) -> list[Found | Exception]:
        """Return what is found for each row, or why there is nothing; a bad row does not spoil the others.

        Where a server does not answer or refuses every request, no row is to blame.
        """
        try:
            return [*self._do(rows)] if rows else []
        except Exception as error:
            no_row = isinstance(error, PartialError | ConfigError) and not isinstance(error, RequestError)
            half = 0 if no_row else len(rows) // 2
            return [*self._found(rows[:half]), *self._found(rows[half:])] if half else [error] * len(rows)
