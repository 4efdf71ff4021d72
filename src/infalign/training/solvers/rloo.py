"""RLOO: E[reward] − β·KL with a leave-one-out baseline, with TRL's own trainer."""

from typing import ClassVar, Literal

from infalign.core.display import COLOURS
from infalign.training.solvers.base import OnRanks


class Settings(OnRanks):
    """RLOO, with the KL term in the reward."""

    carrier: ClassVar[Literal["rloo"]] = "rloo"
    colour: ClassVar[str] = COLOURS[0]

    solver: Literal["rloo"]
