"""QRPO: regression of log π/π_ref on its known optimum (Quantile Reward Policy Optimization, NeurIPS 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from infalign.display import COLOURS
from infalign.method.calibration import Array
from infalign.method.shapings import Shaping, log_ratios, optimal_log_ratios
from infalign.method.transforms import Transformation
from infalign.training.solvers.base import Examples, Offline, Shaped, singles

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class QRPO:
    """Regression of h on Φ(Ĉ)/β − log Z: loss (Φ(Ĉ)/β − log Z − h)², optimum π_ref·e^{Φ/β}/Z; β for the raw Φ.

    With calibrated rewards Z is known, so the RLHF optimum can be fitted by least squares. Any
    :class:`infalign.method.shapings.Shaping` of the reward may replace Φ(Ĉ).
    """

    shaping: Transformation | Shaping
    beta: float

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return every rollout with its target."""
        return singles(rewards_K), regression_targets(rewards_K[None], self.shaping, self.beta)[0]

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean squared residual, in nats²."""
        return (number_B - h_BM[:, 0]).square().mean()


def regression_targets(rewards_PK: Array, shaping: Transformation | Shaping, beta: float) -> Array:
    """Return log π*/π_ref of each rollout, shape (P, K), with the exact Z of the K rollouts of its prompt.

    Rewards are shaped among the prompt's own K rollouts, where Ĉ is the mid-rank, and Z = mean exp(Φ(Ĉ)/β) over them:
    ties are handled exactly, and a prompt whose rewards are all equal has targets 0. ``beta`` is for the paper's raw Φ.

    Ratios below 1/K, which K rollouts cannot distinguish from 0, are raised to 1/K: −e^{−10u} at a KL of one nat
    requires log-ratios of −1000 for the lowest ranks, and their squares would dominate the loss.
    """
    seen_PK = np.maximum(optimal_log_ratios(shaping, rewards_PK, beta), -np.log(rewards_PK.shape[1]))
    return log_ratios(seen_PK, 1.0)


class Settings(Shaped, Offline):
    """QRPO for any shaping of the reward."""

    colour: ClassVar[str] = COLOURS[1]

    solver: Literal["qrpo"] = "qrpo"

    def objective(self, beta: float) -> QRPO:
        """Return its objective, with ``beta`` for the paper's raw Φ."""
        return QRPO(self.shaping, beta)
