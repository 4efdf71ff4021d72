"""Where rewards come from."""

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from infalign.core.http import checked_url, checked_variable
from infalign.core.settings import Count, Settings
from infalign.models.settings import Model


class Head(Settings):
    """A linear Bradley–Terry head on mean states of a frozen model, which may be an encoder.

    Layers and penalty are chosen by cross-validation.
    """

    pairs: Count = Field(4000, description="maximum number of training pairs")
    max_length: Count = Field(512, description="longer rows are dropped and counted")


class RewardSource(Model):
    """A Bradley–Terry classifier, a Python function or a server; a classifier starts from the reference by default."""

    head: Head | None = Field(None, description="instead of `fit`: train only a head, on the frozen model's states")
    function: str | None = Field(
        None,
        description="my_file.py:score beside the recipe, or package.module:score; in infalign's form, TRL's or verl's",
    )
    time_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description=(
            "seconds per response, scored one by one in a process of its own; after that it is ended and the reward "
            "is 0; default: none, for checkers that may hang 5"
        ),
    )
    url: Annotated[str, AfterValidator(checked_url)] | None = Field(
        None,
        description=(
            "a reward server: OpenRLHF's POST {query, prompts, labels} -> {rewards}, or vLLM's /classify or /pooling"
        ),
    )
    api_key_env: Annotated[str, AfterValidator(checked_variable)] | None = Field(
        None, description="environment variable that holds the server's API key"
    )
    in_flight: Count | None = Field(None, description="concurrent requests; default: 16, for vLLM 64")

    @property
    def is_classifier(self) -> bool:
        """Whether it is a model that transformers loads."""
        return self.function is None and self.url is None

    @property
    def trained(self) -> bool:
        """Whether the run trains it."""
        return self.fit is not None or self.head is not None

    @model_validator(mode="after")
    def _usable(self) -> "RewardSource":
        if (self.model or "").endswith(".py"):
            raise ValueError(f"{self.model} is no model; for a function in it, write {self.model}:NAME as `function`")
        if self.function is not None and self.url is not None:
            raise ValueError("give `function` or `url`, not both")
        for name, needed in (("api_key_env", "url"), ("time_limit", "function"), ("in_flight", "url")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"{name} requires a `{needed}`")
        if not self.is_classifier and (self.model or self.scratch or self.trained):
            kind = "url" if self.function is None else "function"
            raise ValueError(f"a `{kind}` is used as it is; leave out model, scratch, fit and head")
        if self.head is not None and (self.fit is not None or self.scratch is not None):
            raise ValueError("a `head` is trained on a frozen model; leave out fit and scratch")
        if self.is_classifier and self.model is None and not self.trained:
            raise ValueError("a reward model needs `fit` or `head` unless it is a `function` or a ready `model`")
        return self
