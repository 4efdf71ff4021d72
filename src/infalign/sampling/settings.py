"""Settings of the rollouts: the engine, and the number of responses."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from infalign.core.settings import Count, Draws, Settings, kinds_in, one_of
from infalign.sampling.engine import EngineSettings

ENGINES = (
    "shared_prefix",
    "transformers",
    "server",
)


KINDS: dict[str, type[EngineSettings]] = kinds_in("infalign.sampling", ENGINES)
if TYPE_CHECKING:
    AnyEngine = EngineSettings
else:
    AnyEngine = one_of(KINDS, key="kind", default="shared-prefix")


class Rollout(Settings):
    """K responses for each training prompt, drawn from the reference policy at temperature 1 without truncation."""

    prompts: Annotated[int, Field(ge=4)] = Field(256, description="maximum number of training prompts with rollouts")
    k: Draws = Field(100, description="K, the number of rollouts per prompt; a rank needs at least 2")
    max_new_tokens: Count = Field(64, description="maximum number of tokens per response, also in evaluation")
    engine: AnyEngine = Field(KINDS["shared-prefix"](kind="shared-prefix"), description="what samples responses")
