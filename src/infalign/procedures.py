"""Inference-time procedures: what is served when the model is sampled several times.

A rank-based procedure is a *distortion* h of the CDF: a policy with CDF F over calibrated reward is served
with CDF h(F). Each also weighs the samples of a finite set so that the weighted law is an unbiased estimate of what
would be served.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln
from scipy.stats import rankdata

from infalign.calibration import Array
from infalign.errors import ConfigError, DataError


class Procedure(Protocol):
    """What evaluation needs of a procedure."""

    @property
    def name(self) -> str:
        """The spelling for the command line and reports."""

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Return the probability, shape (P, M), that each sample is the one served from a random draw of the M."""


class RankProcedure(Procedure, Protocol):
    """A procedure that only looks at ranks: a distortion of the CDF."""

    def distortion(self, p: ArrayLike) -> Array:
        """Return h(p), the served CDF where the policy's CDF is ``p``."""

    def density(self, p: ArrayLike) -> Array:
        """Return h'(p)."""


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Serve the best of N draws: h(p) = p^N."""

    n: int

    def __post_init__(self) -> None:
        _check_n(self.n)

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
        rewards = _samples(rewards_PM, self.n, self.name)
        return _weights_from_counts(rewards, _subsets_within(rewards.shape[1], self.n))


@dataclass(frozen=True, slots=True)
class WorstOfN:
    """Serve the worst of N draws, the choice of an attacker who retries: h(p) = 1 − (1 − p)^N."""

    n: int

    def __post_init__(self) -> None:
        _check_n(self.n)

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
        rewards = _samples(rewards_PM, self.n, self.name)
        return _weights_from_counts(rewards, 1.0 - _subsets_within(rewards.shape[1], self.n)[::-1])


@dataclass(frozen=True, slots=True)
class Standard:
    """Serve one plain draw: h(p) = p."""

    name = "standard"

    def distortion(self, p: ArrayLike) -> Array:
        """Return p."""
        return np.array(p, float)

    def density(self, p: ArrayLike) -> Array:
        """Return 1."""
        return np.ones_like(np.asarray(p, float))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh every sample alike."""
        rewards = _samples(rewards_PM, 1, self.name)
        return np.full(rewards.shape, 1.0 / rewards.shape[1])


@dataclass(frozen=True, slots=True)
class RewindAndRepeat:
    """Draw until the reward reaches the base policy's ``quantile``, ``n`` times at most, and serve the last draw."""

    quantile: float
    n: int

    def __post_init__(self) -> None:
        _check_n(self.n)
        if not 0.0 < self.quantile < 1.0:
            raise ConfigError(f"the threshold of rewind is a quantile between 0 and 1, found {self.quantile}")

    @property
    def name(self) -> str:
        """``rewind:0.85:32`` for the paper's setting."""
        return f"rewind:{self.quantile:g}:{self.n}"

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the samples of each prompt given its threshold, drawing without replacement from the M.

        With c samples below the threshold a passing one is served with probability Σ_{k<n} (c)_k/(M−1)_k / M, a failing
        one with (c−1)_{n−1}/(M−1)_{n−1} / M, where (x)_k is the falling factorial.
        """
        rewards = _samples(rewards_PM, self.n, self.name)
        fails = rewards < self._thresholds(thresholds_P)
        samples = rewards.shape[1]
        count = fails.sum(axis=1)
        k = np.arange(self.n)
        all_fail = _falling_ratio(count[:, None], samples - 1, k).sum(axis=1)  # P(the first k of the others all fail)
        last = _falling_ratio(count - 1, samples - 1, np.array(self.n - 1))
        weights_PM: Array = np.where(fails, last[:, None], all_fail[:, None]) / samples
        return weights_PM

    def draws(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike) -> Array:
        """Return the expected number of draws for each prompt, shape (P,): Σ_{k<n} P(the first k draws all fail)."""
        rewards = _samples(rewards_PM, self.n, self.name)
        count = (rewards < self._thresholds(thresholds_P)).sum(axis=1)
        draws_P: Array = _falling_ratio(count[:, None], rewards.shape[1], np.arange(self.n)).sum(axis=1)
        return draws_P

    def _thresholds(self, thresholds_P: ArrayLike | None) -> Array:
        if thresholds_P is None:
            raise ConfigError(f"{self.name} needs the base policy's {self.quantile:g} quantile of every prompt")
        return np.asarray(thresholds_P, float)[:, None]


def parse_procedure(name: str) -> BestOfN | WorstOfN | Standard | RewindAndRepeat:
    """Return the procedure that ``name`` spells: ``standard``, ``best-of-4``, ``worst-of-4``, ``rewind:0.85:32``."""
    try:
        if name == "standard":
            return Standard()
        if name.startswith("best-of-"):
            return BestOfN(int(name.removeprefix("best-of-")))
        if name.startswith("worst-of-"):
            return WorstOfN(int(name.removeprefix("worst-of-")))
        if name.startswith("rewind:"):
            _, quantile, n = name.split(":")
            return RewindAndRepeat(float(quantile), int(n))
    except ValueError:
        pass
    raise ConfigError(f"unknown procedure {name!r}; known: standard, best-of-N, worst-of-N, rewind:QUANTILE:N")


def _check_n(n: int) -> None:
    if n < 1:
        raise ConfigError(f"a procedure draws at least once, found N = {n}")


def _samples(rewards_PM: ArrayLike, n: int, name: str) -> Array:
    rewards = np.asarray(rewards_PM, float)
    if rewards.ndim != 2:
        raise DataError(f"{name} weighs a prompts × samples array, found shape {rewards.shape}")
    if rewards.shape[1] < n:
        raise DataError(f"{name} cannot be estimated from {rewards.shape[1]} samples a prompt; draw at least {n}")
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise DataError(f"reward of prompt {prompt}, sample {sample} is {rewards[prompt, sample]}, not finite")
    return rewards


def _subsets_within(samples: int, n: int) -> Array:
    """Return C(m, n)/C(samples, n) for m = 0..samples: the chance that n draws all lie among the m lowest."""
    m = np.arange(samples + 1.0)
    with np.errstate(invalid="ignore"):
        ratio = np.exp(gammaln(m + 1) - gammaln(m - n + 1) - gammaln(samples + 1) + gammaln(samples - n + 1))
    return np.where(m < n, 0.0, ratio)


def _weights_from_counts(rewards_PM: Array, served_within: Array) -> Array:
    """Spread the probability served_within[≤] − served_within[<] evenly over the samples of each tie."""
    at_most = rankdata(rewards_PM, method="max", axis=1).astype(int)
    below = rankdata(rewards_PM, method="min", axis=1).astype(int) - 1
    weights_PM: Array = (served_within[at_most] - served_within[below]) / (at_most - below)
    return weights_PM


def _falling_ratio(x: ArrayLike, y: int, k: ArrayLike) -> Array:
    """Return (x)_k/(y)_k, the chance that k draws without replacement from y all come from x of them."""
    x, k = np.broadcast_arrays(np.asarray(x, float), np.asarray(k, float))
    inside = (k <= x) & (k <= y)
    with np.errstate(invalid="ignore"):
        ratio = np.exp(gammaln(x + 1) - gammaln(x - k + 1) - gammaln(y + 1.0) + gammaln(y - k + 1))
    return np.where(inside, ratio, 0.0)
