"""Offline solvers: an objective on the stored K rollouts of a prompt, for a language model or a guide."""

from abc import abstractmethod
from functools import partial
from typing import ClassVar, Self

from pydantic import Field, model_validator

from infalign.core.distributed import is_first
from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.models.settings import TRIAL_RATES, TRIAL_SHARE, Fit, Lora
from infalign.training.objectives import Objective
from infalign.training.output_folder import Job
from infalign.training.solvers.base import DataNeeds, History, Inputs, Solver, Workload, in_batches
from infalign.training.solvers.guide import Guide, States


class Offline(Solver):
    """A solver that learns from the stored K rollouts per prompt and generates nothing."""

    has_objective: ClassVar[bool] = True

    guide: Guide | None = Field(None, description="train a guide beside the frozen reference, not the reference itself")

    @model_validator(mode="after")
    def _whole_guide(self) -> "Offline":
        if self.guide is not None and self.fit.lora is not None:
            raise ValueError("a guide is trained whole; leave guide or fit.lora out")
        if self.guide is not None and self.fit.gradient_checkpointing:
            raise ValueError(
                "a guide needs its activations; leave fit.gradient_checkpointing out and lower "
                "fit.device_batch_size to save memory"
            )
        return self

    def check(self, procedure: Served, rollouts: int, *, has_reward_model: bool) -> None:
        super().check(procedure, rollouts, has_reward_model=has_reward_model)
        if self.guide is not None and self.guide.trunk == "reward" and not has_reward_model:
            raise ValueError("guide.trunk is reward, but the reward is not a model; set it to reference")

    @property
    def label(self) -> str:
        return super().label if self.guide is None else f"{super().label} guided"

    def with_usual_fit(self, *, pretrained: bool) -> Self:
        """Return it in the usual form where neither ``fit`` nor ``guide`` is given; training finds a learning rate."""
        if not self.model_fields_set.isdisjoint({"fit", "guide"}):
            return self
        if pretrained:
            return self.model_copy(update={"fit": Fit(batch_size=64, device_batch_size=8, lora=Lora())})
        return self.model_copy(update={"fit": Fit(batch_size=128), "guide": Guide()})

    def workload(self, prompts: int, rollouts: int) -> Workload:
        """Return it with trials of learning rates; the reference reads beside a guide that has no stored states."""
        trials = 0 if self.fit.learning_rate is not None else len(TRIAL_RATES)
        passes = self.fit.passes_over(prompts * rollouts) * (1.0 + TRIAL_SHARE * trials)
        by_reference = int(self.guide is not None and self.guide.states is None)
        return in_batches(passes, rollouts)._replace(by_reference=by_reference)

    @property
    def trained_guide(self) -> Guide | None:
        return self.guide

    @property
    def recipe_dependencies(self) -> tuple[str, ...]:
        """The procedure, whose gain chooses the strength."""
        return ("procedure",)

    @property
    def data_needs(self) -> DataNeeds:
        """The states that its guide reads, or those below the layers that it trains."""
        return DataNeeds(states=states_below(self.fit) if self.guide is None else self.guide.states)

    @abstractmethod
    def objective(self, law: Law) -> Objective:
        """Return its objective, for examples of this law."""

    def train(self, inputs: Inputs, law: Law | None, job: Job) -> History:
        """Fit the reference or a guide to the rollouts, at the strength that serves best within the KL of the law."""
        from infalign.models.top_layers import starting_from_states
        from infalign.training.offline_trainer import RolloutRegression
        from infalign.training.strength import choose_strength
        from infalign.training.tuning import fit_and_tune

        assert law is not None
        rows, loss = inputs.rows(self), RolloutRegression(self.objective(law))
        fitted = fit_and_tune(loss, partial(inputs.start, self, job.device), rows, law, self.fit, job)
        reference, tokenizer = inputs.base(job.device)
        if is_first():
            last = self.fit.last_layers
            with starting_from_states(fitted.model, last), starting_from_states(reference, last):
                choice = choose_strength(fitted, reference, rows, law, inputs.procedure, job.on_progress)
                fitted.history[-1] |= choice.summary()
        return fitted.save(tokenizer)


def states_below(fit: Fit) -> States | None:
    """Return the states that a training of the last layers starts from; None for that of the whole model."""
    return States(last=fit.last_layers) if fit.last_layers else None
