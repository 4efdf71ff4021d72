"""RLOO: E[reward] − β·KL with a leave-one-out baseline, with TRL's own trainer."""

from typing import ClassVar, Literal

from infalign.training.solvers.on_policy import OnRanks


class Settings(OnRanks):
    """RLOO, with the KL term in the reward."""

    trl_trainer: ClassVar[Literal["rloo"]] = "rloo"

    solver: Literal["rloo"]
