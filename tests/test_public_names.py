"""What `from infalign import …` gives: each name says what it is for, and its example runs."""

import doctest
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

import infalign


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the public names, and MODEL and REWARD_MODEL, the folders of tiny models."""
    folder = tmp_path_factory.mktemp("model")
    models = {"MODEL": folder / "policy", "REWARD_MODEL": folder / "reward"}
    for model in models.values():
        micro.write_policy(model)
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "reward", num_labels=1)
    reward.save_pretrained(folder / "reward")
    return {name: getattr(infalign, name) for name in infalign.__all__} | models


@pytest.mark.parametrize("name", [name for name in infalign.__all__ if name != "run"])  # steps/test_whole_run.py has it
def test_the_example_of_a_name_runs(name: str, names: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each docstring has an example, which needs nothing but the public names, NumPy and a model."""
    monkeypatch.chdir(tmp_path)
    (found,) = doctest.DocTestFinder(recurse=False).find(names[name], name, globs=names | {"np": np})
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


def test_dir_lists_the_public_names() -> None:
    """And nothing else, for who completes a name with TAB."""
    assert dir(infalign) == sorted([*infalign.__all__, "__version__"])
