"""What the tests of the integrations share."""

import io
from pathlib import Path

import micro
import pytest
from rich.console import Console

from infalign.recipe.settings import Recipe
from infalign.steps import whole_run


@pytest.fixture(scope="session")
def calibrated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory whose prompts are calibrated; its reward is gold."""
    folder = tmp_path_factory.mktemp("calibrated")
    recipe = Recipe.model_validate(micro.given(folder / "run", micro.write_policy(folder / "policy")))
    whole_run.run_recipe(recipe, until="calibrate", console=Console(file=io.StringIO()))
    return folder / "run"
