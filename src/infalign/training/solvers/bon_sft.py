"""Fine-tuning on the best of n rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN
from infalign.training.solvers.base import ToBestOfN
from infalign.training.solvers.offline import Examples, Offline, single_examples, weighted_likelihood

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BestOfNTuning:
    """Fine-tuning on the best of n, averaged over all sets of n among the K rollouts: its optimum is Best-of-n.

    Ties share their weight. `examples` raises DataError for fewer than n rollouts.
    """

    n: int

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return every rollout with its weight; the weights have mean 1."""
        return single_examples(rewards_K), BestOfN(self.n).weights(rewards_K[None])[0] * rewards_K.size

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the weighted negative log-likelihood, relative to the reference's."""
        return weighted_likelihood(h_BM, number_B)


class Settings(ToBestOfN, Offline):
    """Fine-tuning on the best of n."""

    solver: Literal["bon-sft"]

    def objective(self, beta: float) -> BestOfNTuning:
        """Return its objective."""
        return BestOfNTuning(self.n)
