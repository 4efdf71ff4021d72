"""On-policy solvers: responses are drawn while a policy is trained.

`Rloo` and `Grpo` keep the advantages of TRL's own trainers; other solvers have theirs in their own file.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from infalign.core.settings import DrawCount
from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.training.objectives import Ascent
from infalign.training.output_folder import Job
from infalign.training.solvers.base import History, Inputs, Shaped, ToBudget, Workload

# Of GRPO: its statistics would change the shape of Φ.
UNNORMALIZED = {"scale_rewards": "none", "loss_type": "dr_grpo", "use_bias_correction_kl": True}


class OnPolicy(ToBudget):
    """A solver that samples from the policy that it trains, in groups of ``generations`` responses per prompt."""

    draws_per_response: ClassVar[int] = 1

    generations: DrawCount = Field(8, description="completions per prompt and step")

    @model_validator(mode="after")
    def _whole_groups(self) -> "OnPolicy":
        if self.fit.batch_size % self.generations:
            raise ValueError(
                f"fit.batch_size {self.fit.batch_size} must be a multiple of generations {self.generations}"
            )
        return self

    def workload(self, prompts: int, rollouts: int) -> Workload:
        """Return that of its generations; the reference reads for the KL, and where advantages are computed."""
        passes, each = self.fit.passes, self.generations
        return Workload(passes, each, by_reference=2, drawn=passes * each * self.draws_per_response)

    def ascent(self, law: Law | None, procedure: Served) -> Ascent:
        """Return how it climbs towards a law, in GRPO's loop on unnormalized rewards."""
        assert law is not None
        return Ascent(law.shaping, law.beta, self.generations, "grpo", UNNORMALIZED)

    def train(self, inputs: Inputs, law: Law | None, job: Job) -> History:
        from infalign.training.on_policy_trainer import fit_on_policy

        return fit_on_policy(inputs.problem(), self.ascent(law, inputs.procedure), self.fit, job)


class Rloo(Shaped, OnPolicy):
    """RLOO, with the KL term in the reward."""

    solver: Literal["rloo"]

    def ascent(self, law: Law | None, procedure: Served) -> Ascent:
        """Return that of TRL's trainer on rewards as they are, which keeps the shape of Φ."""
        return replace(super().ascent(law, procedure), trl_trainer="rloo", trl_options={"normalize_advantages": False})


class Grpo(Shaped, OnPolicy):
    """GRPO; its KL(π‖π_ref) is a separate loss term, whose gradient differs from that of KL in the reward."""

    solver: Literal["grpo"]
