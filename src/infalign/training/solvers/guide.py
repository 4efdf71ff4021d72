"""Settings of a guide, and which states of the reference a training reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from infalign.core.settings import Count, Settings
from infalign.models.conversion import is_gguf
from infalign.models.pretrained import add_network_guide
from infalign.models.settings import Width

TRUNKS = ("reference", "reward")  # the models of a run that a guide may start from


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


class Side(Settings):
    """A small network on the frozen reference's states, which are computed once for all policies that read them."""

    hidden: Width = Field(192, description="its width, a multiple of 4; there is an attention head per 64 of it")
    layers: Count = Field(2, description="its layers")
    reads: Count = Field(3, description="how many layers of the reference it reads, evenly spaced, including the last")


class Guide(Settings):
    """A second network Q beside the frozen reference: π ∝ π_ref·e^Q (`models.guided`)."""

    trunk: str = Field("reference", description="what the guide starts from: reference, reward, or a folder or hub id")
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
        if self.side is not None and self.trunk != "reference":
            raise ValueError(f"a guide with side needs the trunk reference, found {self.trunk}")
        if is_gguf(self.trunk):
            raise ValueError(f"a guide starts from a model folder, not the GGUF file {self.trunk}; convert it first")
        return self

    def beside(self, reference: Any, tokenizer: Any, trunks: Mapping[str, str]) -> Any:
        """Return the reference with this guide, untrained; ``trunks`` are the folders of the models of a run."""
        from infalign.models.guided import GuidedForCausalLM

        if self.side is not None:
            side = self.side.model_dump()
            return GuidedForCausalLM.with_side_network(reference, **side, top_tokens=self.top_tokens or 0)
        trunk = trunks.get(self.trunk, self.trunk)
        return add_network_guide(trunk, reference, tokenizer, top_tokens=self.top_tokens or 0)

    @property
    def states(self) -> States | None:
        """What it reads of the reference from the disk; a network that reads tokens reads the last layer's."""
        if self.side is None:
            return States(evenly=1, top_tokens=self.top_tokens) if self.top_tokens is not None else None
        return States(evenly=self.side.reads, top_tokens=self.top_tokens or 0)
