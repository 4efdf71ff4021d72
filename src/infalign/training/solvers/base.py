"""Settings of a solver. A solver is one file of this folder: its settings, and its loss or advantages.

What a policy aims at (`theory.aims`) and what its training reads (`DataNeeds`) are values of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from infalign.core.errors import ConfigError
from infalign.core.settings import DrawCount, Positive, Settings, spelled
from infalign.method.laws import Law
from infalign.method.procedures import Served, Standard
from infalign.method.shapings import parse_shaping
from infalign.method.transforms import Identity, Ranked, read_table
from infalign.models.pretrained import load_policy
from infalign.models.settings import PROMPT_EXAMPLES, Fit
from infalign.models.tokenizers import load_tokenizer
from infalign.theory.aims import Aim, Best, StoredOptimum, Tilt
from infalign.theory.law import MIN_KL
from infalign.training.output_folder import Job
from infalign.training.solvers.guide import Guide, States

History = list[dict[str, Any]]
PLAIN = Standard()
KL_TOLERANCE = 0.1  # relative distance from the KL budget from which a run says so
OPTIMA = {one.name: one for one in (StoredOptimum(), StoredOptimum("reward"), StoredOptimum("win-rate"))}


def read_aim(name: str) -> Aim:
    """Return what a recipe's ``transform`` names; a table that is read from a file is named after the file."""
    if name in OPTIMA:
        return OPTIMA[name]
    return Tilt(Ranked(read_table(Path(name), name)) if name.endswith(".json") else parse_shaping(name))


AimSetting = Annotated[Aim, *spelled(read_aim)]


class DataNeeds(NamedTuple):
    """What a training reads besides the rollouts: another policy of the run, and stored states of the reference."""

    teacher: str | None = None  # the policy that it follows
    states: States | None = None  # None: it reads texts only
    teacher_states: States | None = None  # for its teacher's guide


class Workload(NamedTuple):
    """What a training computes, per prompt."""

    passes: float  # in which it reads
    responses: int  # in each of them
    by_reference: int = 0  # how often the reference reads each of these
    drawn: float = 0.0  # responses, in all passes


def in_batches(passes: float, rollouts: int) -> Workload:
    """Return passes over stored rollouts in batches with `PROMPT_EXAMPLES` of each prompt."""
    each = min(PROMPT_EXAMPLES, rollouts)
    return Workload(passes * rollouts / each, each)


def absent(*_: object) -> Any:
    """Raise ConfigError: what a solver asks for exists in a run only."""
    raise ConfigError("this solver reads more than was given; use a recipe")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a policy is trained from; each part is loaded when it is asked for."""

    reference: str  # its folder or hub id
    tokenizer: str | Path  # the folder of its tokenizer, or its hub id
    procedure: Served  # what serves the policy
    trunks: Mapping[str, str]  # folders of models that a guide may start from, by name
    rows: Callable[[Solver], Sequence[dict[str, Any]]] = absent  # rollouts, with what of the reference a policy reads
    problem: Callable[[], Any] = absent  # the `on_policy_trainer.Problem`
    folder: Callable[[str], str | Path] = absent  # of another policy that is trained

    def base(self, device: str) -> tuple[Any, Any]:
        """Return the reference and its tokenizer."""
        return load_policy(self.reference, device=device)[0], load_tokenizer(self.tokenizer)

    def start(self, policy: Solver, device: str) -> Any:
        """Return the reference, with an untrained guide if the policy has one."""
        (model, tokenizer), guide = self.base(device), policy.trained_guide
        return model if guide is None else guide.beside(model, tokenizer, self.trunks)


class Solver(Settings):
    """Base class of all solvers. A method is a solver with its aim; its strength is a KL budget, a β or an n."""

    has_objective: ClassVar[bool] = False  # on the log-ratios of stored rollouts (`Offline`)
    draws_per_response: ClassVar[int] = 0  # responses generated for each response that is trained on

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
        """The KL budget in nats of what it aims at, if it has one."""
        return None if (aim := self.aim()) is None else aim.kl

    @property
    def trained_guide(self) -> Guide | None:
        """The guide that is trained in the place of the model."""
        return None

    def with_usual_fit(self, *, pretrained: bool) -> Self:
        """Return it with a learning rate, its own or the usual one."""
        fit = self.fit.with_learning_rate(pretrained=pretrained, adapter=self.fit.lora is not None)
        return self.model_copy(update={"fit": fit})

    def workload(self, prompts: int, rollouts: int) -> Workload:
        """Return what it computes on so many prompts with so many stored rollouts each."""
        return in_batches(self.fit.passes, rollouts)

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
        """The solver with its form, unless that is the usual one: ``qrpo guided``."""
        return self.solver

    @property
    def method(self) -> str:
        """Its aim and solver: ``exp:10 (qrpo)``; ``maxk`` for a solver with a fixed aim."""
        return self.label

    @property
    def transformation(self) -> str:
        """The spelling of what it aims at, or its own name."""
        return self.solver if (aim := self.aim()) is None else aim.name

    def find_teacher(self, policies: Mapping[str, Solver]) -> None:
        """Find the policy that it follows, if it follows one. Raises ValueError if there is none."""

    def check(self, procedure: Served, rollouts: int, *, has_reward_model: bool) -> None:
        """Raise ValueError if the solver needs another procedure, more ``rollouts`` per prompt or a reward model."""
        try:
            if (aim := self.aim(procedure)) is not None:
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


class Shaped(ToBudget):
    """A solver of the KL-regularized RLHF objective, for any shaping of the reward."""

    transform: AimSetting = Field(
        Tilt(Ranked(Identity())),
        description="of the rank: exp:10, log, power:7, FILE.json, …; optimal: the optimum for the procedure on the "
        "stored rewards, exact where they tie (optimal:reward or optimal:win-rate unless they are 0 or 1); not of the "
        "rank: raw, raw-prompt, par, lsc:0.85",
    )

    def aim(self, procedure: Served = PLAIN) -> Aim:
        return self.transform.at(procedure, self.kl_budget, self.beta)

    @property
    def method(self) -> str:
        return f"{self.transform.name} ({self.label})"


class ToBestOfN(Solver):
    """A solver that aims at Best-of-n."""

    n: DrawCount = Field(description="the n of Best-of-n")

    def aim(self, procedure: Served = PLAIN) -> Aim:
        return Best(n=self.n)

    def check(self, procedure: Served, rollouts: int, *, has_reward_model: bool) -> None:
        super().check(procedure, rollouts, has_reward_model=has_reward_model)
        if self.n > rollouts:
            raise ValueError(f"the best of {self.n} needs rollout.k of at least {self.n}")
