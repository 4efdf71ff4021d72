"""A model's responses as arrays of rewards, and arrays in pieces that fit the cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from infalign.core.errors import DataError
from infalign.method.calibration import Array

CHUNK = 2**17  # numbers in a temporary array; more leave the processor's cache


@dataclass(frozen=True, slots=True)
class Samples:
    """One model's responses to every prompt: rewards that the procedure selects by, a judge's, and lengths if known.

    All of shape (P, M), numbers or booleans. With ``judged`` equal to ``selected`` the judge is the selecting reward
    itself. ``lengths`` are in any unit, the same for both models.

    Raises DataError for other shapes, for a value that is not a number, and for one that is not finite: NaN would sort
    as the best.

    >>> Samples(selected=np.array([[0.1, 0.9]]), judged=np.array([[3, 2]]))[:, 1:].judged
    array([[2]])
    """

    selected: Array
    judged: Array
    lengths: Array | None = None

    def __post_init__(self) -> None:
        if self.selected.ndim != 2 or self.selected.shape != self.judged.shape:
            raise DataError(
                f"rewards {self.selected.shape} and judge rewards {self.judged.shape} must both be prompts × samples"
            )
        if self.lengths is not None and self.lengths.shape != self.selected.shape:
            raise DataError(f"lengths {self.lengths.shape} must have the same shape as rewards {self.selected.shape}")
        arrays = {"selection reward": self.selected, "judge reward": self.judged, "length": self.lengths}
        for name, values in arrays.items():
            if values is None:
                continue
            if values.dtype.kind not in "biuf":
                raise DataError(f"the {name}s must be numbers, found type {values.dtype}")
            if not np.isfinite(values).all():
                prompt, sample = np.argwhere(~np.isfinite(values))[0]
                raise DataError(
                    f"the {name} of prompt {prompt}, sample {sample} is {values[prompt, sample]}, not finite"
                )

    def __getitem__(self, at: Any) -> "Samples":
        """Return the samples at these places of all arrays."""
        return Samples(self.selected[at], self.judged[at], None if self.lengths is None else self.lengths[at])


def chunks(length: int, size: int) -> Iterator[slice]:
    """Yield slices that cover ``length`` items, each small enough for the cache at ``size`` numbers per item."""
    step = max(1, CHUNK // size)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
