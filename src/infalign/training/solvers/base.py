"""Settings of a solver. A solver is one file of this folder: its settings, and its loss or advantages.

What a policy aims at (`theory.aims`) and what its training reads (`DataNeeds`) are values of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol, Self

from pydantic import Field, model_validator

from infalign.core.errors import ConfigError
from infalign.core.settings import Draws, Kind, Positive, spelled
from infalign.method.laws import Law
from infalign.method.procedures import Served, Standard
from infalign.method.shapings import parse_shaping
from infalign.method.transforms import Identity, read_table
from infalign.models.settings import Fit
from infalign.theory.aims import Aim, Best, StoredOptimum, Tilt
from infalign.theory.law import MIN_KL
from infalign.training.solvers.guide import Guide, States

if TYPE_CHECKING:
    from infalign.training.output_folder import Job

History = list[dict[str, Any]]
PLAIN = Standard()
KL_TOLERANCE = 0.1  # relative distance from the KL budget from which a run says so
OPTIMA = {one.name: one for one in (StoredOptimum(), StoredOptimum("reward"), StoredOptimum("win-rate"))}


def read_aim(name: str) -> Aim:
    """Return what a recipe's ``transform`` names; a transformation that is read from a file is named after the file."""
    if name in OPTIMA:
        return OPTIMA[name]
    return Tilt(read_table(Path(name), name).shaping if name.endswith(".json") else parse_shaping(name))


AimSetting = Annotated[Aim, *spelled(read_aim)]


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """The parts of a recipe that a solver is checked against."""

    procedure: Served
    rollouts: int  # K, per training prompt
    has_reward_model: bool  # the reward is a model that transformers loads


class DataNeeds(NamedTuple):
    """What a training reads besides the rollouts: another policy of the run, and stored states of the reference."""

    teacher: str | None = None  # the policy that it follows
    states: States | None = None  # None: it reads texts only
    teacher_states: States | None = None  # for its teacher's guide


class Inputs(Protocol):
    """What a policy of a run is trained from; each part is loaded when it is asked for."""

    @property
    def procedure(self) -> Served:
        """What serves the policy."""

    def rows(self, policy: Solver) -> Sequence[dict[str, Any]]:
        """Return the rollouts, with what else of the reference the policy reads."""

    def base(self, device: str) -> tuple[Any, Any]:
        """Return the reference and its tokenizer."""

    def start(self, policy: Solver, device: str) -> Any:
        """Return the reference, with an untrained guide if the policy has one."""

    def model(self, policy: str, device: str) -> Any:
        """Return the trained model of another policy."""

    def problem(self) -> Any:
        """Return the `on_policy_trainer.Problem`."""


class Solver(Kind):
    """Base class of all solvers. A method is a solver with its aim; its strength is a KL budget, a β or an n."""

    discriminator: ClassVar[str] = "solver"
    has_objective: ClassVar[bool] = False  # on the log-ratios of stored rollouts (`Offline`)
    draws_per_response: ClassVar[int] = 1  # responses generated for each response that is trained on

    solver: str
    fit: Fit = Field(Fit(), description="how it is trained")

    def aim(self, procedure: Served = PLAIN) -> Aim | None:
        """Return what it aims at, None for nothing but its next step. Raises as `Aim.at`."""
        return None

    @abstractmethod
    def train(self, inputs: Inputs, law: Law | None, job: Job) -> History:
        """Train towards a law, save the model, and return the log."""

    @property
    def budget(self) -> float | None:
        """Its KL budget in nats, if it has one."""
        return None

    @property
    def trained_guide(self) -> Guide | None:
        """The guide that is trained in the place of the model."""
        return None

    def with_usual_fit(self, *, pretrained: bool) -> Self:
        """Return it with a learning rate, its own or the usual one."""
        fit = self.fit.with_learning_rate(pretrained=pretrained, adapter=self.fit.lora is not None)
        return self.model_copy(update={"fit": fit})

    def passes_over(self, rollouts: int) -> float:
        """Return how often it reads each of so many stored rollouts."""
        return self.fit.passes

    @property
    def reads_reference(self) -> int:
        """How often the reference reads each response that is trained on."""
        return 0

    @property
    def responses_per_prompt(self) -> float:
        """How many responses are generated per training prompt, over the whole training."""
        return 0.0

    @property
    def data_needs(self) -> DataNeeds:
        """What its training reads besides the rollouts."""
        return DataNeeds()

    @property
    def recipe_dependencies(self) -> tuple[str, ...]:
        """Keys of the recipe that its training depends on, besides the policy's own."""
        return ("procedure",) if (aim := self.aim()) is not None and aim.by_procedure else ()

    @property
    def label(self) -> str:
        """The solver with its loss and form, unless these are the usual ones: ``qrpo squared guided``."""
        return self.solver

    @property
    def method(self) -> str:
        """Its aim and solver: ``exp:10 (qrpo)``; ``maxk`` for a solver with a fixed aim."""
        return self.label

    @property
    def transformation(self) -> str:
        """The spelling of what it aims at, or its own name."""
        return self.solver if (aim := self.aim()) is None else aim.name

    def group(self, rollouts: int) -> int:
        """Return how many responses to a prompt an epoch trains on, of so many stored ones."""
        return rollouts

    def find_teacher(self, policies: Mapping[str, Solver]) -> None:
        """Find the policy that it follows, if it follows one. Raises ValueError if there is none."""
        return

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError if the recipe does not meet the solver's requirements."""
        try:
            if (aim := self.aim(recipe.procedure)) is not None:
                aim.check()
        except ConfigError as error:
            raise ValueError(str(error)) from error


class ToBudget(Solver):
    """A solver whose strength is a KL budget or the paper's β."""

    kl_budget: Annotated[float, Field(ge=MIN_KL, allow_inf_nan=False)] | None = Field(
        None, description="nats per response; β follows from theory"
    )
    beta: Positive | None = Field(None, description="the paper's β, for its unnormalized Φ")

    @model_validator(mode="after")
    def _one_strength(self) -> ToBudget:
        if (self.kl_budget is None) == (self.beta is None):
            raise ValueError("give exactly one of kl_budget, beta")
        return self

    @property
    def budget(self) -> float | None:
        """Its KL budget."""
        return self.kl_budget


class Shaped(ToBudget):
    """A solver of the KL-regularized RLHF objective, for any shaping of the reward."""

    transform: AimSetting = Field(
        Tilt(Identity().shaping),
        description=(
            "of the rank: exp:10, log, power:7, FILE.json, …; optimal: "
            "the optimum for the procedure on the stored rewards, exact where they tie (optimal:reward or "
            "optimal:win-rate unless they are 0 or 1); not of the rank: raw, raw-prompt, par, lsc:0.85"
        ),
    )

    def aim(self, procedure: Served = PLAIN) -> Aim:
        """Return what its transformation aims at."""
        return self.transform.at(procedure, self.kl_budget, self.beta)

    @property
    def method(self) -> str:
        """``exp:10 (qrpo)``."""
        return f"{self.transform.name} ({self.label})"


class ToBestOfN(Solver):
    """A solver that aims at Best-of-n."""

    n: Draws = Field(description="the n of Best-of-n")

    def aim(self, procedure: Served = PLAIN) -> Aim:
        """Return Best-of-n itself."""
        return Best(self.n)

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError for fewer rollouts than n."""
        super().check(recipe)
        if self.n > recipe.rollouts:
            raise ValueError(f"the best of {self.n} needs rollout.k of at least {self.n}")
