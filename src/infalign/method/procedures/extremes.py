"""Best-of-N and Worst-of-N."""

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from typing_extensions import TypeIs

from infalign.method.calibration import Array
from infalign.method.procedures.base import (
    Draws,
    Procedure,
    Serving,
    check_n,
    checked_samples,
    subsets_within,
    weights_from_counts,
)

SPELLINGS = ("best-of-N", "worst-of-N")


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Serve the best of N draws: h(p) = p^N.

    >>> BestOfN(2).weights([[0.1, 0.5, 0.3]]).round(3)  # how often each of three samples is the better one of two
    array([[0.   , 0.667, 0.333]])
    """

    n: int
    sign: ClassVar[float] = 1.0  # the reward that is served has the largest sign · reward

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def name(self) -> str:
        """``best-of-4`` for N = 4."""
        return f"best-of-{self.n}"

    def distortion(self, p: ArrayLike) -> Array:
        """Return p^N."""
        return np.asarray(p, float) ** self.n

    def density(self, p: ArrayLike) -> Array:
        """Return N·p^(N−1)."""
        return self.n * np.asarray(p, float) ** (self.n - 1)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the i-th smallest of M by C(i−1, N−1)/C(M, N), shared evenly within ties."""
        rewards = checked_samples(rewards_PM, self.n, self.name)
        return weights_from_counts(rewards, subsets_within(rewards.shape[1], self.n))

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve the best of N draws; of those that tie the first, which is any of them, as draws are alike."""
        rewards = yield Draws(self.n)
        return int(np.argmax(rewards))


@dataclass(frozen=True, slots=True)
class WorstOfN:
    """Serve the worst of N draws, the choice of an attacker who retries: h(p) = 1 − (1 − p)^N.

    >>> WorstOfN(2).distortion([0.0, 0.5, 1.0])
    array([0.  , 0.75, 1.  ])
    """

    n: int
    sign: ClassVar[float] = -1.0

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def name(self) -> str:
        """``worst-of-4`` for N = 4."""
        return f"worst-of-{self.n}"

    def distortion(self, p: ArrayLike) -> Array:
        """Return 1 − (1 − p)^N."""
        return 1.0 - (1.0 - np.asarray(p, float)) ** self.n

    def density(self, p: ArrayLike) -> Array:
        """Return N·(1 − p)^(N−1)."""
        return self.n * (1.0 - np.asarray(p, float)) ** (self.n - 1)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the i-th smallest of M by C(M−i, N−1)/C(M, N), shared evenly within ties."""
        rewards = checked_samples(rewards_PM, self.n, self.name)
        return weights_from_counts(rewards, 1.0 - subsets_within(rewards.shape[1], self.n)[::-1])

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve the worst of N draws; of those that tie the first, which is any of them, as draws are alike."""
        rewards = yield Draws(self.n)
        return int(np.argmin(rewards))


Extreme = BestOfN | WorstOfN


def is_extreme(procedure: Procedure) -> TypeIs[Extreme]:
    """Return whether a procedure serves the largest or the smallest of N rewards."""
    return isinstance(procedure, Extreme)


def parse(name: str) -> Extreme | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    if match := re.fullmatch(r"(best|worst)-of-(\d+)", name):
        return (BestOfN if match[1] == "best" else WorstOfN)(int(match[2]))
    return None
