"""Settings of the rollouts: the engine, and the number of responses."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from infalign.core.settings import Count, Draws, Settings, one_of
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
    AnyEngine = one_of(KINDS, key="kind", default="shared-prefix")


class Rollout(Settings):
    """K responses for each training prompt, drawn from the reference policy at temperature 1 without truncation."""

    prompts: Annotated[int, Field(ge=4)] = Field(256, description="maximum number of training prompts with rollouts")
    k: Draws = Field(100, description="K, the number of rollouts per prompt; a rank needs at least 2")
    max_new_tokens: Count = Field(64, description="maximum number of tokens per response, also in evaluation")
    engine: AnyEngine = Field(KINDS["shared-prefix"](kind="shared-prefix"), description="what samples responses")
