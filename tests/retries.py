"""Requests that are repeated at once, and so many times only."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from infalign.core import http


@contextmanager
def attempts(number: int, wait: float = 0.0) -> Iterator[None]:
    """Let every request inside the block have so many attempts."""
    with patch.object(http, "backoff", lambda: iter([wait] * (number - 1))):
        yield
