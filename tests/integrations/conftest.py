"""What the tests of the integrations share."""

from pathlib import Path

import micro
import pytest

from infalign.recipe.settings import Recipe


@pytest.fixture(scope="session")
def calibrated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory whose prompts are calibrated; its reward is gold."""
    folder = tmp_path_factory.mktemp("calibrated")
    recipe = Recipe.model_validate(micro.given(folder / "run", micro.write_policy(folder / "policy")))
    micro.done(recipe, until="calibrate")
    return folder / "run"
