"""What the tests of serving share: an evaluated run, and a server of one of its policies in a thread."""

import io
from collections.abc import Iterator
from pathlib import Path

import micro
import pytest
from clients import client_of, policy, serving
from openai import OpenAI
from rich.console import Console

from infalign.recipe.settings import Recipe
from infalign.steps import whole_run


@pytest.fixture(scope="session")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an evaluated run, whose one reward hardly ever ties."""
    folder = tmp_path_factory.mktemp("evaluated")
    recipe = micro.given(folder / "run", micro.write_policy(folder / "policy"))
    del recipe["gold"]
    recipe |= {"reward": {"function": "micro:brightness"}, "judge": {"function": "micro:brightness"}}
    recipe["rollout"] = {"prompts": 16, "k": 32, "max_new_tokens": 12}
    recipe["policies"]["aware"]["fit"] = micro.FIT | {"epochs": 12, "learning_rate": 0.003}
    recipe["evaluate"] = {"prompts": 8, "samples": 128, "max_n": 4, "rewind": "rewind:0.75:4"}
    whole_run.run_recipe(Recipe.model_validate(recipe), until="evaluate", console=Console(file=io.StringIO()))
    return folder / "run"


@pytest.fixture(scope="session")
def url(evaluated_run: Path) -> Iterator[str]:
    """Return the URL of a server of the policy."""
    with serving(policy(evaluated_run)) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    """Return a client of the server."""
    with client_of(url) as found:
        yield found
