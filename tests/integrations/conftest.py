"""What the tests of the integrations share."""

import io
from pathlib import Path

import micro
import pytest
from rich.console import Console

from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run


@pytest.fixture(scope="session")
def calibrated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory whose prompts are calibrated; its reward is gold."""
    folder = tmp_path_factory.mktemp("calibrated")
    tokenizer = train_tokenizer(
        ["How do I write a function?", "Please explain the moon."] * 9, Scratch(**micro.SCRATCH)
    )
    new_policy(Scratch(**micro.SCRATCH), tokenizer, seed=0).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    recipe = Recipe.model_validate(micro.given(folder / "run", str(folder / "policy")))
    whole_run.run_recipe(recipe, until="calibrate", console=Console(file=io.StringIO()))
    return folder / "run"
