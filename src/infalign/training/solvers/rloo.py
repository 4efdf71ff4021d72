"""RLOO: E[reward] − β·KL with a leave-one-out baseline, with TRL's own trainer."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from infalign.training.solvers.base import Shaped
from infalign.training.solvers.on_policy import OnPolicy


class Settings(Shaped, OnPolicy):
    """RLOO, with the KL term in the reward."""

    trl_trainer: ClassVar[Literal["rloo"]] = "rloo"

    solver: Literal["rloo"]

    @property
    def trl_options(self) -> Mapping[str, Any]:
        """Rewards as they are, which keeps the shape of Φ."""
        return {"normalize_advantages": False}
