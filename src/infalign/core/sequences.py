"""Sequences whose items are made, or read from the disk, when they are asked for."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from infalign.core.storage import writing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lazy(Sequence[T]):
    """A sequence of ``length`` items that are made, by their number, when they are asked for."""

    length: int
    make: Callable[[int], T]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        where = range(self.length)[at]
        return [self.make(i) for i in where] if isinstance(where, range) else self.make(where)


def in_blocks(length: int, size: int, read: Callable[[int], Sequence[T]]) -> Lazy[T]:
    """Return a sequence that is read ``size`` items at a time, by the number of the first, and keeps the last block."""
    block = lru_cache(maxsize=1)(read)
    return Lazy(length, lambda i: block(i - i % size)[i % size])


def chained(sequences: Sequence[Sequence[T]]) -> Lazy[T]:
    """Return one sequence after the other."""
    ends = [0, *accumulate(map(len, sequences))]

    def item(i: int) -> T:
        number = bisect_right(ends, i) - 1
        return sequences[number][i - ends[number]]

    return Lazy(ends[-1], item)


def token_lists(column: pa.ChunkedArray[Any]) -> Lazy[list[int]]:
    """Return the lists in a column of token ids, which stay Arrow's until they are asked for."""
    ends, ids = _ends([pc.list_value_length(column).to_numpy()]), pc.list_flatten(column).to_numpy()
    return Lazy(len(column), lambda i: ids[ends[i] : ends[i + 1]].tolist())


def token_lists_on_disk(columns: Iterable[pa.ChunkedArray[Any]], directory: Path) -> Lazy[list[int]]:
    """Return the lists in columns of token ids, one after the other, which are read when they are asked for.

    They lie in a nameless file in ``directory``, which is gone when they or the process are.
    """
    lengths = []
    with writing(directory):
        file = TemporaryFile(dir=directory)  # noqa: SIM115
        for column in columns:
            lengths.append(pc.list_value_length(column).to_numpy())
            file.write(pc.list_flatten(column).to_numpy().tobytes())
        file.flush()
    ends = _ends(lengths)

    def ids(i: int) -> list[int]:
        start, end = 4 * int(ends[i]), 4 * int(ends[i + 1])
        return memoryview(os.pread(file.fileno(), end - start, start)).cast("i").tolist()

    finalize(ids, file.close)
    return Lazy(len(ends) - 1, ids)


def _ends(lengths: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
