"""A place to inject a fault, and what faults have in common: commands, refusals, what an interrupted run ends with."""

import importlib
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import micro
import pyarrow.parquet as pq

from infalign.core.errors import InfalignError
from infalign.core.storage import read_record, remove
from infalign.recipe.reading import load_recipe

KILLED = 128 + signal.SIGKILL  # what a shell sees


class Seen(NamedTuple):
    """What a user sees of a fault: the exit code, and the sentence of the error or warning."""

    code: int
    said: str = ""


@dataclass(frozen=True)
class Lab:
    """An empty folder for one fault, and a finished run of `micro.settings` to copy; nothing may change that one."""

    folder: Path
    finished: Path

    def copy(self, name: str = "run") -> Path:
        """Return the root of a copy of the finished run."""
        return Path(shutil.copytree(self.finished, self.folder / name))

    def model(self, name: str) -> Path:
        """Return the folder of a copy of a model of the finished run."""
        return Path(shutil.copytree(self.finished / "models" / name, self.folder / name))

    def recipe(self, **changes: Any) -> str:
        """Write a recipe for the run directory ``run`` with other settings and return its path."""
        return micro.write(self.folder / "recipe.yaml", micro.settings(self.folder / "run") | changes)

    def ends_well(self, root: Path) -> list[str]:
        """Check that the same command ends with the tables of an undisturbed run; return the units that it does."""
        done = again(root, until="evaluate")
        assert tables(root) == tables(self.finished)
        return done


def infalign(*words: object) -> tuple[int, str, str]:
    """Run a command line in this process and return exit code, output and the sentence of the error."""
    code, out, err = micro.infalign(*words)
    return code, out, err.removeprefix("infalign: ").strip()


def refused(*words: object) -> Seen:
    """Run a command line that must fail, and return what is seen."""
    code, out, said = infalign(*words)
    assert code != 0, (out, said)
    return Seen(code, said)


def told(work: Callable[[], object]) -> Seen:
    """Return what is said when ``work`` ends with an error of ours, which it must."""
    try:
        work()
    except InfalignError as error:
        return Seen(error.exit_code, str(error))
    raise AssertionError("it went on as if nothing had happened")


def printed(root: Path, *overrides: str, until: str = "report") -> list[str]:
    """Run the finished run's recipe with changes in this process and return the lines that it prints."""
    path = micro.write(root / "again.yaml", micro.settings(root))
    return micro.printed(load_recipe(path, ["compute.processes=1", *overrides]), until=until)


again = micro.again


def undo(root: Path, *units: str) -> None:
    """Remove what the run knows of units and what they made: they are to be done from the start."""
    for name in units:
        record = root / "stages" / f"{name}.json"
        for made in read_record(record)["output"] if record.exists() else ():
            (root / made).unlink(missing_ok=True)
        for path in (record, record.with_suffix(".started")):
            path.unlink(missing_ok=True)
        remove(root / name.replace("score-", "scores/part-"))
        if name.startswith("samples-"):
            remove(root / "evaluation" / name.removeprefix("samples-") / "scores")
    remove(root / "checkpoints")


def summary(root: Path, unit: str) -> dict[str, Any]:
    """Return what the record of a unit says of it."""
    found: dict[str, Any] = read_record(root / "stages" / f"{unit}.json")["summary"]
    return found


@contextmanager
def untouched(folder: Path, *but: str) -> Iterator[None]:
    """Check that content and time of every file, but for those whose name begins with ``but``, stay as they are."""

    def state() -> dict[str, tuple[int, bytes]]:
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        kept = {name: file for name, file in files.items() if not name.startswith(but)}
        return {name: (file.stat().st_mtime_ns, file.read_bytes()) for name, file in kept.items()}

    before = state()
    yield
    assert state() == before


def tables(root: Path) -> dict[str, Any]:
    """Return everything that an interrupted run must end with as an undisturbed one does, bit for bit."""
    found: dict[str, Any] = {}
    for folder in sorted({path.parent for path in root.glob("rollouts/part-*/part-*.parquet")}):
        found[str(folder.relative_to(root))] = micro.rollouts(folder)
    single = ("scores/part-*.parquet", "evaluation*/*/scores.parquet", "calibrated.parquet")
    for path in sorted(path for pattern in single for path in root.glob(pattern)):
        found[str(path.relative_to(root))] = pq.read_table(path).to_pylist()
    if (root / "results.json").exists():
        found["results.json"] = json.loads((root / "results.json").read_text())
    return found


@contextmanager
def module(lab: Lab, source: str, name: str) -> Iterator[str]:
    """Yield the setting of a reward whose function, ``reward``, is in a module that can be imported until the end."""
    (lab.folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(lab.folder))
    importlib.invalidate_caches()
    try:
        yield f"reward={{function: '{name}:reward'}}"
    finally:
        sys.path.remove(str(lab.folder))
        sys.modules.pop(name, None)
