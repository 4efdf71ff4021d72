"""Which model a run starts from."""

import re
from typing import Annotated

from pydantic import Field, model_validator

from infalign.settings import Count, Settings
from infalign.training.settings import Fit


def is_hub_id(model: str) -> bool:
    """Return whether a model that is no folder here can be one of the hub: ``owner/name``, or ``name``."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", model) is not None


class Scratch(Settings):
    """The shape of a small Llama trained from nothing, with a tokenizer trained on the data."""

    vocabulary: Annotated[int, Field(ge=300)] = 2048
    hidden: Count = 128
    layers: Count = 4
    heads: Count = 4
    context: Count = 512


class Model(Settings):
    """A model: `model` (folder or hub id) or `scratch`, trained by `fit`; without `fit` it is used as it is."""

    model: str | None = None
    scratch: Scratch | None = None
    fit: Fit | None = None

    @model_validator(mode="after")
    def _one_start(self) -> "Model":
        if self.model is not None and self.scratch is not None:
            raise ValueError("give `model` or `scratch`, not both")
        return self


class PolicyModel(Model):
    """The policy before alignment; after `fit` (supervised fine-tuning) it is the reference policy."""

    @model_validator(mode="after")
    def _has_start(self) -> "PolicyModel":
        if (self.model is None) == (self.scratch is None):
            raise ValueError("give exactly one of `model`, `scratch`")
        if self.scratch is not None and self.fit is None:
            raise ValueError("a policy from `scratch` needs `fit`")
        return self
