"""BoNBoN: the best and the worst of n rollouts (Gui et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from infalign.method.calibration import Array
from infalign.training.solvers.base import ToBestOfN
from infalign.training.solvers.offline import Examples, Offline, random_sets

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BoNBoN:
    """Best and worst of n: −α·log π(best) + (1 − α)·(h_best − h_worst − 1/2β_n)²; its optimum is not Best-of-n.

    1/2β_n = (n − 1)·H_{n−1} is the mean of h_best − h_worst under Best-of-n itself, but pairs with that *mean* do not
    make Best-of-n the optimum. ``released_code`` selects the loss of the paper's repository, which has
    −log σ(β_n·(h_best − h_worst)) instead of the square. Each pass splits the rollouts into K/n random sets; in a set
    of equal rewards the best and the worst are the same rollout.
    """

    n: int
    released_code: bool = False
    alpha: float = 0.005

    @property
    def margin(self) -> float:
        """1/2β_n."""
        return float((self.n - 1) * (1.0 / np.arange(1, self.n)).sum())

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return the best and the worst of each set with 1/2β_n."""
        sets = random_sets(rewards_K.size, self.n, rng)
        rewards, rows = rewards_K[sets], np.arange(len(sets))
        pairs = np.stack([sets[rows, rewards.argmax(1)], sets[rows, rewards.argmin(1)]], axis=1)
        return pairs, np.full(len(sets), self.margin)

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, with the best's log-likelihood relative to the reference's."""
        from torch.nn.functional import logsigmoid

        best, worst = h_BM.unbind(1)
        if self.released_code:
            contrast = -logsigmoid((best - worst) / (2.0 * number_B))
        else:
            contrast = (best - worst - number_B).square()
        return (self.alpha * -best + (1.0 - self.alpha) * contrast).mean()


class Settings(ToBestOfN, Offline):
    """BoNBoN, with the paper's loss or that of the released code."""

    solver: Literal["bonbon"]
    released_code: bool = Field(False, description="the loss of the authors' code, not of the paper")

    def objective(self, beta: float) -> BoNBoN:
        """Return its objective."""
        return BoNBoN(self.n, self.released_code)
