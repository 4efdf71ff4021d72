"""Settings of the rollouts: the engine, and the number of responses."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from infalign.sampling.engine import EngineSettings
from infalign.settings import Count, Draws, Settings, kinds_in, one_of

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

    prompts: Annotated[int, Field(ge=4)] = 256
    k: Draws = Field(100, description="rollouts a prompt; a rank needs at least 2")
    max_new_tokens: Count = 64
    engine: AnyEngine = KINDS["shared-prefix"](kind="shared-prefix")
