"""IPO: pairs of rollouts labeled by the reward (Azar et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from infalign.method.calibration import Array, win
from infalign.method.shapings import Ranked, Shaping
from infalign.method.transforms import Identity
from infalign.training.solvers.base import ToBudget
from infalign.training.solvers.offline import Examples, Objective, Offline, random_sets

if TYPE_CHECKING:
    import torch


def ipo(tau: float) -> Objective:
    """Return the loss (h_i − h_j − (2w_ij − 1)/2τ)² of pairs labeled by the reward (Azar et al. 2023, equation 17).

    Its optimum is π_ref·e^{C/τ}/Z, the identity transformation at β = τ. In each pass a rollout is in one pair, with a
    new random partner, and one of an odd number is left out; a tie has the label 0. Each h is a sum over tokens; TRL's
    mean over tokens has another optimum.
    """

    def examples(rewards_K: Array, rng: np.random.Generator) -> Examples:
        pairs = random_sets(rewards_K.size, 2, rng)
        first, second = rewards_K[pairs].T
        return pairs, (2.0 * win(first, second) - 1.0) / (2.0 * tau)

    def loss(h_BM: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        first, second = h_BM.unbind(1)
        return (first - second - label_B).square().mean()

    return Objective(examples, loss)


class Settings(ToBudget, Offline):
    """IPO optimizes the identity transformation, and τ is its β."""

    fixed_shaping: ClassVar[Shaping] = Ranked(Identity())

    solver: Literal["ipo"]

    def objective(self, beta: float) -> Objective:
        """Return its objective, with τ = ``beta``."""
        return ipo(beta)
