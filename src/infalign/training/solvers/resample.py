"""Fine-tuning on rollouts weighted by a law: of a tilt, or of Best-of-n."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.training.objectives import Examples, Objective
from infalign.training.solvers.base import Shaped, ToBestOfN
from infalign.training.solvers.offline import Offline

if TYPE_CHECKING:
    import torch


class Weighted(Offline):
    """Fine-tuning on every rollout, with its weight by the law."""

    def objective(self, law: Law) -> Objective:
        """Return the loss −h·e^T over all rollouts: in expectation KL(π* ‖ π) up to a constant, the forward KL."""

        def examples(rewards_K: Array, log_ratios_K: Array, rng: np.random.Generator) -> Examples:
            return np.arange(rewards_K.size)[:, None], np.exp(log_ratios_K)

        def loss(h_BM: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
            return -(weight_B * h_BM[:, 0]).mean()

        return Objective(examples, loss)


class Resample(Shaped, Weighted):
    """Weighted fine-tuning for any shaping of the reward."""

    solver: Literal["resample"]


class BonSft(ToBestOfN, Weighted):
    """Fine-tuning on the best of n."""

    solver: Literal["bon-sft"]
