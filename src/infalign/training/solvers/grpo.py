"""GRPO with TRL's own trainer: KL as a loss term."""

from typing import Literal

from infalign.training.solvers.base import Shaped
from infalign.training.solvers.on_policy import OnPolicy


class Settings(Shaped, OnPolicy):
    """GRPO; its KL(π‖π_ref) is a separate loss term, whose gradient differs from that of KL in the reward."""

    solver: Literal["grpo"]
