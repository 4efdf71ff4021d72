"""Progress of jobs where there is no terminal."""

import io
from itertools import count

import pytest
from rich.console import Console

from infalign.core import progress
from infalign.core.progress import ProgressDisplay


def test_the_time_left_is_that_of_the_part_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that begins anew, as with another learning rate, is not measured by what it did before."""
    seconds = count(step=100)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    display = ProgressDisplay(Console(file=(said := io.StringIO()), width=80))
    display.start("train")
    for done in (1, 2, 3, 1, 2):
        display.update("train", done, 4)
    left = [line.partition("  ")[2].strip() for line in said.getvalue().splitlines()]
    assert left == [
        "train: 1/4",
        "train: 2/4  200 s left",
        "train: 3/4  100 s left",
        "train: 1/4",
        "train: 2/4  200 s left",
    ]
