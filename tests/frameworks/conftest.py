"""What tests inside other trainers share."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infalign.integrations import environment
from infalign.models.tokenizers import load_tokenizer


@pytest.fixture
def tokenizer(calibrated_run: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a policy's tokenizer and name gold, the reward of the demo's world, by the environment."""
    folder = calibrated_run / "data" / "tokenizer"
    monkeypatch.setenv("INFALIGN_REWARD", "infalign.world:gold")
    monkeypatch.setenv("INFALIGN_TRANSFORM", "exp:10")
    monkeypatch.setenv("INFALIGN_TOKENIZER", str(folder))
    environment._loaded.cache_clear()
    return load_tokenizer(folder)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts what may be sent to a project where its README says, for k = 2, and imports it."""

    def put(project: str, package: str, module: str) -> None:
        source = Path(__file__).parents[2] / "integrations" / "upstream"
        folder = shutil.copytree(source / project, tmp_path / "sent" / package.replace(".", "/"))
        shutil.copy(source / "pkpo.py", folder)
        monkeypatch.setenv("PASS_AT_K", "2")
        monkeypatch.syspath_prepend(tmp_path / "sent")
        importlib.import_module(f"{package}.{module}")

    return put
