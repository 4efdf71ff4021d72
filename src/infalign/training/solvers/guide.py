"""Settings of a guide, and which states of the reference a training reads."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from infalign.core.settings import Count, Settings
from infalign.models.pretrained import add_network_guide

SIDE_WIDTH, SIDE_LAYERS = 192, 2  # of a small network on the reference's states


class States(NamedTuple):
    """Which states of the reference are kept on disk: after ``evenly`` spaced layers, or below the ``last`` ones."""

    evenly: int = 0
    last: int = 0
    top_tokens: int = 0  # how many of its likeliest tokens are kept with them

    def __str__(self) -> str:
        layers = str(self.evenly) if self.evenly else f"below-{self.last}"
        return f"{layers}-top-{self.top_tokens}" if self.top_tokens else layers


class Side(Settings):
    """A small network on the frozen reference's states, which are computed once for all policies that read them."""

    reads: Count = Field(3, description="how many layers of the reference it reads, evenly spaced, including the last")


class Guide(Settings):
    """A second network Q beside the frozen reference: π ∝ π_ref·e^Q (`models.guided`)."""

    trunk: Literal["reference", "reward"] = Field("reference", description="the model of the run that it starts from")
    side: Side | None = Field(None, description="the guide is a small network that reads the reference's states")
    top_tokens: Count | None = Field(
        None,
        description="likeliest tokens per position, by the reference, that get their own Q; the others share one, "
        "which saves time with a large vocabulary. none: all tokens",
    )

    @model_validator(mode="after")
    def _on_the_reference(self) -> "Guide":
        if self.side is not None and self.trunk != "reference":
            raise ValueError(f"a guide with side needs the trunk reference, found {self.trunk}")
        return self

    def beside(self, reference: Any, tokenizer: Any, trunks: Mapping[str, str]) -> Any:
        """Return the reference with this guide, untrained; ``trunks`` are the folders of the models of a run."""
        from infalign.models.guided import GuidedForCausalLM

        if self.side is not None:
            shape = {"hidden": SIDE_WIDTH, "layers": SIDE_LAYERS, "reads": self.side.reads}
            return GuidedForCausalLM.with_side_network(reference, **shape, top_tokens=self.top_tokens or 0)
        return add_network_guide(trunks[self.trunk], reference, tokenizer, top_tokens=self.top_tokens or 0)

    @property
    def states(self) -> States | None:
        """What it reads of the reference from the disk; a network that reads tokens reads the last layer's."""
        if self.side is None:
            return States(evenly=1, top_tokens=self.top_tokens) if self.top_tokens is not None else None
        return States(evenly=self.side.reads, top_tokens=self.top_tokens or 0)
