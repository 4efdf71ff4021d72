"""Fine-tuning on weighted rollouts: by the optimal policy, or by what Best-of-n serves."""

from typing import Literal

import numpy as np

from infalign.method.laws import best_of
from infalign.method.shapings import Shaping, optimal_log_ratios
from infalign.method.transforms import Transformation
from infalign.training.solvers.base import Shaped, ToBestOfN
from infalign.training.solvers.offline import Objective, Offline, weighted_likelihood


def resampling(shaping: Transformation | Shaping, beta: float) -> Objective:
    """Return the weights e^{Φ(Ĉ)/β}, normalized within the prompt, with β for the paper's raw Φ.

    In expectation the loss −h·e^{Φ(Ĉ)/β}/Z is KL(π* ‖ π) up to a constant: the forward-KL projection of
    π* = π_ref·e^{Φ/β}/Z.
    """
    return weighted_likelihood(lambda rewards_K: np.exp(optimal_log_ratios(shaping, rewards_K[None], beta)[0]))


def best_of_n_tuning(n: int) -> Objective:
    """Return the average over all sets of n among the K rollouts, whose optimum is Best-of-n; ties share their weight.

    Its weights raise DataError for fewer than n rollouts.
    """
    return weighted_likelihood(lambda rewards_K: np.exp(best_of(rewards_K[None], n).log_ratios_PK[0]))


class Resample(Shaped, Offline):
    """Weighted fine-tuning for any shaping of the reward."""

    solver: Literal["resample"]

    def objective(self, beta: float) -> Objective:
        """Return its objective, with ``beta`` for the paper's raw Φ."""
        return resampling(self.shaping, beta)


class BonSft(ToBestOfN, Offline):
    """Fine-tuning on the best of n."""

    solver: Literal["bon-sft"]

    def objective(self, beta: float) -> Objective:
        """Return its objective."""
        return best_of_n_tuning(self.n)
