"""maxk: the policy gradient of the served win rate, or of the served reward itself, without a transformation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from infalign.method.calibration import as_rewards, win
from infalign.method.group_advantages import credit
from infalign.method.laws import Law
from infalign.method.optimum import Goal
from infalign.method.procedures import Extreme, Served
from infalign.method.shapings import NotByRank, Raw
from infalign.theory.aims import Aim, StoredOptimum, WinRateOptimum
from infalign.training.objectives import Advantages, Ascent, Batch, Loop
from infalign.training.solvers.base import PLAIN
from infalign.training.solvers.on_policy import UNNORMALIZED, OnPolicy

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WinOverServed(NotByRank):
    """The probability of beating the response that the base policy serves, as a shaping, ties one half.

    Unbiased from K ≥ N reference rewards: the mean over all sets of N of them; DataError for fewer. For exact ranks it
    is u^N for Best-of-N and 1 − (1 − u)^N for Worst-of-N.
    """

    procedure: Extreme

    @property
    def name(self) -> str:
        return f"win against {self.procedure.name}"

    def __call__(self, rewards: Any, reference_rewards_K: Any) -> Any:
        rewards, references_K = as_rewards(rewards), as_rewards(reference_rewards_K)
        return np.asarray(win(rewards[..., None], references_K) @ self.procedure.weights(references_K[None])[0])


class OrderStatisticCredit(Advantages):
    """The gradient of W − β·KL: order-statistic credit for the rewards, a leave-one-out baseline for the KL."""

    def __init__(self, procedure: Extreme) -> None:
        self._procedure = procedure

    def compute(self, loop: Loop, batch: Batch) -> torch.Tensor:
        groups = batch.every_reward.view(-1, loop.num_generations).double().cpu().numpy()
        every_credit = batch.rewards_B.new_tensor(credit(groups, self._procedure).ravel())
        return loop.local_rows(every_credit).float() - loop.beta * loop.subtract_others_mean(batch.log_ratio_BT.sum(1))


class Settings(OnPolicy):
    """maxk maximizes J − β·KL, where J is what the recipe's procedure, best-of-N or worst-of-N, wins or serves.

    For rewards of 0 and 1 the two objectives are one: pass@N.
    """

    solver: Literal["maxk"]
    objective: Goal = Field(
        "win-rate", description="maximize the served policy's win rate over the served reference, or its mean reward"
    )

    def aim(self, procedure: Served = PLAIN) -> Aim:
        optimum = WinRateOptimum() if self.objective == "win-rate" else StoredOptimum(self.objective)
        return optimum.at(procedure, self.kl_budget, self.beta)

    @property
    def label(self) -> str:
        return super().label if self.objective == "win-rate" else f"{super().label} {self.objective}"

    def check(self, procedure: Served, rollouts: int, *, has_reward_model: bool) -> None:
        """Raise ValueError unless the procedure's gradient can be estimated and the budget can be spent."""
        if not isinstance(procedure, Extreme):
            raise ValueError(f"maxk supports best-of-N and worst-of-N; the procedure is {procedure.name}")
        if min(self.generations, rollouts) < procedure.n:
            raise ValueError(
                f"{procedure.name} needs generations and rollout.k of at least {procedure.n}, found "
                f"{self.generations} and {rollouts}"
            )
        super().check(procedure, rollouts, has_reward_model=has_reward_model)

    def ascent(self, law: Law | None, procedure: Served) -> Ascent:
        """Return that with order-statistic credit for beating the served reference, or for the reward."""
        assert law is not None
        assert isinstance(procedure, Extreme)
        shaping = WinOverServed(procedure) if self.objective == "win-rate" else Raw()
        advantages = OrderStatisticCredit(procedure)
        return Ascent(shaping, law.paper_beta, self.generations, "grpo", UNNORMALIZED, lambda _: advantages)
