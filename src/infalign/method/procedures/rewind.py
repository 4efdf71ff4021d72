"""Rewind-and-Repeat: draw until a threshold of the base policy is passed.

It is the one procedure that looks at more than ranks within the policy: its distortion depends on how likely the policy
is to fall below a quantile of the base policy. `rewinds` and `distortion` are for code that treats all procedures
alike. The formulas are in docs/derivations.md, optimum of Rewind-and-Repeat.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from numpy.typing import ArrayLike
from typing_extensions import TypeIs

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.procedures.base import (
    BaseQuantile,
    Distortion,
    Draws,
    Procedure,
    RankProcedure,
    Serving,
    check_n,
    checked_samples,
    falling_ratio,
    looks_at_ranks,
    read_n,
)
from infalign.method.procedures.extremes import BestOfN

SPELLINGS = ("rewind:QUANTILE:N[:best]",)


@dataclass(frozen=True, slots=True)
class RewindAndRepeat:
    """Draw until the reward reaches the base policy's ``quantile``, ``n`` times at most.

    When no draw passes, ``serve`` says which is served: the ``last`` one (the paper) or the ``best``.

    >>> RewindAndRepeat(0.85, 32).expected_draws(0.85).round(2)  # of the base itself
    np.float64(6.63)
    """

    quantile: float
    n: int
    serve: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        check_n(self.n)
        if not 0.0 < self.quantile < 1.0:
            raise ConfigError(f"the quantile of rewind must be between 0 and 1, found {self.quantile}")
        if self.serve not in ("last", "best"):
            raise ConfigError(f"rewind serves the last or the best of its failed samples, found serve = {self.serve!r}")

    @property
    def name(self) -> str:
        """``rewind:0.85:32`` for the paper's setting, ``rewind:0.85:32:best`` when the best failed draw is served."""
        return f"rewind:{self.quantile:.15g}:{self.n}" + (":best" if self.serve == "best" else "")

    def given(self, below: ArrayLike) -> "Rewound":
        """Return the distortion for a policy whose probability of falling below the threshold is ``below``."""
        return Rewound(float(np.asarray(below)), self.n, self.serve)

    def expected_draws(self, below: ArrayLike) -> Array:
        """Return E[draws] = (1 − s^N)/(1 − s) for a probability ``below`` = s of falling below the threshold."""
        return _geometric(np.asarray(below, float), self.n)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the samples of each prompt given its threshold, drawing without replacement from the M.

        With c samples below the threshold a passing one is served with probability Σ_{k<n} (c)_k/(M−1)_k / M, where
        (x)_k is the falling factorial; a failing one with (c−1)_{n−1}/(M−1)_{n−1} / M as the last draw, as the best
        like the same sample under Best-of-n.
        """
        rewards = checked_samples(rewards_PM, self.n, self.name)
        fails = rewards < self._thresholds(thresholds_P, len(rewards))
        samples = rewards.shape[1]
        count = fails.sum(axis=1)
        k = np.arange(self.n)
        all_fail = falling_ratio(count[:, None], samples - 1, k).sum(axis=1)  # P(the first k of the others all fail)
        if self.serve == "best":
            failing = BestOfN(self.n).weights(rewards)
        else:
            failing = falling_ratio(count - 1, samples - 1, np.array(self.n - 1))[:, None] / samples
        return np.asarray(np.where(fails, failing, all_fail[:, None] / samples))

    def serving(self, rng: np.random.Generator) -> Serving:
        """Draw one after another and stop at the first that reaches the threshold."""
        (threshold,) = yield BaseQuantile(self.quantile)
        rewards: list[float] = []
        for number in range(self.n):
            rewards += yield Draws(1)
            if rewards[number] >= threshold:
                return number
        return int(np.argmax(rewards)) if self.serve == "best" else self.n - 1

    def draws(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike) -> Array:
        """Return the expected number of draws for each prompt, shape (P,): Σ_{k<n} P(the first k draws all fail)."""
        rewards = checked_samples(rewards_PM, self.n, self.name)
        count = (rewards < self._thresholds(thresholds_P, len(rewards))).sum(axis=1)
        return np.asarray(falling_ratio(count[:, None], rewards.shape[1], np.arange(self.n)).sum(axis=1))

    def _thresholds(self, thresholds_P: ArrayLike | None, prompts: int) -> Array:
        if thresholds_P is None:
            raise ConfigError(f"{self.name} needs the base policy's {self.quantile:g} quantile for every prompt")
        thresholds = np.asarray(thresholds_P, float)
        if thresholds.shape != (prompts,):
            raise DataError(f"{self.name} needs one threshold for each of {prompts} prompts, found {thresholds.shape}")
        if np.isnan(thresholds).any():
            raise DataError(f"the threshold of prompt {int(np.argmax(np.isnan(thresholds)))} is nan")
        return thresholds[:, None]


@dataclass(frozen=True, slots=True)
class Rewound:
    """Rewind-and-Repeat for a policy that falls below the threshold with probability ``below`` = s.

    h(p) = s^N + (1 − s^N)(p − s)/(1 − s) for p ≥ s; below that p·s^{N−1} for the last draw, p^N for the best.
    """

    below: float
    n: int
    serve: Literal["last", "best"]

    def distortion(self, p: ArrayLike) -> Array:
        p, s = np.asarray(p, float), self.below
        failing = p**self.n if self.serve == "best" else p * s ** (self.n - 1)
        return np.where(p < s, failing, s**self.n + (p - s) * _geometric(np.asarray(s), self.n))

    def density(self, p: ArrayLike) -> Array:
        p, s = np.asarray(p, float), self.below
        failing = self.n * p ** (self.n - 1) if self.serve == "best" else np.full_like(p, s ** (self.n - 1))
        return np.where(p < s, failing, _geometric(np.asarray(s), self.n))


Served = RankProcedure | RewindAndRepeat  # every procedure that theory knows


def parse(name: str) -> RewindAndRepeat | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    match = re.fullmatch(r"rewind:([-+.e\d]+):(\d+)(:best)?", name)
    return RewindAndRepeat(float(match[1]), read_n(match[2]), "best" if match[3] else "last") if match else None


def rewinds(procedure: Procedure) -> TypeIs[RewindAndRepeat]:
    """Return whether a procedure compares with a threshold of the base policy."""
    return isinstance(procedure, RewindAndRepeat)


def distortion(procedure: Procedure, cdf_at: Callable[[float], ArrayLike] = float) -> Distortion:
    """Return what ``procedure`` does to the CDF of a policy; ``cdf_at(u)`` is that CDF at base rank u, the base's u.

    Raises ConfigError for a procedure that does not only look at ranks, nor rewinds.
    """
    if rewinds(procedure):
        return procedure.given(cdf_at(procedure.quantile))
    if not looks_at_ranks(procedure):
        raise ConfigError(
            f"{procedure.name} is no rank procedure: without distortion and density it has no law; only win-rate, "
            "generate and serve take it"
        )
    return procedure


def _geometric(s: Array, n: int) -> Array:
    """Return 1 + s + … + s^(n−1)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = -np.expm1(scipy.special.xlogy(n, s)) / (1.0 - s)
    return np.where(s == 1.0, float(n), total)
