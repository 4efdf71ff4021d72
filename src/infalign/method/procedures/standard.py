"""One plain draw."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from infalign.method.calibration import Array
from infalign.method.procedures.base import Serving, checked_samples

SPELLINGS = ("standard",)


@dataclass(frozen=True, slots=True)
class Standard:
    """Serve one plain draw: h(p) = p."""

    name = "standard"

    def distortion(self, p: ArrayLike) -> Array:
        return np.array(p, float)

    def density(self, p: ArrayLike) -> Array:
        return np.ones_like(np.asarray(p, float))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        rewards = checked_samples(rewards_PM, 1, self.name)
        return np.full(rewards.shape, 1.0 / rewards.shape[1])

    def serving(self, rng: np.random.Generator) -> Serving:
        yield from ()
        return 0


def parse(name: str) -> Standard | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    return Standard() if name in SPELLINGS else None
