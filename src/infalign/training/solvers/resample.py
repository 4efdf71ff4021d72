"""Fine-tuning on rollouts weighted by the optimal policy."""

from typing import Literal

import numpy as np

from infalign.method.shapings import Shaping, optimal_log_ratios
from infalign.method.transforms import Transformation
from infalign.training.solvers.base import Shaped
from infalign.training.solvers.offline import Objective, Offline, weighted_likelihood


def resampling(shaping: Transformation | Shaping, beta: float) -> Objective:
    """Return the weights e^{Φ(Ĉ)/β}, normalized within the prompt, with β for the paper's raw Φ.

    In expectation the loss −h·e^{Φ(Ĉ)/β}/Z is KL(π* ‖ π) up to a constant: the forward-KL projection of
    π* = π_ref·e^{Φ/β}/Z.
    """
    return weighted_likelihood(lambda rewards_K: np.exp(optimal_log_ratios(shaping, rewards_K[None], beta)[0]))


class Settings(Shaped, Offline):
    """Weighted fine-tuning for any shaping of the reward."""

    solver: Literal["resample"]

    def objective(self, beta: float) -> Objective:
        """Return its objective, with ``beta`` for the paper's raw Φ."""
        return resampling(self.shaping, beta)
