"""Offline solvers: an objective on the stored K rollouts of a prompt, for a language model or a guide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from infalign.core.settings import Count, Settings
from infalign.method.calibration import Array
from infalign.models.conversion import is_gguf
from infalign.models.settings import Adapter, Fit
from infalign.training.solvers.base import DataNeeds, RecipeFacts, Solver, States

if TYPE_CHECKING:
    import torch

Examples = tuple[NDArray[np.intp], Array]  # rollouts (E, M), numbers (E,)


@dataclass(frozen=True, slots=True)
class Objective:
    """The training examples and the loss of an offline solver.

    ``examples`` turns the K rewards of one prompt into the examples of one pass: the rollouts of each example, (E, M),
    and one number per example, (E,): a target, a weight or a label. ``loss`` is the mean loss of a batch: it compares
    those numbers with h = log π/π_ref of the rollouts, (B, M), summed over tokens.
    """

    examples: Callable[[Array, np.random.Generator], Examples]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


TRUNKS = ("reference", "reward")  # the models of a run that a guide may start from


class Side(Settings):
    """A small network on the frozen reference's states, which are computed once for all policies that read them."""

    hidden: Count = Field(192, description="its width")
    layers: Count = Field(2, description="its layers")
    heads: Count = Field(3, description="its attention heads")
    reads: Count = Field(3, description="how many layers of the reference it reads, evenly spaced, including the last")

    @model_validator(mode="after")
    def _whole_heads(self) -> Side:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of 2 × heads ({self.heads})")
        return self


class Guide(Settings):
    """A second network Q beside the frozen reference: π ∝ π_ref·e^Q (`models.guided`)."""

    trunk: str = Field("reference", description="what the guide starts from: reference, reward, or a folder or hub id")
    lora: Adapter | None = Field(None, description="the guide is an adapter on the reference, in memory once")
    side: Side | None = Field(None, description="the guide is a small network that reads the reference's states")
    top_tokens: Count | None = Field(
        None,
        description=(
            "likeliest tokens per position, by the reference, that get their own Q; the others share one, which "
            "saves time with a large vocabulary. none: all tokens"
        ),
    )

    @model_validator(mode="after")
    def _on_the_reference(self) -> Guide:
        if self.lora is not None and self.top_tokens is not None:
            raise ValueError("a guide with lora gives every token its own Q; leave top_tokens out")
        if self.lora is not None and self.side is not None:
            raise ValueError("a guide is an adapter (lora) or a small network (side), not both")
        if self.lora is not None and self.trunk != "reference":
            raise ValueError(f"a guide with lora needs the trunk reference, found {self.trunk}")
        if self.side is not None and self.trunk != "reference":
            raise ValueError(f"a guide with side needs the trunk reference, found {self.trunk}")
        if is_gguf(self.trunk):
            raise ValueError(f"a guide starts from a model folder, not the GGUF file {self.trunk}; convert it first")
        return self

    @property
    def states(self) -> States | None:
        """What it reads of the reference from the disk; a network that reads tokens reads the last layer's."""
        if self.side is None:
            return States(evenly=1, top_tokens=self.top_tokens) if self.top_tokens is not None else None
        return States(evenly=self.side.reads, top_tokens=self.top_tokens or 0)


class Offline(Solver):
    """A solver that learns from the stored K rollouts per prompt and generates nothing."""

    guide: Guide | None = Field(None, description="train a guide beside the frozen reference, not the reference itself")

    @model_validator(mode="after")
    def _whole_guide(self) -> Offline:
        if self.guide is not None and self.fit.lora is not None:
            raise ValueError("a guide takes guide.lora; leave fit.lora out")
        if self.guide is not None and self.fit.gradient_checkpointing:
            raise ValueError(
                "a guide needs its activations; leave fit.gradient_checkpointing out and lower "
                "fit.device_batch_size to save memory"
            )
        return self

    def check(self, recipe: RecipeFacts) -> None:
        """Raise ValueError if a guide has no trunk to start from."""
        super().check(recipe)
        if self.guide is not None and self.guide.trunk == "reward" and not recipe.has_reward_model:
            raise ValueError("guide.trunk is reward, but the reward is not a model; set it to reference or to a folder")

    @property
    def label(self) -> str:
        """The solver with its form."""
        return super().label if self.guide is None else f"{super().label} guided"

    @property
    def data_needs(self) -> DataNeeds:
        """The states that its guide reads, or those below the layers that it trains."""
        return DataNeeds(states=states_below(self.fit) if self.guide is None else self.guide.states)

    @abstractmethod
    def objective(self, beta: float) -> Objective:
        """Return its objective, with ``beta`` for the paper's raw Φ."""


def states_below(fit: Fit) -> States | None:
    """Return the states that a training of the last layers starts from; None for that of the whole model."""
    return None if fit.lora is None or fit.lora.layers is None else States(last=fit.lora.layers)


def weighted_likelihood(weights: Callable[[Array], Array]) -> Objective:
    """Return fine-tuning on every rollout with its weight, by the negative log-likelihood relative to the reference's.

    ``weights`` are those of the K rewards of a prompt, with mean 1.
    """

    def examples(rewards_K: Array, rng: np.random.Generator) -> Examples:
        return np.arange(rewards_K.size)[:, None], weights(rewards_K)

    def loss(h_BM: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
        return -(weight_B * h_BM[:, 0]).mean()

    return Objective(examples, loss)
