"""Distillation: one plain language model that follows another policy of the run, token by token."""

from collections.abc import Mapping
from typing import Literal, cast

from pydantic import Field, PrivateAttr

from infalign.core.settings import Name
from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.models.pretrained import load_policy
from infalign.theory.aims import Aim
from infalign.training.output_folder import Job
from infalign.training.solvers.base import PLAIN, DataNeeds, History, Inputs, Solver
from infalign.training.solvers.offline import Offline, states_below


class Settings(Solver):
    """Σ_t KL(π_teacher ‖ π) over the whole vocabulary, on the rollouts that the teacher was trained on.

    What its teacher aims at is its aim.
    """

    solver: Literal["distil"]
    teacher: Name = Field(description="the offline policy of this recipe to distill, such as one with a guide")
    _teacher: Offline = PrivateAttr()

    def find_teacher(self, policies: Mapping[str, Solver]) -> None:
        offline = {name: other for name, other in policies.items() if other.has_objective}
        if self.teacher not in offline:
            raise ValueError(
                f"teacher is {self.teacher}, which is not an offline policy of this recipe "
                f"({', '.join(offline) or 'it has none'})"
            )
        self._teacher = cast(Offline, offline[self.teacher])

    @property
    def data_needs(self) -> DataNeeds:
        """Its teacher; the states below the layers that it trains, and those that its teacher's guide reads."""
        guided = self._teacher.guide is not None  # a teacher without a guide is another model than the reference
        return DataNeeds(self.teacher, states_below(self.fit), self._teacher.data_needs.states if guided else None)

    def aim(self, procedure: Served = PLAIN) -> Aim | None:
        return self._teacher.aim(procedure)

    @property
    def method(self) -> str:
        return f"{self._teacher.method}, distilled"

    def train(self, inputs: Inputs, law: Law | None, job: Job) -> History:
        """Fit the reference to the teacher, on the rollouts that its law chooses."""
        from infalign.training.offline_trainer import Distillation, fit_to_rollouts

        assert law is not None
        teacher, _ = load_policy(inputs.folder(self.teacher), device=job.device)
        model, tokenizer = inputs.base(job.device)
        loss = Distillation(teacher, self._teacher.objective(law))
        return fit_to_rollouts(loss, model, inputs.rows(self), law, self.fit, job).save(tokenizer)
