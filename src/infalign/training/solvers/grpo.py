"""GRPO with TRL's own trainer: KL as a loss term and, if ``shipped``, TRL's default group statistics."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from infalign.training.solvers.base import RecipeFacts
from infalign.training.solvers.on_policy import OnRanks


class Settings(OnRanks):
    """GRPO; its KL(π‖π_ref) is a separate loss term, whose gradient differs from that of KL in the reward."""

    solver: Literal["grpo"]
    shipped: bool = Field(False, description="TRL's default settings, which replace Φ by another")
    stored: bool = Field(False, description="one outer iteration on the K rollouts, which are its groups")

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return not self.stored

    @property
    def trl_options(self) -> Mapping[str, Any]:
        """Those that keep the shape of Φ, unless ``shipped``."""
        return {} if self.shipped else super().trl_options

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError as `OnRanks` does, and if a batch is not a whole number of stored groups."""
        super().check(recipe)
        if self.stored and self.fit.batch_size % recipe.rollouts:
            raise ValueError(
                f"fit.batch_size {self.fit.batch_size} is no multiple of rollout.k {recipe.rollouts}, its group"
            )
