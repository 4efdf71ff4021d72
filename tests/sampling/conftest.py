"""What the tests of sampling share."""

from typing import Any

import pytest
from tiny_models import tiny, words


@pytest.fixture(scope="session")
def policy() -> tuple[Any, Any]:
    """Return a tiny Llama and its tokenizer."""
    return tiny(), words()
