"""QRPO: regression of log π/π_ref on its known optimum (Quantile Reward Policy Optimization, NeurIPS 2025)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.method.optimum import left_out
from infalign.training.objectives import Examples, Objective
from infalign.training.output_folder import Job
from infalign.training.solvers.base import History, Inputs, Shaped
from infalign.training.solvers.offline import Offline

if TYPE_CHECKING:
    import torch

Divergence = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]  # of targets from log-ratios, (B,) each


def squared(h: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return (T − h)², in nats²: the loss of the QRPO paper."""
    return (target - h).square()


def logistic(h: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(σ(T) ‖ σ(h)) of two coins: the cross-entropy of a classifier with odds e^h, less its minimum.

    It tells π* from π_ref with the labels known, and does not chase log-ratios where π* has no mass.
    """
    from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

    label = target.sigmoid()
    return cross_entropy(h, label, reduction="none") - cross_entropy(target, label, reduction="none")


DIVERGENCES: dict[str, Divergence] = {"squared": squared, "logistic": logistic}


def qrpo(divergence: Divergence = logistic) -> Objective:
    """Return regression of h on the log-ratios T of the law π_ref·e^T, raised to what K rollouts tell apart from 0.

    With calibrated rewards Z is known, so the RLHF optimum can be fitted by regression. Each loss is a Bregman
    divergence of T from h: h = T is its minimizer, response by response, whatever responses are drawn from. They differ
    in what a model that cannot reach it gives up (`docs/theory.md`). In each pass a rollout comes (1 + e^T)/2 times on
    average: half of the rows are as from π_ref, half as from π*.
    """

    def examples(rewards_K: Array, log_ratios_K: Array, rng: np.random.Generator) -> Examples:
        targets_K = regression_targets(log_ratios_K)
        rows_K = sample_systematically(0.5 + 0.5 * np.exp(targets_K), rng)
        return rows_K[:, None], targets_K[rows_K]

    def loss(h_BM: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
        return divergence(h_BM[:, 0], target_B).mean()

    return Objective(examples, loss)


def regression_targets(log_ratios_K: Array) -> Array:
    """Return the log-ratios of a prompt's K rollouts, those below 1/K raised to it, with the mass that they had before.

    K rollouts cannot distinguish less from 0: −e^{−10u} at a KL of one nat has log-ratios of −1000 for the lowest
    ranks, and their squares would dominate the loss.
    """
    raised_K = np.maximum(log_ratios_K, -np.log(log_ratios_K.size))
    return np.asarray(raised_K + np.log(np.exp(log_ratios_K).mean() / np.exp(raised_K).mean()))


def sample_systematically(expected_K: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return rows that come ``expected_K`` times on average, each rounded up or down: systematic sampling.

    If the numbers add up to a whole one, that is how many rows there are.
    """
    order_K = rng.permutation(expected_K.size)
    ends_K = np.floor(np.cumsum(expected_K[order_K]) + rng.random())
    return np.repeat(order_K, np.diff(ends_K, prepend=0.0).astype(np.intp))


class Settings(Shaped, Offline):
    """QRPO for any shaping of the reward."""

    solver: Literal["qrpo"] = "qrpo"
    loss: Literal["squared", "logistic"] = Field(
        "logistic", description="how log π/π_ref is fitted; both have the same optimum"
    )

    @property
    def label(self) -> str:
        return super().label if self.loss == "logistic" else f"{super().label} {self.loss}"

    def objective(self, law: Law) -> Objective:
        return qrpo(DIVERGENCES[self.loss])

    def train(self, inputs: Inputs, law: Law | None, job: Job) -> History:
        """Fit to what each rollout's target is by the others of its prompt."""
        return super().train(inputs, law and left_out(law), job)
