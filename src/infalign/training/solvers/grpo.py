"""GRPO: its own objective, in-loss KL and, as shipped, group statistics, by TRL's own trainer."""

from typing import ClassVar, Literal

from pydantic import Field

from infalign.display import COLOURS
from infalign.training.solvers.base import OnRanks, Surroundings


class Settings(OnRanks):
    """GRPO; KL(π‖π_ref) as a loss of its own is the gradient of something else than KL in the reward."""

    colour: ClassVar[str] = COLOURS[3]

    solver: Literal["grpo"]
    shipped: bool = Field(False, description="TRL's default settings, which replace Φ by another")
    stored: bool = Field(False, description="one outer iteration on the K rollouts, which are its groups")

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return not self.stored

    @property
    def keeps_shaping(self) -> bool:
        """Whether those statistics of the carrier are off that would replace Φ by another."""
        return not self.shipped

    def check(self, around: Surroundings) -> None:
        """Raise ValueError where OnRanks does, and if stored groups do not fill a batch."""
        super().check(around)
        if self.stored and self.fit.batch_size % around.rollouts:
            raise ValueError(
                f"fit.batch_size {self.fit.batch_size} is no multiple of rollout.k {around.rollouts}, its group"
            )
