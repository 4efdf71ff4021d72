"""Best-of-N and Worst-of-N."""

import re
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from infalign.method.calibration import Array
from infalign.method.procedures.base import (
    Draws,
    Serving,
    check_n,
    checked_samples,
    falling_ratio,
    read_n,
    weights_from_counts,
)

SPELLINGS = ("best-of-N", "worst-of-N", "pass@N", "pass^N")


@dataclass(frozen=True, slots=True)
class Extreme:
    """Serve of N draws the one with the largest sign · reward: `BestOfN` or `WorstOfN`."""

    n: int
    spelled: str = field(default="", repr=False, compare=False)
    word: ClassVar[str]
    sign: ClassVar[float]

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def name(self) -> str:
        """``best-of-4`` or ``worst-of-4`` for N = 4, ``pass@4`` or ``pass^4`` where it is ``spelled`` so."""
        return self.spelled or f"{self.word}-of-{self.n}"

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve the extreme of N draws; of those that tie the first, which is any of them, as draws are alike."""
        rewards = yield Draws(self.n)
        return int(np.argmax(self.sign * np.asarray(rewards)))

    def distortion(self, p: ArrayLike) -> Array:
        p = np.asarray(p, float)
        return p**self.n if self.sign > 0 else 1.0 - (1.0 - p) ** self.n

    def density(self, p: ArrayLike) -> Array:
        p = np.asarray(p, float)
        return self.n * (p if self.sign > 0 else 1.0 - p) ** (self.n - 1)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the i-th smallest, or largest, of M by C(i−1, N−1)/C(M, N), shared evenly within ties."""
        rewards = checked_samples(rewards_PM, self.n, self.name)
        within = falling_ratio(np.arange(rewards.shape[1] + 1.0), rewards.shape[1], self.n)  # all N among m lowest
        return weights_from_counts(rewards, within if self.sign > 0 else 1.0 - within[::-1])


@dataclass(frozen=True, slots=True)
class BestOfN(Extreme):
    """Serve the best of N draws: h(p) = p^N.

    >>> BestOfN(2).weights([[0.1, 0.5, 0.3]]).round(3)  # how often each of three samples is the better one of two
    array([[0.   , 0.667, 0.333]])
    """

    word = "best"
    sign = 1.0


@dataclass(frozen=True, slots=True)
class WorstOfN(Extreme):
    """Serve the worst of N draws, the choice of an attacker who retries: h(p) = 1 − (1 − p)^N.

    >>> WorstOfN(2).distortion([0.0, 0.5, 1.0])
    array([0.  , 0.75, 1.  ])
    """

    word = "worst"
    sign = -1.0


def parse(name: str) -> Extreme | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    if (match := re.fullmatch(r"(best-of-|worst-of-|pass@|pass\^)(\d+)", name)) is None:
        return None
    n = read_n(match[2])
    return (BestOfN if match[1] in ("best-of-", "pass@") else WorstOfN)(n, f"{match[1]}{n}")
