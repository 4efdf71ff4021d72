"""Settings of a solver. A solver is one file of this folder: its settings, and its loss or advantages.

What theory says of a method (`theory`) and what its training reads (`DataNeeds`) are values of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple

from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from infalign.core.errors import ConfigError
from infalign.core.settings import Draws, Kind, Positive, spelled
from infalign.method.calibration import Array
from infalign.method.optimum import Objective, Optimal
from infalign.method.procedures import Served, rewinds
from infalign.method.shapings import Ranked, Shaping, parse_shaping, rank_transform
from infalign.method.transforms import Identity, Log, Tabulated
from infalign.models.settings import Fit
from infalign.theory.law import MIN_KL, law_at_kl
from infalign.training.solvers.theory import MethodTheory, OptimumTheory

KL_TOLERANCE = 0.1  # relative distance from the KL budget from which a run says so


@dataclass(frozen=True, slots=True)
class StoredOptimum:
    """The optimum for the recipe's procedure on the run's stored rewards, at the policy's KL budget or β.

    Rewards that are not all 0 or 1 need an ``objective``.
    """

    objective: Objective | None = None
    scale = 1.0

    @property
    def name(self) -> str:
        """``optimal``, ``optimal:reward`` or ``optimal:win-rate``."""
        return "optimal" if self.objective is None else f"optimal:{self.objective}"

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        """Raise ConfigError: it is not known yet."""
        raise ConfigError("the optimum is known only after the run has stored rewards")


OPTIMA = {one.name: one for one in map(StoredOptimum, (None, "reward", "win-rate"))}


def read_shaping(name: str) -> Shaping:
    """Return the shaping that a recipe names; a shaping that is read from a file is named after the file."""
    if name in OPTIMA:
        return OPTIMA[name]
    shaping = parse_shaping(name)
    table = rank_transform(shaping)
    return Ranked(replace(table, name=name)) if isinstance(table, Tabulated) else shaping


ShapingSetting = Annotated[Shaping, *spelled(read_shaping)]


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """The parts of a recipe that a solver is checked against."""

    procedure: Served
    rollouts: int  # K, per training prompt
    has_reward_model: bool  # the reward is a model that transformers loads


class States(NamedTuple):
    """Which states of the reference are kept on disk: after ``evenly`` spaced layers, or below the ``last`` ones.

    With that many of its likeliest tokens, if any.
    """

    evenly: int = 0
    last: int = 0
    top_tokens: int = 0

    def __str__(self) -> str:
        layers = str(self.evenly) if self.evenly else f"below-{self.last}"
        return f"{layers}-top-{self.top_tokens}" if self.top_tokens else layers


class DataNeeds(NamedTuple):
    """What a training reads besides the rollouts: another policy of the run, and stored states of the reference."""

    teacher: str | None = None  # the policy that it follows
    states: States | None = None  # None: it reads texts only
    teacher_states: States | None = None  # for its teacher's guide


class Solver(Kind):
    """Base class of all solvers. A method is a solver with its objective; its strength is a KL budget, a β or an n."""

    discriminator: ClassVar[str] = "solver"
    fixed_shaping: ClassVar[Shaping | None] = None  # the shaping it optimizes, if that cannot be chosen
    draws_per_response: ClassVar[int] = 1  # responses generated for each response that is trained on

    solver: str
    fit: Fit = Field(Fit(), description="how it is trained")

    @property
    def shaping(self) -> Shaping:
        """The shaping of rewards: a transformation of the rank, or another shaping."""
        assert self.fixed_shaping is not None
        return self.fixed_shaping

    @property
    @abstractmethod
    def theory(self) -> MethodTheory:
        """What theory says of its policy."""

    @property
    def data_needs(self) -> DataNeeds:
        """What its training reads besides the rollouts."""
        return DataNeeds()

    @property
    def recipe_dependencies(self) -> tuple[str, ...]:
        """Keys of the recipe that its training depends on, besides the policy's own."""
        return ()

    @property
    def label(self) -> str:
        """The solver with its loss and form, unless these are the usual ones: ``qrpo squared guided``."""
        return self.solver

    @property
    def method(self) -> str:
        """Its objective and solver: ``exp:10 (qrpo)``; ``maxk`` for a solver with a fixed objective."""
        return self.label

    def find_teacher(self, policies: Mapping[str, Solver]) -> None:
        """Find the policy that it follows, if it follows one. Raises ValueError if there is none."""
        return

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError if the recipe does not meet the solver's requirements."""
        return


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
        transform = rank_transform(self.shaping)
        if self.kl_budget is not None and transform is not None:
            try:
                law_at_kl(transform, kl=self.kl_budget)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self

    @property
    def theory(self) -> MethodTheory:
        """The optimum of its shaping at its budget or β."""
        return MethodTheory(self.kl_budget, self.shaping, self.beta)


class Shaped(ToBudget):
    """A solver of the KL-regularized RLHF objective, for any shaping of the reward."""

    transform: ShapingSetting = Field(
        Ranked(Identity()),
        description=(
            "of the rank: exp:10, log, power:7, FILE.json, …; optimal: "
            "the optimum for the procedure on the stored rewards, exact where they tie (optimal:reward or "
            "optimal:win-rate unless they are 0 or 1); not of the rank: raw, raw-prompt, par, lsc:0.85"
        ),
    )

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError if a transformation that the run has to find cannot be found."""
        super().check(recipe)
        if isinstance(self.transform, StoredOptimum) and rewinds(recipe.procedure):
            raise ValueError(
                f"transform is {self.transform.name}, which needs a procedure by rank, not {recipe.procedure.name}"
            )

    @property
    def shaping(self) -> Shaping:
        """The shaping of rewards."""
        return self.transform

    @property
    def theory(self) -> MethodTheory:
        """The optimum of its shaping at its budget or β."""
        if isinstance(self.transform, StoredOptimum | Optimal):
            return OptimumTheory(self.kl_budget, self.transform, self.beta, self.transform.objective)
        return super().theory

    @property
    def recipe_dependencies(self) -> tuple[str, ...]:
        """The procedure, if its shaping is the optimum for that."""
        return ("procedure",) if isinstance(self.transform, StoredOptimum) else ()

    @property
    def method(self) -> str:
        """``exp:10 (qrpo)``."""
        return f"{self.transform.name} ({self.label})"


class ToBestOfN(Solver):
    """A solver that aims at Best-of-n: the transformation log at β = 1/(n − 1), a KL of log n − (n − 1)/n nats."""

    fixed_shaping: ClassVar[Shaping] = Ranked(Log())

    n: Draws = Field(description="the n of Best-of-n")

    @property
    def theory(self) -> MethodTheory:
        """Best-of-n itself."""
        return MethodTheory(None, self.shaping, 1.0 / (self.n - 1))

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError for fewer rollouts than n."""
        super().check(recipe)
        if self.n > recipe.rollouts:
            raise ValueError(f"the best of {self.n} needs rollout.k of at least {self.n}")
