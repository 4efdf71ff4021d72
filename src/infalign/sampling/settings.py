"""What draws the rollouts, and how many."""

import shlex
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from infalign.settings import Count, Draws, Settings


def _splits(command: str) -> str:
    shlex.split(command)  # raises ValueError for a quotation without an end
    return command


class EngineSettings(Settings):
    """What draws the rollouts."""

    kind: Literal["shared-prefix", "transformers", "server"] = "shared-prefix"
    url: str = Field("http://127.0.0.1:8000", description="an OpenAI-compatible server (kind: server)")
    command: Annotated[str, Field(min_length=1), AfterValidator(_splits)] | None = Field(
        None,
        description="starts the server for a model and is stopped afterwards; {model}, {port} and {seed} are filled in",
    )
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key")


class Rollout(Settings):
    """K responses for each training prompt, drawn from the reference policy at temperature 1, nothing truncated."""

    prompts: Annotated[int, Field(ge=4)] = 256
    k: Draws = Field(100, description="rollouts a prompt; a rank needs at least 2")
    max_new_tokens: Count = 64
    engine: EngineSettings = EngineSettings()
