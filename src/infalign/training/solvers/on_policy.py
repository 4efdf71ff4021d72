"""On-policy solvers: the shaping and the advantages of responses that are drawn while a policy is trained.

`Rloo` and `Grpo` keep the advantages of TRL's own trainers; other solvers have theirs in their own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from infalign.core.settings import Draws
from infalign.method.procedures import Served
from infalign.method.shapings import Shaping
from infalign.training.solvers.base import Shaped, ToBudget

if TYPE_CHECKING:
    from infalign.training.advantages import Advantages


UNNORMALIZED = {"scale_rewards": "none", "loss_type": "dr_grpo", "use_bias_correction_kl": True}  # of GRPO


class OnPolicy(ToBudget):
    """A solver that samples from the policy that it trains, in groups of ``generations`` responses per prompt."""

    trl_trainer: ClassVar[Literal["rloo", "grpo"]] = "grpo"
    stops_at_budget: ClassVar[bool] = False  # when it has spent the KL budget, which may be before its last step

    generations: Draws = Field(8, description="completions per prompt and step")

    @model_validator(mode="after")
    def _whole_groups(self) -> OnPolicy:
        if self.fit.batch_size % self.generations:
            raise ValueError(
                f"fit.batch_size {self.fit.batch_size} must be a multiple of generations {self.generations}"
            )
        return self

    @property
    def responses_per_prompt(self) -> float:
        """How many responses are generated per training prompt, over the whole training."""
        return self.fit.passes * self.generations * self.draws_per_response

    @property
    def trl_options(self) -> Mapping[str, Any]:
        """Settings of the TRL trainer besides those of every solver: its statistics would change the shape of Φ."""
        return UNNORMALIZED

    def reward_shaping(self, procedure: Served) -> Shaping:
        """Return the shaping that is applied to rewards before advantages are computed."""
        return self.shaping

    def advantages(self, reference: str, procedure: Served) -> Advantages | None:
        """Return the advantages that replace the TRL trainer's, or None to keep those. ``reference`` is a model."""
        return None


class Rloo(Shaped, OnPolicy):
    """RLOO, with the KL term in the reward."""

    trl_trainer: ClassVar[Literal["rloo"]] = "rloo"

    solver: Literal["rloo"]

    @property
    def trl_options(self) -> Mapping[str, Any]:
        """Rewards as they are, which keeps the shape of Φ."""
        return {"normalize_advantages": False}


class Grpo(Shaped, OnPolicy):
    """GRPO; its KL(π‖π_ref) is a separate loss term, whose gradient differs from that of KL in the reward."""

    solver: Literal["grpo"]
