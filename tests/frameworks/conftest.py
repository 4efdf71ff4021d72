"""The policy's tokenizer for tests inside other trainers."""

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
