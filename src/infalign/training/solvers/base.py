"""What a solver is: its settings, what theory says of it, what it costs and what it cannot work with.

A solver is one file of this folder: its settings, a member of the union `AnySolver` that is told apart by ``solver``,
and the loss or the advantages that make it what it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from infalign.display import INK
from infalign.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.shapings import Ranked, Shaping, budget_beta, parse_shaping, rank_transform
from infalign.method.transforms import Identity, Log, Tabulated, Transformation
from infalign.models.settings import Fit
from infalign.settings import Draws, Kind, Positive, spelled
from infalign.theory.law import Law, aligned_law, law_at_kl

if TYPE_CHECKING:
    import torch

    from infalign.training.advantages import Advantages


def read_shaping(name: str) -> Shaping:
    """Return the shaping that a recipe spells; one that is read from a file has the file's name."""
    shaping = parse_shaping(name)
    table = rank_transform(shaping)
    return Ranked(replace(table, name=name)) if isinstance(table, Tabulated) else shaping


ShapingSetting = Annotated[Shaping, *spelled(read_shaping)]
Examples = tuple[NDArray[np.intp], Array]  # rollouts (E, M), numbers (E,)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of a recipe a solver has to work with."""

    procedure: Served
    rollouts: int  # K of each training prompt
    has_rank_model: bool


class Solver(Kind):
    """What all solvers have. A method is a solver with what it optimises; its strength is a KL budget, β, or an n."""

    kinds: ClassVar[str] = "solver"
    own: ClassVar[Shaping | None] = None  # what it optimises, where that is no choice
    colour: ClassVar[str] = INK  # in figures that compare solvers
    draws: ClassVar[int] = 1  # responses that are generated for each one that is trained on
    depends_on: ClassVar[tuple[str, ...]] = ()  # keys of the recipe that training looks at, besides the policy's own

    solver: str
    fit: Fit = Fit()

    @classmethod
    def check_keys(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what was given without the solver's own transformation; raises ValueError for another one."""
        if cls.own is None or "transform" not in given:
            return given
        if given["transform"] != cls.own.name:
            raise ValueError(
                f"{given['solver']} has the transformation {cls.own.name}, not {given['transform']}; "
                "leave transform out"
            )
        return {key: value for key, value in given.items() if key != "transform"}

    @property
    def shaping(self) -> Shaping:
        """What becomes of rewards: a transformation of the rank, or another shaping."""
        assert self.own is not None
        return self.own

    @property
    def method(self) -> str:
        """What it optimises and by which solver: ``exp:10 (qrpo)``; a solver with an objective of its own: ``maxk``."""
        return self._said

    @property
    def _said(self) -> str:
        options = (name for name, field in type(self).model_fields.items() if field.annotation is bool)
        return " ".join([self.solver, *(name.replace("_", "-") for name in options if getattr(self, name))])

    @property
    def aim(self) -> str:
        """What theory's curve for it is called: a shaping, or the optimum for the procedure."""
        return self.shaping.name

    @property
    def budget(self) -> float | None:
        """The KL budget in nats, if that is its strength."""
        return None

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return False

    @property
    def generated_a_prompt(self) -> float:
        """How many responses are generated for each prompt of the training."""
        return 0.0

    @property
    def predicts_ranks(self) -> bool:
        """Whether ranks are those that a rank model predicts, and not those among stored rollouts."""
        return False

    @property
    def ranked(self) -> Transformation | None:
        """The transformation of ranks among K rollouts that it is trained on, if it is."""
        return None

    @abstractmethod
    def law(self, procedure: Served) -> Law | None:
        """Return the law that theory gives for a policy that is free for every prompt; None where there is none."""

    def law_at(self, procedure: Served, kl: float) -> Law | None:
        """Return the law that theory gives for the same method at a KL of ``kl`` nats; None where there is none."""
        transform = rank_transform(self.shaping)
        return None if transform is None else law_at_kl(transform, kl=kl)

    @abstractmethod
    def raw_beta(self, procedure: Served, references: Callable[[], Array]) -> float:
        """Return the paper's β: given, or whose optimum spends the KL budget or is Best-of-n.

        ``references`` gives the sorted rewards of the stored rollouts, (P, K): for rewards that are no ranks β depends
        on their law.
        """

    def check(self, around: Surroundings) -> None:
        """Raise ValueError for what the solver cannot work with."""
        return


class ToBudget(Solver):
    """A solver whose strength is a KL budget or the paper's β."""

    kl_budget: Positive | None = Field(None, description="nats a response; the theory gives β")
    beta: Positive | None = Field(None, description="the paper's β, for the paper's raw Φ")

    @model_validator(mode="after")
    def _one_weight(self) -> ToBudget:
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
    def budget(self) -> float | None:
        """The KL budget in nats, if that is its strength."""
        return self.kl_budget

    def law(self, procedure: Served) -> Law | None:
        """Return the law that theory gives at its budget or β; None for rewards that are no ranks."""
        if self.kl_budget is not None:
            return self.law_at(procedure, self.kl_budget)
        transform = rank_transform(self.shaping)
        return None if transform is None else aligned_law(transform, beta=self.beta or 0.0)

    def raw_beta(self, procedure: Served, references: Callable[[], Array]) -> float:
        """Return the paper's β; without a law it is the one that spends the budget on the stored rollouts."""
        if (law := self.law(procedure)) is not None:
            return law.beta
        if self.beta is not None:
            return self.beta
        assert self.kl_budget is not None
        shaped_PK = np.stack([self.shaping(references_K, references_K) for references_K in references()])
        return budget_beta(shaped_PK, self.kl_budget)


class Shaped(ToBudget):
    """A solver of ordinary RLHF, for any shaping of the reward."""

    transform: ShapingSetting = Field(
        Ranked(Identity()), description="of the rank; or raw, raw-prompt, par, lsc:0.85; default identity"
    )

    @property
    def shaping(self) -> Shaping:
        """What becomes of rewards."""
        return self.transform

    @property
    def method(self) -> str:
        """``exp:10 (qrpo)``."""
        return f"{self.transform.name} ({self._said})"

    @property
    def ranked(self) -> Transformation | None:
        """The transformation of ranks that it is trained on, unless rewards are shaped otherwise or predicted."""
        return None if self.predicts_ranks else rank_transform(self.transform)


class ToBestOfN(Solver):
    """A solver that aims at Best-of-n: the transformation log at β = 1/(n − 1), a KL of log n − (n − 1)/n nats."""

    own: ClassVar[Shaping] = Ranked(Log())

    n: Draws = Field(description="the n of Best-of-n")

    @classmethod
    def check_keys(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what was given without what is off; raises ValueError unless n, and n alone, is the strength."""
        if given.get("n") is None or given.get("kl_budget") is not None or given.get("beta") is not None:
            raise ValueError(f"the strength of {given['solver']} is n: give n, and neither kl_budget nor beta")
        return super().check_keys(given)

    def law(self, procedure: Served) -> Law | None:
        """Return the law of Best-of-n itself."""
        return aligned_law(Log(), beta=1.0 / (self.n - 1))

    def raw_beta(self, procedure: Served, references: Callable[[], Array]) -> float:
        """Return 1/(n − 1)."""
        return 1.0 / (self.n - 1)

    def check(self, around: Surroundings) -> None:
        """Raise ValueError for fewer rollouts than n."""
        if self.n > around.rollouts:
            raise ValueError(f"the best of {self.n} needs a rollout.k of at least {self.n}")


# Offline: what is learnt from the K rollouts of a prompt


class Objective(Protocol):
    """What an offline solver learns from the K rollouts of a prompt, and how.

    ``examples`` turns the K rewards of one prompt into training examples: which rollouts each looks at, (E, M), and one
    number each, (E,): a target, a weight or a label. ``loss`` compares those numbers with h = log π/π_ref of the
    rollouts, (B, M), summed over tokens.
    """

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return the rollouts (E, M) and the number (E,) of each example that one pass over a prompt's rollouts has."""

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, from h = log π/π_ref and the rollouts' lengths in tokens."""


class Offline(Solver):
    """A solver that learns from the K rollouts a prompt that calibration has paid for, and generates nothing."""

    @abstractmethod
    def objective(self, beta: float) -> Objective:
        """Return what it learns, with ``beta`` for the paper's raw Φ."""


def singles(rewards_K: Array) -> NDArray[np.intp]:
    """Return every rollout as an example of its own, (K, 1)."""
    return np.arange(rewards_K.size)[:, None]


def random_sets(k: int, size: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return disjoint random sets, (k // size, size), of the numbers below ``k``."""
    return rng.permutation(k)[: k // size * size].reshape(-1, size)


def weighted_likelihood(h_BM: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Return the weighted negative log-likelihood of single rollouts, counted from the reference's."""
    return -(weight_B * h_BM[:, 0]).mean()


# On-policy: what becomes of the rewards of fresh responses


class OnPolicy(ToBudget):
    """A solver that samples from the policy that it trains, in groups of ``generations`` responses to a prompt."""

    carrier: ClassVar[Literal["rloo", "grpo"]] = "grpo"  # whose loop of TRL carries it

    generations: Draws = Field(8, description="completions a prompt and step")

    @model_validator(mode="after")
    def _whole_groups(self) -> OnPolicy:
        if self.generates and self.fit.batch_size % self.generations:
            raise ValueError(f"fit.batch_size {self.fit.batch_size} is no multiple of generations {self.generations}")
        return self

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return True

    @property
    def generated_a_prompt(self) -> float:
        """How many responses are generated for each prompt of the training."""
        return self.fit.epochs * self.generations * self.draws if self.generates else 0.0

    @property
    def keeps_shaping(self) -> bool:
        """Whether those statistics of the carrier are off that would replace Φ by another."""
        return True

    @property
    def options(self) -> Mapping[str, Any]:
        """Settings of the carrier that it needs besides those of every solver."""
        return {}

    @property
    def stops_at(self) -> float | None:
        """The KL in nats at which training ends before its last step; None if it does not."""
        return None

    def reward_shaping(self, procedure: Served) -> Shaping:
        """Return what becomes of rewards before the advantages see them."""
        return self.shaping

    def advantages(self, reference: str, procedure: Served) -> Advantages | None:
        """Return the advantages that replace the carrier's; None where those are right. ``reference`` is a model."""
        return None


class OnRanks(Shaped, OnPolicy):
    """An on-policy solver of ordinary RLHF: it looks at one reward a response, whose rank may be predicted."""

    ranks: Literal["rollouts", "model"] = Field(
        "rollouts", description="model: as `rank_model` predicts them, on all training prompts"
    )

    @model_validator(mode="after")
    def _can_predict_ranks(self) -> OnRanks:
        if self.predicts_ranks:
            if not self.generates:
                raise ValueError(f"ranks: model is for fresh responses, found stored rollouts ({self.solver})")
            if rank_transform(self.transform) is None:
                raise ValueError(f"ranks: model needs a transformation of the rank, and {self.transform.name} is none")
        return self

    @property
    def predicts_ranks(self) -> bool:
        """Whether ranks are those that a rank model predicts."""
        return self.ranks == "model"

    def check(self, around: Surroundings) -> None:
        """Raise ValueError if there is no model to predict ranks."""
        if self.predicts_ranks and not around.has_rank_model:
            raise ValueError("ranks: model needs the recipe's `rank_model`; add it, with `fit`")
