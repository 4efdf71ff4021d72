"""snips: what the policy itself would serve, over the stored rollouts weighted by importance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.method.optimum import Optimal
from infalign.method.procedures import RankProcedure
from infalign.method.procedures.base import cumulated
from infalign.training.objectives import Examples, Objective
from infalign.training.output_folder import Job
from infalign.training.solvers.base import OPTIMA, AimSetting, History, Inputs, Shaped, Workload
from infalign.training.solvers.offline import Offline
from infalign.training.solvers.pairs import random_sets

if TYPE_CHECKING:
    import torch

USUAL_BATCH = {"batch_size": 256, "device_batch_size": 32}  # of a fit, in rollouts


def snips(law: Law) -> Objective:
    """Return the loss β·KL(q ‖ 1/K) − J(q) of the law q_i ∝ π(y_i)/π_ref(y_i) over the K rollouts of a prompt.

    These weights are self-normalized importance sampling (Swaminathan and Joachims 2015). For an optimum, J is what its
    procedure serves of q, so a rollout's reward is transformed by the policy's own law, not by the law that a network
    may be unable to reach. For other shapings J is the mean of the shaped rewards. Probability that leaves all rollouts
    of a prompt alike changes nothing here; the strength of the policy counts it. Raises ConfigError for a prompt with
    one rollout.
    """
    shaping, size = law.shaping, set_size(law)
    if size < 2:
        raise ConfigError(
            "snips compares the rollouts of a prompt, but a prompt has only one; raise rollout.k, or leave it out"
        )

    def examples(rewards_K: Array, log_ratios_K: Array, rng: np.random.Generator) -> Examples:
        rows = random_sets(rewards_K.size, size, rng)
        worth_K = shaping.worth(rewards_K) if isinstance(shaping, Optimal) else law.beta * log_ratios_K
        return rows, worth_K[rows]

    def loss(h_BK: torch.Tensor, worth_BK: torch.Tensor) -> torch.Tensor:
        log_q = h_BK.log_softmax(1)
        q = log_q.exp()
        if isinstance(shaping, Optimal):
            own = q.detach().double().cpu().numpy(), worth_BK.double().cpu().numpy()
            value_B, slope_BK = (q.new_tensor(part) for part in served_value(shaping.procedure, *own))
            served_B = value_B + ((q - q.detach()) * slope_BK).sum(1)
        else:
            served_B = (q * worth_BK).sum(1)
        kl_B = (q * (log_q + np.log(size))).sum(1)
        return (law.beta * kl_B - served_B).mean()

    return Objective(examples, loss)


def served_value(procedure: RankProcedure, q_BK: Array, worth_BK: Array) -> tuple[Array, Array]:
    """Return what a procedure serves of laws q over K rollouts, (B,), and its derivative in each q_i, (B, K).

    J = Σ_j (h(F_j) − h(F_{j−1}))·w_j, with F the sums of q from the lowest worth; the derivative is g of
    `method.optimum`.
    """
    order = worth_BK.argsort(axis=1)
    below = cumulated(np.take_along_axis(q_BK, order, axis=1))
    worth = np.take_along_axis(worth_BK, order, axis=1)
    steps = procedure.density(below[:, 1:-1]) * np.diff(worth, axis=1)
    slopes = np.zeros(q_BK.shape)
    np.put_along_axis(slopes, order[:, :-1], -steps[:, ::-1].cumsum(axis=1)[:, ::-1], axis=1)
    return (np.diff(procedure.distortion(below), axis=1) * worth).sum(axis=1), slopes


def set_size(law: Law) -> int:
    """Return how many rollouts of a prompt are compared: all, or where K differs the fewest that a prompt has."""
    return min(np.size(row) for row in law.rewards_PK)


class Settings(Shaped, Offline):
    """Off-policy gradients of J − β·KL, by the policy's own probabilities of the stored rollouts."""

    solver: Literal["snips"]
    transform: AimSetting = Field(
        OPTIMA["optimal"],
        description="optimal: J is what the procedure serves; with others, those of qrpo, the mean shaped reward",
    )

    def with_usual_fit(self, *, pretrained: bool) -> Self:
        """Return it in the usual form, with batches in which rollouts of several prompts fit."""
        usual = super().with_usual_fit(pretrained=pretrained)
        return usual if usual is self else usual.model_copy(update={"fit": usual.fit.model_copy(update=USUAL_BATCH)})

    def workload(self, prompts: int, rollouts: int) -> Workload:
        work = super().workload(prompts, rollouts)
        return work._replace(passes=work.passes * work.responses / rollouts, responses=rollouts)

    def objective(self, law: Law) -> Objective:
        return snips(law)

    def train(self, inputs: Inputs, law: Law | None, job: Job) -> History:
        """Fit as other solvers do; an example is a prompt with its rollouts, so a batch has as many fewer."""
        assert law is not None
        size, fit = set_size(law), self.fit
        at_once = max(1, (fit.device_batch_size or fit.batch_size) // size)
        batch = at_once * max(1, fit.batch_size // size // at_once)
        fit = fit.model_copy(update={"batch_size": batch, "device_batch_size": at_once})
        return super(Settings, self.model_copy(update={"fit": fit})).train(inputs, law, job)
