"""maxk: the policy gradient of the served win rate, or of the served reward itself, without a transformation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from infalign.core.errors import ConfigError
from infalign.method.group_advantages import credit, served_win_rate
from infalign.method.optimum import Objective
from infalign.method.procedures import Extreme, Served, is_extreme
from infalign.method.shapings import Ranked, Raw, Shaping
from infalign.method.transforms import Identity
from infalign.theory.optimum import optimal
from infalign.training.advantages import Advantages, Batch
from infalign.training.solvers.base import RecipeFacts
from infalign.training.solvers.on_policy import OnPolicy
from infalign.training.solvers.theory import MethodTheory, OptimumTheory, ProcedureTheory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WinOverServed:
    """The probability of beating the response that the base policy serves, as a shaping (`served_win_rate`)."""

    procedure: Extreme
    scale = 1.0

    @property
    def name(self) -> str:
        """``win against best-of-4``."""
        return f"win against {self.procedure.name}"

    def __call__(self, rewards: Any, reference_rewards_K: Any) -> Any:
        """Return the win rates of ``rewards``."""
        return served_win_rate(rewards, reference_rewards_K, self.procedure)


class OrderStatisticCredit(Advantages):
    """The gradient of W − β·KL: order-statistic credit for the rewards, a leave-one-out baseline for the KL."""

    def __init__(self, procedure: Extreme) -> None:
        self._procedure = procedure

    def compute(self, loop: Any, batch: Batch) -> torch.Tensor:
        """Return the credit of each response minus β times its centered log-ratio."""
        import torch

        groups = batch.every_reward.view(-1, loop.num_generations).double().cpu().numpy()
        found = torch.tensor(credit(groups, self._procedure).ravel(), device=batch.rewards_B.device)
        return loop.local_rows(found).float() - loop.beta * loop.subtract_others_mean(batch.log_ratio_BT.sum(1))


class Settings(OnPolicy):
    """maxk maximizes J − β·KL, where J is what the recipe's procedure, best-of-N or worst-of-N, wins or serves.

    For rewards of 0 and 1 the two objectives are one: pass@N.
    """

    fixed_shaping: ClassVar[Shaping] = Ranked(Identity())

    solver: Literal["maxk"]
    objective: Objective = Field(
        "win-rate",
        description="maximize the served policy's win rate over the served reference, or its mean reward",
    )

    @property
    def theory(self) -> MethodTheory:
        """The optimum for the procedure."""
        theory = ProcedureTheory if self.objective == "win-rate" else OptimumTheory
        return theory(self.kl_budget, self.shaping, self.beta, self.objective)

    @property
    def recipe_dependencies(self) -> tuple[str, ...]:
        """The procedure."""
        return ("procedure",)

    @property
    def label(self) -> str:
        """``maxk``, or ``maxk reward``."""
        return super().label if self.objective == "win-rate" else f"{super().label} {self.objective}"

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError unless the procedure's gradient can be estimated and the budget can be spent."""
        procedure = recipe.procedure
        if not is_extreme(procedure):
            raise ValueError(f"maxk supports best-of-N and worst-of-N; the procedure is {procedure.name}")
        if min(self.generations, recipe.rollouts) < procedure.n:
            raise ValueError(
                f"{procedure.name} needs generations and rollout.k of at least {procedure.n}, found "
                f"{self.generations} and {recipe.rollouts}"
            )
        if self.kl_budget is not None and self.objective == "win-rate":
            try:
                optimal(procedure, kl=self.kl_budget)
            except ConfigError as error:
                raise ValueError(str(error)) from error

    def reward_shaping(self, procedure: Served) -> Shaping:
        """Return the probability of beating the response that the base policy serves, or the reward itself."""
        assert is_extreme(procedure)
        return WinOverServed(procedure) if self.objective == "win-rate" else Raw()

    def advantages(self, reference: str, procedure: Served) -> Advantages:
        """Return the order-statistic credit of the procedure."""
        assert is_extreme(procedure)
        return OrderStatisticCredit(procedure)
