"""Settings of the rollouts: the engine, and the number of responses."""

from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from pydantic import Field, WithJsonSchema, model_validator

from infalign.core.settings import Count, DrawCount, Positive, Settings, one_of
from infalign.sampling import server, shared_prefix, transformers
from infalign.sampling.engine import EngineSettings

KINDS: dict[str, type[EngineSettings]] = {
    "shared-prefix": shared_prefix.Settings,
    "transformers": transformers.Settings,
    "server": server.Settings,
}
if TYPE_CHECKING:
    AnyEngine = EngineSettings
else:
    AnyEngine = one_of(KINDS, key="kind", default="shared-prefix", what="engine")

MOST_PROMPTS, AUTO_MINUTES = 4000, 10.0
NUMBER_OR_AUTO = {"anyOf": [{"type": "integer", "minimum": 4}, {"type": "string", "const": "auto"}]}


class Drawing(Settings):
    """How long responses are, and what draws them."""

    max_new_tokens: Count = Field(64, description="maximum number of tokens per response, also in evaluation")
    engine: AnyEngine = Field(KINDS["shared-prefix"](kind="shared-prefix"), description="what samples responses")


class DrawingOptions(TypedDict, total=False):
    """`Drawing` as keywords of a call: the tokens per response, 64 by default, and the URL of a server or settings."""

    max_new_tokens: int
    engine: str | dict[str, Any]


class Rollout(Drawing):
    """K responses for each training prompt, drawn from the reference policy at temperature 1 without truncation."""

    prompts: Annotated[int, Field(ge=4), WithJsonSchema(NUMBER_OR_AUTO)] = Field(
        256, description=f"maximum number of training prompts with rollouts; `auto`: {MOST_PROMPTS:,}, within minutes"
    )
    minutes: Positive | None = Field(
        None,
        description="with prompts: auto, only as many prompts as can be sampled in this time, by the first run's "
        f"estimate; default {AUTO_MINUTES:g}",
    )
    k: DrawCount = Field(100, description="K, the number of rollouts per prompt; a rank needs at least 2")

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("prompts") == "auto":
            return {"minutes": AUTO_MINUTES} | given | {"prompts": MOST_PROMPTS}
        return given
