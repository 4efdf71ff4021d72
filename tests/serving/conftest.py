"""What the tests of serving share: a trained run, and a server of one of its policies in a thread."""

from collections.abc import Iterator
from pathlib import Path

import micro
import pytest
from clients import client_of, policy, serving
from openai import OpenAI

from infalign.recipe.settings import Recipe


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run up to its policy, whose one reward hardly ever ties."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = micro.given(folder / "run", micro.write_policy(folder / "policy"))
    del recipe["gold"]
    recipe |= {"reward": {"function": "micro:brightness"}, "judge": {"function": "micro:brightness"}}
    recipe["rollout"] = {"prompts": 16, "k": 32, "max_new_tokens": 12}
    recipe["policies"]["aware"]["fit"] = micro.FIT | {"epochs": 12, "learning_rate": 0.003}
    micro.done(Recipe.model_validate(recipe), until="train")
    return folder / "run"


@pytest.fixture(scope="session")
def url(trained_run: Path) -> Iterator[str]:
    """Return the URL of a server of the policy."""
    with serving(policy(trained_run)) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    """Return a client of the server."""
    with client_of(url) as found:
        yield found
