"""BoNBoN: the best and the worst of n rollouts (Gui et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from infalign.method.calibration import Array
from infalign.training.solvers.base import ToBestOfN
from infalign.training.solvers.offline import Examples, Objective, Offline, random_sets

if TYPE_CHECKING:
    import torch

ALPHA = 0.005  # weight of the best's likelihood, as in the paper


def bonbon_margin(n: int) -> float:
    """Return 1/2β_n = (n − 1)·H_{n−1}, the mean of h_best − h_worst under Best-of-n itself."""
    return float((n - 1) * (1.0 / np.arange(1, n)).sum())


def bonbon(n: int) -> Objective:
    """Return −α·log π(best) + (1 − α)·(h_best − h_worst − 1/2β_n)² of the best and the worst of n, relative to π_ref.

    Its optimum is not Best-of-n: pairs with that *mean* difference do not make it the optimum. Each
    pass splits the rollouts into K/n random sets; in a set of equal rewards the best and the worst are one rollout.
    """

    def examples(rewards_K: Array, rng: np.random.Generator) -> Examples:
        sets = random_sets(rewards_K.size, n, rng)
        rewards, rows = rewards_K[sets], np.arange(len(sets))
        pairs = np.stack([sets[rows, rewards.argmax(1)], sets[rows, rewards.argmin(1)]], axis=1)
        return pairs, np.full(len(sets), bonbon_margin(n))

    def loss(h_BM: torch.Tensor, margin_B: torch.Tensor) -> torch.Tensor:
        best, worst = h_BM.unbind(1)
        return (ALPHA * -best + (1.0 - ALPHA) * (best - worst - margin_B).square()).mean()

    return Objective(examples, loss)


class Settings(ToBestOfN, Offline):
    """BoNBoN, with the loss of the paper."""

    solver: Literal["bonbon"]

    def objective(self, beta: float) -> Objective:
        """Return its objective."""
        return bonbon(self.n)
