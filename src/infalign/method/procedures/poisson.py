"""Best of a Poisson number of draws."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, pdtr, pdtrc, xlogy

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.procedures.base import Draws, Serving, checked_samples, subsets_within, weights_from_counts
from infalign.method.procedures.order_statistics import MOST_DRAWS

NEGLIGIBLE = 1e-9  # probability that a sample-based estimate may leave out
SPELLINGS = ("best-of-poisson:MU",)


@dataclass(frozen=True, slots=True)
class BestOfPoisson:
    """Serve the best of 1 + Poisson(``mu``) draws: h(p) = p·e^{μ(p−1)} (arXiv 2506.19248)."""

    mu: float

    def __post_init__(self) -> None:
        if not 0 < self.mu <= MOST_DRAWS:
            raise ConfigError(
                "best-of-poisson needs a positive finite number of further draws on average, at most "
                f"{MOST_DRAWS:,}, found {self.mu}"
            )

    @property
    def name(self) -> str:
        """``best-of-poisson:4`` for μ = 4."""
        return f"best-of-poisson:{self.mu:.15g}"

    def distortion(self, p: ArrayLike) -> Array:
        """Return p·e^{μ(p−1)}."""
        p = np.asarray(p, float)
        served: Array = p * np.exp(self.mu * (p - 1.0))
        return served

    def density(self, p: ArrayLike) -> Array:
        """Return (1 + μp)·e^{μ(p−1)}."""
        p = np.asarray(p, float)
        density: Array = (1.0 + self.mu * p) * np.exp(self.mu * (p - 1.0))
        return density

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Mix the weights of Best-of-n over n ≤ M; raises DataError if n > M has a probability above 1e-9."""
        rewards = checked_samples(rewards_PM, 1, self.name)
        samples = rewards.shape[1]
        if pdtrc(samples - 1, self.mu) > NEGLIGIBLE:
            raise DataError(
                f"{self.name} draws more than {samples} samples with probability {pdtrc(samples - 1, self.mu):.2g}; "
                "draw more a prompt"
            )
        n = np.arange(1, samples + 1)
        probability = np.exp(xlogy(n - 1, self.mu) - self.mu - gammaln(n)) / pdtr(samples - 1, self.mu)
        within = sum((q * subsets_within(samples, int(m)) for m, q in zip(n, probability, strict=True) if q > 0), 0.0)
        return weights_from_counts(rewards, np.asarray(within))

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve the best of 1 + Poisson(μ) draws."""
        rewards = yield Draws(1 + int(rng.poisson(self.mu)))
        return int(np.argmax(rewards))


def parse(name: str) -> BestOfPoisson | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    match = re.fullmatch(r"best-of-poisson:([-+.e\d]+)", name)
    return BestOfPoisson(float(match[1])) if match else None
