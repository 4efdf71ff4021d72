"""Jobs in real worker processes: order, failures of every kind, and the display."""

import io
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infalign.core.errors import ConfigError, DataError, InfalignError
from infalign.core.progress import OnProgress, ProgressDisplay
from infalign.pipeline.workers import Task, Workers, run_tasks


def give(value: Any, *, on_progress: OnProgress) -> Any:
    """Return ``value``."""
    return value


def meet(folder: Path, name: str, other: str, *, on_progress: OnProgress) -> tuple[float, float]:
    """Wait for another job, and return when this job began and ended."""
    begun, _ = stamp(folder, name, 0.0, on_progress=on_progress)
    while not (folder / other).exists():
        time.sleep(0.01)
    return begun, time.monotonic()


def stamp(folder: Path, name: str, seconds: float, *, on_progress: OnProgress) -> tuple[float, float]:
    """Return when this job began and ended."""
    begun = time.monotonic()
    (folder / name).write_text(str(os.getpid()))
    time.sleep(seconds)
    (folder / f"{name}-ended").touch()
    return begun, time.monotonic()


class RowError(DataError):
    """An error whose constructor takes more than a message, which pickle cannot rebuild."""

    def __init__(self, file: str, row: int) -> None:
        super().__init__(f"{file} row {row} is wrong")


def fail(kind: str, *, on_progress: OnProgress) -> None:
    """Raise an error of a kind."""
    errors = {
        "ours": lambda: ConfigError("the recipe is wrong"),
        "several arguments": lambda: RowError("x.jsonl", 7),
        "another's": lambda: KeyError("key"),
        "not picklable": lambda: ValueError("a\nb", threading.Lock()),
        "library": lambda: ModuleNotFoundError("No module named 'x'", name="x"),
    }
    raise errors[kind]()


def count(steps: int, *, on_progress: OnProgress) -> int:
    """Report every step."""
    for step in range(steps):
        on_progress(step + 1, steps, f"loss {step}")
    return steps


def run(work: list[Task], processes: int, console: Console | None = None, needed: str = "infalign") -> dict[str, Any]:
    """Run jobs and return their results by name, in the order in which they were done."""
    results: dict[str, Any] = {}

    def on_done(name: str, result: Any, seconds: float) -> None:
        results[name] = result

    with ProgressDisplay(console or Console(file=io.StringIO())) as display:
        run_tasks(work, Workers(processes, 1, needed), display=display, on_done=on_done)
    return results


def job(name: str, function: Any, *arguments: Any, needs: tuple[str, ...] = ()) -> Task:
    """Return a job that calls ``function`` with ``arguments``."""
    return Task(name, partial(function, *arguments), frozenset(needs))


def test_a_job_starts_when_what_it_needs_is_done_and_workers_are_used_again(tmp_path: Path) -> None:
    """Of a diamond the two sides overlap, the ends do not, and two processes do it all."""
    diamond = [
        job("end", stamp, tmp_path, "end", 0.0, needs=("left", "right", "done long ago")),
        job("left", meet, tmp_path, "left", "right", needs=("start",)),
        job("right", meet, tmp_path, "right", "left", needs=("start",)),
        job("start", stamp, tmp_path, "start", 0.0),
    ]
    times = run(diamond, 2)
    assert times["start"][1] <= min(times["left"][0], times["right"][0])
    assert max(times["left"][1], times["right"][1]) <= times["end"][0]
    assert len({(tmp_path / name).read_text() for name in times}) <= 2
    assert all(process != str(os.getpid()) for process in ((tmp_path / name).read_text() for name in times))


def test_with_one_process_everything_runs_here_in_order(tmp_path: Path) -> None:
    """One process is this process."""
    done = run([job("b", stamp, tmp_path, "b", 0.0, needs=("a",)), job("a", stamp, tmp_path, "a", 0.0)], 1)
    assert list(done) == ["a", "b"]
    assert (tmp_path / "a").read_text() == str(os.getpid())


def test_an_idle_worker_imports_what_later_tasks_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first task runs, an idle worker imports, which then does the second."""
    (tmp_path / "heavy.py").write_text(f"import os\nopen({str(tmp_path / 'imported')!r}, 'x').write(str(os.getpid()))")
    monkeypatch.syspath_prepend(tmp_path)
    first = job("first", meet, tmp_path, "first", "imported")
    run([first, job("second", stamp, tmp_path, "second", 0.0, needs=("first",))], 2, needed="heavy")
    assert (tmp_path / "imported").read_text() == (tmp_path / "second").read_text() != (tmp_path / "first").read_text()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("ours", ConfigError, "the recipe is wrong"),
        ("several arguments", DataError, "x.jsonl row 7 is wrong"),
        ("another's", InfalignError, "job failed unexpectedly: KeyError: 'key'; rerun with --debug to see where"),
        ("not picklable", InfalignError, "job failed unexpectedly: ValueError: ('a"),
        ("library", ConfigError, "job needs a library that is not installed (No module named 'x'); pip install"),
    ],
)
def test_an_error_of_a_job_is_raised_here(processes: int, kind: str, error: type[InfalignError], said: str) -> None:
    """Our errors keep their class, exit code and message wherever the job ran; others become one that names the job."""
    with pytest.raises(InfalignError) as raised:
        run([job("job", fail, kind)], processes)
    assert isinstance(raised.value, error)
    assert raised.value.exit_code == error.exit_code
    assert str(raised.value).startswith(said)
    if processes == 2:
        assert "in fail\n    raise errors[kind]()" in raised.value.__notes__[0]


def test_ctrl_c_while_a_worker_starts_is_left_to_this_process() -> None:
    """A worker that is interrupted before it has imported anything does its work and says nothing."""
    done = threading.Event()

    def interrupt() -> None:
        while not done.wait(0.001):
            for worker in active_children():
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert run([job("a", give, 1), job("b", give, 2)], 2) == {"a": 1, "b": 2}
    finally:
        done.set()
        thread.join()


class SlowToHash:
    """A function for a data set whose fingerprint takes a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        (self.folder / "hashing").touch()
        time.sleep(1.0)
        return SlowToHash, (self.folder,)

    def __call__(self, row: dict[str, int]) -> dict[str, int]:
        return row


def map_rows(folder: Path, *, on_progress: OnProgress) -> None:
    """Map the rows of a data set, as trainers do, go on for ever, and tidy up."""
    from datasets import Dataset

    try:
        Dataset.from_list([{"number": 1}]).map(SlowToHash(folder))
        while True:
            time.sleep(0.01)
    finally:
        (folder / "tidied").touch()


def fail_after(file: Path, *, on_progress: OnProgress) -> None:
    """Fail once a file is there."""
    while not file.exists():
        time.sleep(0.01)
    raise ConfigError("over")


def test_a_worker_is_stopped_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a library swallows every exception, as the fingerprint of a data set does."""
    monkeypatch.setattr("infalign.pipeline.workers.STOP_WITHIN", 600.0)
    work = [job("endless", map_rows, tmp_path), job("fail", fail_after, tmp_path / "hashing")]
    with pytest.raises(ConfigError, match="over"):
        run(work, 2, Console(file=io.StringIO()))
    assert (tmp_path / "tidied").exists()
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain line says how much is done, and no line comes before its time."""
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr("infalign.core.progress.LINE_EVERY", float("inf"))
    assert run([job("quick", count, 5)], 1, console) == {"quick": 5}
    assert console.file.getvalue() == ""
    monkeypatch.setattr("infalign.core.progress.LINE_EVERY", 0.0)
    run([job("slow", count, 3)], 1, console)
    told = [line.split()[:2] for line in console.file.getvalue().splitlines()]
    assert told == [["slow:", f"{i}/3"] for i in (1, 2, 3)]


def test_the_time_left_is_that_of_the_part_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that begins anew, as with another learning rate, is not measured by what it did before."""
    seconds = iter(range(0, 1000, 100))
    monkeypatch.setattr("infalign.core.progress.time.monotonic", lambda: next(seconds))
    display = ProgressDisplay(Console(file=(said := io.StringIO()), width=80))
    display.start("train")
    for done in (1, 2, 3, 1, 2):
        display.update("train", done, 4)
    left = [line.partition("train: ")[2].strip() for line in said.getvalue().splitlines()]
    assert left == ["1/4", "2/4  200 s left", "3/4  100 s left", "1/4", "2/4  200 s left"]


def test_on_a_terminal_progress_is_a_bar_that_vanishes() -> None:
    """A terminal sees a bar with its note, also from a worker, and the cursor is given back."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    assert run([job("drawing", count, 4)], 2, console) == {"drawing": 4}
    shown = console.file.getvalue()
    assert "drawing" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
