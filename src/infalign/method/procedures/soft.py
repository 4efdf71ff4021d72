"""Soft Best-of-N: one of N draws, the better ones more often."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures.base import Serving, check_n
from infalign.method.procedures.order_statistics import MOST_DRAWS, OrderStatistics

SPELLINGS = ("soft-best-of-N:T",)
SHARPEST = 0.01  # the smallest |temperature|: e^{1/T} is a number


@dataclass(frozen=True, slots=True)
class SoftBestOfN:
    """Serve one of N draws, its chance ∝ e^{r/T} with r its rank among them from 0, the worst, to 1, the best.

    It is Best-of-N as the ``temperature`` T → 0, one plain draw as T → ∞, and favours the worst for T < 0. With
    x = e^{1/(T·(N−1))}, h(p) = ((1 + (x − 1)·p)^N − 1)/(x^N − 1). Soft Best-of-N (arXiv 2505.03156) with ranks for
    rewards, so that it does not depend on their scale.
    """

    n: int
    temperature: float

    def __post_init__(self) -> None:
        check_n(self.n)
        if self.n < 2 or not (np.isfinite(self.temperature) and abs(self.temperature) >= SHARPEST):
            raise ConfigError(
                f"soft Best-of-N has N of at least 2 and a finite temperature of at least {SHARPEST} or at most "
                f"−{SHARPEST}, found N = {self.n} and {self.temperature:g}"
            )
        if self.n > MOST_DRAWS:
            raise ConfigError(f"soft Best-of-N is of at most {MOST_DRAWS:,} draws, found N = {self.n}")

    @property
    def name(self) -> str:
        """``soft-best-of-8:0.2`` for N = 8 and T = 0.2."""
        return f"soft-best-of-{self.n}:{self.temperature:.15g}"

    @property
    def step(self) -> float:
        """The log of x, by which a draw's chance grows from one rank to the next."""
        return 1.0 / (self.temperature * (self.n - 1))

    def distortion(self, p: ArrayLike) -> Array:
        """Return h(p)."""
        grown = np.log1p(np.expm1(self.step) * np.asarray(p, float))
        return np.asarray(np.expm1(self.n * grown) / np.expm1(self.n * self.step))

    def density(self, p: ArrayLike) -> Array:
        """Return h'(p) = N·(x − 1)·(1 + (x − 1)·p)^{N−1}/(x^N − 1)."""
        more = np.expm1(self.step)
        grown = np.log1p(more * np.asarray(p, float))
        return np.asarray(self.n * more * np.exp((self.n - 1) * grown) / np.expm1(self.n * self.step))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the samples as procedures that serve by the place among N draws do."""
        return self._by_place().weights(rewards_PM)

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve one of N draws by its place among them."""
        return self._by_place().serving(rng)

    def _by_place(self) -> OrderStatistics:
        odds = np.exp(self.step * (np.arange(self.n) - (self.n - 1 if self.step > 0 else 0)))
        return OrderStatistics(self.name, tuple((odds / odds.sum()).tolist()))


def parse(name: str) -> SoftBestOfN | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    match = re.fullmatch(r"soft-best-of-(\d+):([-+.e\d]+)", name)
    return SoftBestOfN(int(match[1]), float(match[2])) if match else None
