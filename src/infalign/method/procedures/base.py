"""What a procedure is, and the checks and weights that families share."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy  # whose special functions take .2 s to import: when they are used
from numpy.typing import ArrayLike
from typing_extensions import TypeIs

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array, as_rewards, places

MAX_N = 100_000  # draws; a quadrature would not see what more of them serve, the last 1/N of the ranks


@dataclass(frozen=True, slots=True)
class Draws:
    """Asks for further draws of the policy; the answer is their rewards.

    >>> next(BestOfN(2).serving(np.random.default_rng(0)))
    Draws(number=2)
    """

    number: int

    def __post_init__(self) -> None:
        check_n(self.number)


@dataclass(frozen=True, slots=True)
class BaseQuantile:
    """Asks for the reward at a quantile of the base policy's responses to the prompt; the answer is this one number."""

    quantile: float


@dataclass(frozen=True, slots=True)
class Votes:
    """Asks for further draws; the answer is a number for each, equal where their answers are, NaN for no answer."""

    number: int


Ask = Draws | BaseQuantile | Votes
Serving = Generator[Ask, list[float], int]
"""How an answer is chosen: asks, is sent what it asked for, and returns the number of the draw that is served.

Draws count from 0. The next one, which was not asked for, may be served too, whatever its reward is.
"""


class Procedure(Protocol):
    """What evaluation and serving need of a procedure."""

    @property
    def name(self) -> str:
        """The spelling for the command line and reports."""

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Return the probability, shape (P, M), that each sample is the one served from a random draw of the M."""

    def serving(self, rng: np.random.Generator) -> Serving:
        """Return how one answer is chosen, by the law that `weights` estimates."""


class Distortion(Protocol):
    """A map of CDFs: what is served has CDF h(F)."""

    def distortion(self, p: ArrayLike) -> Array:
        """Return h(p), the served CDF where the policy's CDF is ``p``."""

    def density(self, p: ArrayLike) -> Array:
        """Return h'(p)."""


class RankProcedure(Procedure, Distortion, Protocol):
    """A procedure that only looks at ranks."""


def looks_at_ranks(procedure: Procedure) -> TypeIs[RankProcedure]:
    """Return whether a procedure is a distortion of CDFs, so that it only looks at ranks."""
    return hasattr(procedure, "distortion") and hasattr(procedure, "density")


def check_n(n: int) -> None:
    """Raise ConfigError unless ``n`` is a number of draws up to `MAX_N`."""
    if not (isinstance(n, int | np.integer) and 1 <= n <= MAX_N):
        raise ConfigError(f"N must be a whole number of samples from 1 to {MAX_N:,}, found N = {n}")


def read_n(digits: str) -> int:
    """Return the number that a procedure's name spells. Raises ConfigError for one that is longer than `MAX_N`."""
    if len(digits.lstrip("0")) > len(str(MAX_N)):
        raise ConfigError(f"N must be a whole number of samples from 1 to {MAX_N:,}, found {len(digits):,} digits")
    return int(digits)


def check_probabilities(name: str, probabilities: tuple[float, ...]) -> None:
    """Raise ConfigError unless the probabilities are non-negative and sum to 1."""
    if not probabilities or min(probabilities) < 0 or not abs(sum(probabilities) - 1.0) < 1e-9:
        raise ConfigError(f"the probabilities of {name} must be non-negative and sum to 1, found {probabilities}")


def checked_samples(rewards_PM: ArrayLike, n: int, name: str) -> Array:
    """Return rewards (P, M) as numbers; raises DataError for another shape, M < ``n`` and what is not finite."""
    rewards = as_rewards(rewards_PM)
    if rewards.ndim != 2:
        raise DataError(f"{name} needs a prompts × samples array, found shape {rewards.shape}")
    if rewards.shape[1] < n:
        raise DataError(f"{name} cannot be estimated from {rewards.shape[1]} samples per prompt; it needs at least {n}")
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise DataError(f"reward of prompt {prompt}, sample {sample} is {rewards[prompt, sample]}, not finite")
    return rewards


def falling_ratio(x: ArrayLike, y: ArrayLike, k: ArrayLike) -> Array:
    """Return (x)_k/(y)_k, the chance that k ≤ y draws without replacement from y all come from x of them."""
    return np.asarray(np.exp(log_choose(x, k) - log_choose(y, k)))


def log_choose(n: ArrayLike, k: ArrayLike) -> Array:
    """Return log C(n, k), −∞ where k > n."""
    n, k = np.asarray(n, float), np.asarray(k, float)
    with np.errstate(invalid="ignore"):
        log_ways = scipy.special.gammaln(n + 1) - scipy.special.gammaln(k + 1) - scipy.special.gammaln(n - k + 1)
    return np.where(n < k, -np.inf, log_ways)


def cumulated(masses_PC: Array) -> Array:
    """Return the sums of masses, which fill [0, 1], before the first, between them and after the last, (P, C + 1)."""
    sums = np.pad(np.minimum(masses_PC.cumsum(axis=1), 1.0), ((0, 0), (1, 0)))
    sums[:, -1] = 1.0
    return sums


def weights_from_counts(rewards_PM: Array, served_within: Array) -> Array:
    """Spread the probability served_within[≤] − served_within[<] evenly over the samples of each tie.

    ``served_within`` is of the m = 0..M lowest, (M + 1, …), and the weights are (P, M, …).
    """
    below, at_most = places(rewards_PM)
    weights = served_within.take(at_most, axis=0)
    weights -= served_within.take(below, axis=0)
    weights.T[...] /= (at_most - below).T  # alike on all further axes
    return weights
