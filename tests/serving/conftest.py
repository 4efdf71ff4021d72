"""What the tests of serving share: an evaluated run, and a server of one of its policies in a thread."""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import micro
import pytest
import uvicorn
from rich.console import Console

from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.settings import Recipe
from infalign.serving.answers import ServedPolicy
from infalign.serving.openai import app
from infalign.steps import whole_run


@pytest.fixture(scope="session")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an evaluated run, whose one reward hardly ever ties."""
    folder = tmp_path_factory.mktemp("evaluated")
    scratch = Scratch(**micro.SCRATCH)
    tokenizer = train_tokenizer(["How do I write a function?", "Please explain the moon."] * 9, scratch)
    new_policy(scratch, tokenizer, seed=0).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    recipe = micro.given(folder / "run", str(folder / "policy"))
    del recipe["gold"]
    recipe |= {"reward": {"function": "micro:brightness"}, "judge": {"function": "micro:brightness"}}
    recipe["rollout"] = {"prompts": 16, "k": 32, "max_new_tokens": 12}
    recipe["policies"]["aware"]["fit"] = micro.FIT | {"epochs": 12, "learning_rate": 0.003}
    recipe["evaluate"] = {"prompts": 8, "samples": 128, "max_n": 4, "rewind": "rewind:0.75:4"}
    whole_run.run_recipe(Recipe.model_validate(recipe), until="evaluate", console=Console(file=io.StringIO()))
    return folder / "run"


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """Return a context that serves a policy with uvicorn in a thread and gives the URL."""

    @contextmanager
    def served(policy: ServedPolicy, **options: Any) -> Iterator[str]:
        server = uvicorn.Server(uvicorn.Config(app(policy, **options), log_level="warning"))
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            thread = threading.Thread(target=server.run, args=([listening],))
            thread.start()
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.02)
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
            finally:
                server.should_exit = True
                thread.join(60)

    return served
