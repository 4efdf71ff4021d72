"""Procedures that sort N draws and serve one by its place: k-th best, top k."""

import re
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures.base import (
    Draws,
    Serving,
    check_n,
    check_probabilities,
    checked_samples,
    log_choose,
    read_n,
    weights_from_counts,
)

SPELLINGS = ("2nd-best-of-N (any k)", "top-K-of-N")


@dataclass(frozen=True)
class OrderStatistics:
    """Draw N, sort, and serve the i-th smallest with probability ``probabilities[i−1]``: h = Σ_i q_i·I_p(i, N−i+1).

    Raises ConfigError unless the probabilities are non-negative and sum to 1.

    >>> OrderStatistics("median-of-3", (0.0, 1.0, 0.0)).distortion(0.5)
    array(0.5)
    """

    name: str
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        check_probabilities(self.name, self.probabilities)

    def distortion(self, p: ArrayLike) -> Array:
        p, n = np.asarray(p, float), len(self.probabilities)
        return np.asarray(sum(q * scipy.special.betainc(i, n - i + 1, p) for i, q in self._served()))

    def density(self, p: ArrayLike) -> Array:
        """Return Σ_i q_i·Beta(p; i, N−i+1)."""
        p, n = np.asarray(p, float), len(self.probabilities)
        total = np.zeros_like(p)
        for i, q in self._served():
            log_power = scipy.special.xlogy(i - 1, p) + scipy.special.xlog1py(n - i, -p)
            total += q * np.exp(log_power - scipy.special.betaln(i, n - i + 1))
        return total

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the j-th smallest of M by Σ_i q_i·C(j−1, i−1)·C(M−j, N−i)/C(M, N), shared evenly within ties."""
        n = len(self.probabilities)
        rewards = checked_samples(rewards_PM, n, self.name)
        samples = rewards.shape[1]
        j = np.arange(1.0, samples + 1)
        served = np.zeros(samples + 1)
        for i, q in self._served():
            log_ways = log_choose(j - 1, i - 1) + log_choose(samples - j, n - i) - log_choose(samples, n)
            served[1:] += q * np.exp(log_ways)
        return weights_from_counts(rewards, np.cumsum(served))

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve the draw at a random place among N."""
        rewards = yield Draws(len(self.probabilities))
        place = rng.choice(len(rewards), p=self.probabilities)
        return int(np.argsort(rewards, kind="stable")[place])

    def _served(self) -> list[tuple[int, float]]:
        return [(i, q) for i, q in enumerate(self.probabilities, start=1) if q > 0]


def kth_best(k: int, n: int) -> OrderStatistics:
    """Return the procedure that serves the k-th best of ``n`` draws, spelled ``2nd-best-of-8``."""
    _check_k(k, n)
    suffix = "th" if 10 <= k % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(k % 10, "th")
    return OrderStatistics(f"{k}{suffix}-best-of-{n}", tuple(float(i == n - k) for i in range(n)))


def top_k(k: int, n: int) -> OrderStatistics:
    """Return the procedure that serves one of the ``k`` best of ``n`` draws at random, spelled ``top-2-of-8``."""
    _check_k(k, n)
    return OrderStatistics(f"top-{k}-of-{n}", tuple(float(i >= n - k) / k for i in range(n)))


def _check_k(k: int, n: int) -> None:
    check_n(n)
    if not 1 <= k <= n:
        raise ConfigError(f"k must be between 1 and N = {n}, found k = {k}")


def parse(name: str) -> OrderStatistics | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    if match := re.fullmatch(r"(\d+)(?:st|nd|rd|th)-best-of-(\d+)", name):
        return kth_best(read_n(match[1]), read_n(match[2]))
    if match := re.fullmatch(r"top-(\d+)-of-(\d+)", name):
        return top_k(read_n(match[1]), read_n(match[2]))
    return None
