"""Progress of the tasks under way."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from infalign.core.display import say

OnProgress = Callable[[int, int, str], None]  # (done, total, note)
LINE_EVERY = 10.0  # seconds between progress lines where there is no terminal


class SoFar(NamedTuple):
    """What an unfinished attempt has done: in words, "" for nothing, and as a share of the work."""

    said: str
    share: float


NOTHING = SoFar("", 0.0)


class ProgressDisplay:
    """Progress of the jobs under way: live bars on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._tasks: dict[str, Any] = {}
        self._begun: dict[str, tuple[float, int]] = {}  # when a part's first report came and what was done by then
        self._done: dict[str, int] = {}
        self._printed: dict[str, float] = {}
        self._bars = Progress(
            TextColumn("  {task.description:<28}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "ProgressDisplay":
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def start(self, name: str) -> None:
        """Show that job ``name`` runs; how long it takes is not known before its first report."""
        self._printed[name] = time.monotonic()
        self._tasks[name] = self._bars.add_task(name, total=None, note="")

    def update(self, name: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` parts of job ``name`` are finished; fewer than before: it begins anew."""
        now = time.monotonic()
        if done < self._done.get(name, 0):
            del self._begun[name]
            self._bars.reset(self._tasks[name])
        self._done[name] = done
        begun, done_before = self._begun.setdefault(name, (now, done))
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)
        if not self.console.is_terminal and now - self._printed[name] >= LINE_EVERY:
            self._printed[name] = now
            left = f"{(total - done) * (now - begun) / (done - done_before):.0f} s left" if done > done_before else ""
            say(self.console, f"  {name}: {done}/{total}  {left}  {note}")

    def finish(self, name: str) -> None:
        """Take job ``name`` off the display."""
        self._bars.remove_task(self._tasks.pop(name))


@contextmanager
def progress_line(name: str) -> Iterator[Callable[..., None]]:
    """Show the progress of one job on stderr: what the block reports, as `OnProgress`, with or without a note."""
    with ProgressDisplay(Console(stderr=True)) as display:
        display.start(name)
        yield partial(display.update, name)
