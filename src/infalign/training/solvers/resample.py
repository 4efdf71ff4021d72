"""Fine-tuning on rollouts weighted by the optimal policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from infalign.method.calibration import Array
from infalign.method.shapings import Shaping, optimal_log_ratios
from infalign.method.transforms import Transformation
from infalign.training.solvers.base import Shaped
from infalign.training.solvers.offline import Examples, Offline, single_examples, weighted_likelihood

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Resample:
    """Fine-tuning on rollouts weighted by e^{Φ(Ĉ)/β}, normalized within the prompt; β for the paper's raw Φ.

    In expectation the loss −h·e^{Φ(Ĉ)/β}/Z is KL(π* ‖ π) up to a constant: the forward-KL projection of
    π* = π_ref·e^{Φ/β}/Z. Any :class:`infalign.method.shapings.Shaping` of the reward may replace Φ(Ĉ).
    """

    shaping: Transformation | Shaping
    beta: float

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return every rollout with its weight; the weights have mean 1."""
        return single_examples(rewards_K), np.exp(optimal_log_ratios(self.shaping, rewards_K[None], self.beta)[0])

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the weighted negative log-likelihood, relative to the reference's."""
        return weighted_likelihood(h_BM, number_B)


class Settings(Shaped, Offline):
    """Weighted fine-tuning for any shaping of the reward."""

    solver: Literal["resample"]

    def objective(self, beta: float) -> Resample:
        """Return its objective, with ``beta`` for the paper's raw Φ."""
        return Resample(self.shaping, beta)
