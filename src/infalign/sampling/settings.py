"""What draws the rollouts, and how many."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from infalign.sampling.engine import EngineSettings
from infalign.settings import Count, Draws, Settings, one_of

ENGINES = (
    "shared_prefix",
    "transformers",
    "server",
)


def _settings(module: str) -> type[EngineSettings]:
    found: type[EngineSettings] = import_module(f"infalign.sampling.{module}").Settings
    return found


KINDS = {module.replace("_", "-"): _settings(module) for module in ENGINES}
if TYPE_CHECKING:
    AnyEngine = EngineSettings
else:
    AnyEngine = one_of(KINDS, key="kind", default="shared-prefix")


class Rollout(Settings):
    """K responses for each training prompt, drawn from the reference policy at temperature 1, nothing truncated."""

    prompts: Annotated[int, Field(ge=4)] = 256
    k: Draws = Field(100, description="rollouts a prompt; a rank needs at least 2")
    max_new_tokens: Count = 64
    engine: AnyEngine = KINDS["shared-prefix"](kind="shared-prefix")
