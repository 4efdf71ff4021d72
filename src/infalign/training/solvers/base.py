"""What a solver is: its settings, its theoretical law, its cost and its requirements.

A solver is one file of this folder: its settings, a member of the union `AnySolver` with the discriminator ``solver``,
and its loss or advantages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from infalign.core.display import INK
from infalign.core.errors import ConfigError
from infalign.core.settings import Count, Draws, Kind, Positive, Settings, spelled
from infalign.method.calibration import Array
from infalign.method.judge import MIN_JUDGED_SAMPLES
from infalign.method.procedures import Served, rewinds
from infalign.method.shapings import Ranked, Shaping, budget_beta, parse_shaping, rank_transform
from infalign.method.transforms import Identity, Log, Tabulated, Transformation
from infalign.models.gguf import is_gguf
from infalign.models.settings import Adapter, Fit
from infalign.theory.law import Law, aligned_law, law_at_kl

if TYPE_CHECKING:
    import torch

    from infalign.training.advantages import Advantages


OFF = 0.1  # relative distance from the KL budget from which a run says so


@dataclass(frozen=True, slots=True)
class Judged:
    """The transformation of ranks that wins most by the run's judge, which a run finds before it trains."""

    name = "judged"
    scale = 1.0

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        """Raise ConfigError: it is not known yet."""
        raise ConfigError("the transformation that wins most by the judge is not known before a run has found it")


JUDGED = Judged()


def read_shaping(name: str) -> Shaping:
    """Return the shaping that a recipe names; a shaping that is read from a file is named after the file."""
    if name == JUDGED.name:
        return JUDGED
    shaping = parse_shaping(name)
    table = rank_transform(shaping)
    return Ranked(replace(table, name=name)) if isinstance(table, Tabulated) else shaping


ShapingSetting = Annotated[Shaping, *spelled(read_shaping)]
Examples = tuple[NDArray[np.intp], Array]  # rollouts (E, M), numbers (E,)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a recipe that a solver is checked against."""

    procedure: Served
    rollouts: int  # K, per training prompt
    has_rank_model: bool
    has_judge: bool
    has_reward_model: bool  # the reward is a model that transformers loads
    own_models: bool  # the engine loads models of infalign's own kind


class States(NamedTuple):
    """Which states of the reference are kept on disk: after ``evenly`` spaced layers, or below the ``last`` ones.

    With so many of its likeliest tokens, if any.
    """

    evenly: int = 0
    last: int = 0
    top_tokens: int = 0

    def __str__(self) -> str:
        said = str(self.evenly) if self.evenly else f"below-{self.last}"
        return f"{said}-top-{self.top_tokens}" if self.top_tokens else said


class Solver(Kind):
    """Base class of all solvers. A method is a solver with its objective; its strength is a KL budget, a β or an n."""

    kinds: ClassVar[str] = "solver"
    ignored: ClassVar[tuple[str, ...]] = ("generations",)  # so that policies may share all but their solver
    own: ClassVar[Shaping | None] = None  # the shaping it optimises, if that cannot be chosen
    colour: ClassVar[str] = INK  # of its line in figures that compare solvers
    draws: ClassVar[int] = 1  # responses generated for each response that is trained on
    depends_on: ClassVar[tuple[str, ...]] = ()  # keys of the recipe that training depends on, besides the policy's own

    solver: str
    fit: Fit = Field(Fit(), description="how it is trained")

    @classmethod
    def check_keys(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the given keys without the solver's fixed transformation; raises ValueError for another one."""
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
        """The shaping of rewards: a transformation of the rank, or another shaping."""
        assert self.own is not None
        return self.own

    @property
    def method(self) -> str:
        """Its objective and solver: ``exp:10 (qrpo)``; ``maxk`` for a solver with a fixed objective."""
        return self._said

    @property
    def _said(self) -> str:
        options = (name for name, field in type(self).model_fields.items() if field.annotation is bool)
        return " ".join([self.solver, *(name.replace("_", "-") for name in options if getattr(self, name))])

    @property
    def aim(self) -> str:
        """The name of theory's curve for it: a shaping, or the optimum for the procedure."""
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
        """How many responses are generated per training prompt, over the whole training."""
        return 0.0

    @property
    def predicts_ranks(self) -> bool:
        """Whether a rank model predicts the ranks, instead of ranking among stored rollouts."""
        return False

    @property
    def ranked(self) -> Transformation | None:
        """The transformation of ranks among K rollouts that it is trained on, or None."""
        return None

    @abstractmethod
    def law(self, procedure: Served) -> Law | None:
        """Return the law that theory gives for an unrestricted policy; None where there is none."""

    def kl(self, procedure: Served) -> float | None:
        """Return the KL in nats that it is to spend: its budget or that of its law; None where there is neither."""
        law = self.law(procedure) if self.budget is None else None
        return law.kl if law is not None else self.budget

    def spends(self, *, more: bool) -> str:
        """Return the knob that makes the trained policy spend more of its KL budget, or less."""
        return "raise its fit.epochs or fit.learning_rate" if more else "lower its fit.learning_rate or fit.epochs"

    def law_at(self, procedure: Served, kl: float) -> Law | None:
        """Return the law that theory gives for the same method at a KL of ``kl`` nats.

        None where there is none: for rewards that are not shaped by rank, and for a KL that the transformation cannot
        spend, as a policy that ran away has it.
        """
        transform = rank_transform(self.shaping)
        try:
            return None if transform is None else law_at_kl(transform, kl=kl)
        except ConfigError:
            return None

    @abstractmethod
    def raw_beta(self, procedure: Served, references: Callable[[], Array]) -> float:
        """Return the paper's β: the given one, or the β whose optimum spends the KL budget or is Best-of-n.

        ``references`` gives the sorted rewards of the stored rollouts, (P, K): without ranks, β depends on
        the distribution of the rewards.
        """

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the run's models that must be trained before it."""
        return ()

    @property
    def states(self) -> States | None:
        """The states of the reference that it is trained from, or None if it reads texts only."""
        return None

    @property
    def teacher_states(self) -> States | None:
        """The states of the reference that its teacher reads, or None."""
        return None

    def meet(self, policies: Mapping[str, Solver]) -> None:
        """Learn of the recipe's policies. Raises ValueError if one that it builds on is not there."""
        return

    def check(self, around: Surroundings) -> None:
        """Raise ValueError if the recipe does not meet the solver's requirements."""
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
        """Return the law that theory gives at its budget or β; None if rewards are not shaped by rank."""
        if self.kl_budget is not None:
            return self.law_at(procedure, self.kl_budget)
        transform = rank_transform(self.shaping)
        return None if transform is None else aligned_law(transform, beta=self.beta or 0.0)

    def raw_beta(self, procedure: Served, references: Callable[[], Array]) -> float:
        """Return the paper's β; without a law, the β that spends the budget on the stored rollouts."""
        if (law := self.law(procedure)) is not None:
            return law.beta
        if self.beta is not None:
            return self.beta
        assert self.kl_budget is not None
        shaped_PK = np.stack([self.shaping(references_K, references_K) for references_K in references()])
        return budget_beta(shaped_PK, self.kl_budget)


class Shaped(ToBudget):
    """A solver of the KL-regularised RLHF objective, for any shaping of the reward."""

    transform: ShapingSetting = Field(
        Ranked(Identity()),
        description="of the rank: exp:10, log, power:7, FILE.json, …, or judged, which wins most by the judge; or raw, "
        "raw-prompt, par, lsc:0.85",
    )

    def check(self, around: Surroundings) -> None:
        """Raise ValueError if the transformation that wins most by the judge cannot be found."""
        super().check(around)
        if self.transform != JUDGED:
            return
        if not around.has_judge:
            raise ValueError("transform is judged, and the recipe has no judge; add one")
        if self.kl_budget is None:
            raise ValueError("transform is judged, which is the optimum at a KL: give kl_budget, not beta")
        if around.rollouts < MIN_JUDGED_SAMPLES:
            raise ValueError(f"transform is judged, which needs a rollout.k of at least {MIN_JUDGED_SAMPLES}")
        if rewinds(around.procedure):
            raise ValueError(
                f"transform is judged, which is known for procedures by the rank, not {around.procedure.name}"
            )

    @property
    def shaping(self) -> Shaping:
        """The shaping of rewards."""
        return self.transform

    @property
    def method(self) -> str:
        """``exp:10 (qrpo)``."""
        return f"{self.transform.name} ({self._said})"

    @property
    def ranked(self) -> Transformation | None:
        """The transformation of ranks that it is trained on; None for another shaping or predicted ranks."""
        return None if self.predicts_ranks else rank_transform(self.transform)


class ToBestOfN(Solver):
    """A solver that aims at Best-of-n: the transformation log at β = 1/(n − 1), a KL of log n − (n − 1)/n nats."""

    own: ClassVar[Shaping] = Ranked(Log())

    n: Draws = Field(description="the n of Best-of-n")

    @classmethod
    def check_keys(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the given keys without the fixed transformation; raises ValueError unless n is the only strength."""
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
        super().check(around)
        if self.n > around.rollouts:
            raise ValueError(f"the best of {self.n} needs a rollout.k of at least {self.n}")


# Offline solvers: the objective on the K rollouts of a prompt


class Objective(Protocol):
    """The training examples and the loss of an offline solver.

    ``examples`` turns the K rewards of one prompt into training examples: the rollouts of each example, (E, M), and one
    number per example, (E,): a target, a weight or a label. ``loss`` compares those numbers with h = log π/π_ref of the
    rollouts, (B, M), summed over tokens.
    """

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return the rollouts (E, M) and the number (E,) of each example in one pass over a prompt's rollouts."""

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, from h = log π/π_ref and the rollouts' lengths in tokens."""


TRUNKS = ("reference", "reward")  # the models of a run that a guide may start from


class Side(Settings):
    """A small network on the frozen reference's states, which are computed once for all policies that read them."""

    hidden: Count = Field(192, description="its width")
    layers: Count = Field(2, description="its layers")
    heads: Count = Field(4, description="its attention heads")
    reads: Count = Field(3, description="layers of the reference that it reads, evenly spaced, the last one among them")
    stored: bool = Field(True, description="keep those states on disk; false: each pass computes them anew")

    @model_validator(mode="after")
    def _whole_heads(self) -> Side:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} is no multiple of twice the {self.heads} heads")
        return self


class Guide(Settings):
    """A second network Q beside the frozen reference: π ∝ π_ref·e^Q (`models.guided`)."""

    trunk: str = Field("reference", description="what Q starts from: reference, reward, or a folder or hub id")
    lora: Adapter | None = Field(None, description="Q is this adapter on the reference, which is in memory once")
    side: Side | None = Field(None, description="Q is a small network that reads the reference's states")
    top_tokens: Count | None = Field(
        None,
        description="tokens that Q tells apart at each place, the reference's likeliest, which are computed once; all "
        "others share one Q, so that training does not pay for a large vocabulary. none: all tokens",
    )

    @model_validator(mode="after")
    def _on_the_reference(self) -> Guide:
        if self.lora is not None and self.top_tokens is not None:
            raise ValueError("a guide with lora tells all tokens apart: leave top_tokens out")
        if self.lora is not None and self.side is not None:
            raise ValueError("a guide is an adapter (lora) or a small network (side), not both")
        if self.lora is not None and self.trunk != "reference":
            raise ValueError(f"a guide with lora is an adapter on the reference, found the trunk {self.trunk}")
        if self.side is not None and self.trunk != "reference":
            raise ValueError(f"a guide with side reads the reference's states, found the trunk {self.trunk}")
        if is_gguf(self.trunk):
            raise ValueError(f"a guide starts from a model folder, and {self.trunk} is a GGUF; convert it before")
        return self

    @property
    def states(self) -> States | None:
        """What it reads of the reference from the disk; a network that reads tokens reads the last layer's."""
        if self.side is None:
            return States(evenly=1, top_tokens=self.top_tokens) if self.top_tokens is not None else None
        return States(evenly=self.side.reads, top_tokens=self.top_tokens or 0) if self.side.stored else None


class Offline(Solver):
    """A solver that learns from the stored K rollouts per prompt and generates nothing."""

    guide: Guide | None = Field(None, description="train a guide beside the frozen reference, not the reference itself")

    @model_validator(mode="after")
    def _whole_guide(self) -> Offline:
        if self.guide is not None and self.fit.lora is not None:
            raise ValueError("a guide takes guide.lora: leave fit.lora out")
        if self.guide is not None and self.fit.gradient_checkpointing:
            raise ValueError(
                "a guide keeps its activations: leave fit.gradient_checkpointing out; to save memory, lower "
                "fit.device_batch_size"
            )
        return self

    def check(self, around: Surroundings) -> None:
        """Raise ValueError if a guide has no trunk to start from, or no engine could draw from it."""
        super().check(around)
        if self.guide is None:
            return
        if self.guide.trunk == "reward" and not around.has_reward_model:
            raise ValueError("guide.trunk is reward, and the reward is no model; set it to reference or to a folder")
        if not around.own_models:
            raise ValueError(
                "a server cannot load a policy with a guide; set rollout.engine.kind to shared-prefix or transformers"
            )

    @property
    def _said(self) -> str:
        return super()._said if self.guide is None else f"{super()._said} guided"

    @property
    def states(self) -> States | None:
        """Those that its guide reads, or those below the layers that it trains."""
        return states_below(self.fit) if self.guide is None else self.guide.states

    def spends(self, *, more: bool) -> str:
        """Return the knob; a guide has the right strength on the training prompts that were held out to find it."""
        if self.guide is None:
            return super().spends(more=more)
        return "raise rollout.prompts, a tenth of which sets the strength of its guide"

    @abstractmethod
    def objective(self, beta: float) -> Objective:
        """Return its objective, with ``beta`` for the paper's raw Φ."""


def states_below(fit: Fit) -> States | None:
    """Return the states that a training of the last layers starts from; None for that of the whole model."""
    return None if fit.lora is None or fit.lora.layers is None else States(last=fit.lora.layers)


def singles(rewards_K: Array) -> NDArray[np.intp]:
    """Return every rollout as a separate example, (K, 1)."""
    return np.arange(rewards_K.size)[:, None]


def random_sets(k: int, size: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return disjoint random sets, (k // size, size), of the indices below ``k``."""
    return rng.permutation(k)[: k // size * size].reshape(-1, size)


def weighted_likelihood(h_BM: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Return the weighted negative log-likelihood of single rollouts, relative to the reference's."""
    return -(weight_B * h_BM[:, 0]).mean()


# On-policy solvers: the shaping and the advantages of fresh responses


class OnPolicy(ToBudget):
    """A solver that samples from the policy that it trains, in groups of ``generations`` responses per prompt."""

    carrier: ClassVar[Literal["rloo", "grpo"]] = "grpo"  # the TRL trainer that runs it

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
        """How many responses are generated per training prompt, over the whole training."""
        return self.fit.epochs * self.generations * self.draws if self.generates else 0.0

    @property
    def keeps_shaping(self) -> bool:
        """Whether the statistics of the TRL trainer that would change the shape of Φ are off."""
        return True

    @property
    def options(self) -> Mapping[str, Any]:
        """Settings of the TRL trainer that it needs besides those of every solver."""
        return {}

    @property
    def stops_at(self) -> float | None:
        """The KL in nats at which training ends before its last step; None if it does not."""
        return None

    def reward_shaping(self, procedure: Served) -> Shaping:
        """Return the shaping that is applied to rewards before advantages are computed."""
        return self.shaping

    def advantages(self, reference: str, procedure: Served) -> Advantages | None:
        """Return the advantages that replace the TRL trainer's, or None to keep those. ``reference`` is a model."""
        return None


class OnRanks(Shaped, OnPolicy):
    """An on-policy solver of the RLHF objective: it uses one reward per response, whose rank may be predicted."""

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
        """Whether a rank model predicts the ranks."""
        return self.ranks == "model"

    @property
    def needs(self) -> tuple[str, ...]:
        """The rank model, if it predicts the ranks."""
        return ("rank",) if self.predicts_ranks else ()

    def check(self, around: Surroundings) -> None:
        """Raise ValueError if there is no model to predict ranks."""
        if self.predicts_ranks and not around.has_rank_model:
            raise ValueError("ranks: model needs the recipe's `rank_model`; add it, with `fit`")
