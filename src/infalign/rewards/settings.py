"""Where rewards come from."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from infalign.models.settings import Model


def _over_http(url: str) -> str:
    parts = urlsplit(url)  # raises ValueError for an invalid host
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a URL starts with http:// or https:// and a host, found {url!r}")
    if parts.username is not None:
        raise ValueError("a URL with a password would be written into the run directory; use api_key_env")
    return url


class RewardSource(Model):
    """A Bradley–Terry classifier, a Python function or a server; a classifier starts from the reference by default."""

    function: str | None = Field(None, description="package.module:function(prompts, responses) -> rewards")
    url: Annotated[str, AfterValidator(_over_http)] | None = Field(
        None, description="a reward server as OpenRLHF's: POST {query, prompts, labels} -> {rewards}"
    )
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key")

    @property
    def is_classifier(self) -> bool:
        """Whether it is a model that transformers loads."""
        return self.function is None and self.url is None

    @model_validator(mode="after")
    def _usable(self) -> "RewardSource":
        if self.function is not None and self.url is not None:
            raise ValueError("give `function` or `url`, not both")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env is for a `url`")
        if not self.is_classifier and (self.model or self.scratch or self.fit):
            kind = "url" if self.function is None else "function"
            raise ValueError(f"a `{kind}` is used as it is: leave out model, scratch and fit")
        if self.is_classifier and self.model is None and self.fit is None:
            raise ValueError("a reward model that is no `function` and no ready `model` needs `fit`")
        return self
