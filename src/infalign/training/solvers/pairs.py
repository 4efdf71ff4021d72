"""Solvers on sets of rollouts: IPO on pairs labeled by the reward, BoNBoN on the best and the worst of n."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from infalign.method.calibration import Array, win
from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.method.transforms import Identity, Ranked
from infalign.theory.aims import Aim, Tilt
from infalign.training.objectives import Examples, Objective
from infalign.training.solvers.base import PLAIN, ToBestOfN, ToBudget
from infalign.training.solvers.offline import Offline

if TYPE_CHECKING:
    import torch

ALPHA = 0.005  # weight of the best's likelihood in BoNBoN, as in the paper


def ipo(tau: float) -> Objective:
    """Return the loss (h_i − h_j − (2w_ij − 1)/2τ)² of pairs labeled by the reward (Azar et al. 2023, equation 17).

    Its optimum is π_ref·e^{C/τ}/Z, the identity transformation at β = τ. In each pass a rollout is in one pair, with a
    new random partner, and one of an odd number is left out; a tie has the label 0. Each h is a sum over tokens; TRL's
    mean over tokens has another optimum.
    """

    def examples(rewards_K: Array, log_ratios_K: Array, rng: np.random.Generator) -> Examples:
        pairs = random_sets(rewards_K.size, 2, rng)
        first, second = rewards_K[pairs].T
        return pairs, (2.0 * win(first, second) - 1.0) / (2.0 * tau)

    def loss(h_BM: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        first, second = h_BM.unbind(1)
        return (first - second - label_B).square().mean()

    return Objective(examples, loss)


def bonbon_margin(n: int) -> float:
    """Return 1/2β_n = (n − 1)·H_{n−1}, the mean of h_best − h_worst under Best-of-n itself."""
    return float((n - 1) * (1.0 / np.arange(1, n)).sum())


def bonbon(n: int) -> Objective:
    """Return −α·log π(best) + (1 − α)·(h_best − h_worst − 1/2β_n)² of the best and the worst of n, relative to π_ref.

    The loss of Gui et al. 2024. Its optimum is not Best-of-n: pairs with that *mean* difference do not make it the
    optimum. Each pass splits the rollouts into K/n random sets; in a set of equal rewards the best and the worst are
    one rollout.
    """

    def examples(rewards_K: Array, log_ratios_K: Array, rng: np.random.Generator) -> Examples:
        sets = random_sets(rewards_K.size, n, rng)
        rewards, rows = rewards_K[sets], np.arange(len(sets))
        pairs = np.stack([sets[rows, rewards.argmax(1)], sets[rows, rewards.argmin(1)]], axis=1)
        return pairs, np.full(len(sets), bonbon_margin(n))

    def loss(h_BM: torch.Tensor, margin_B: torch.Tensor) -> torch.Tensor:
        best, worst = h_BM.unbind(1)
        return (ALPHA * -best + (1.0 - ALPHA) * (best - worst - margin_B).square()).mean()

    return Objective(examples, loss)


def random_sets(k: int, size: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return disjoint random sets, (k // size, size), of the indices below ``k``."""
    return rng.permutation(k)[: k // size * size].reshape(-1, size)


class Ipo(ToBudget, Offline):
    """IPO optimizes the identity transformation, and τ is its β."""

    solver: Literal["ipo"]

    def aim(self, procedure: Served = PLAIN) -> Aim:
        return Tilt(Ranked(Identity()), kl=self.kl_budget, beta=self.beta)

    def objective(self, law: Law) -> Objective:
        return ipo(law.beta)


class Bonbon(ToBestOfN, Offline):
    """BoNBoN, with the loss of the paper."""

    solver: Literal["bonbon"]

    def objective(self, law: Law) -> Objective:
        return bonbon(self.n)
