"""The list of faults. A case injects one, checks what follows and returns what a user sees of it."""

import importlib
import io
import json
import pkgutil
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import micro
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from infalign.recipe.reading import load_recipe
from infalign.steps import whole_run


@dataclass(frozen=True)
class Seen:
    """What a user sees of a fault: the exit code, what is said, and what the fault cost."""

    code: int
    said: str
    lost: str = "nothing"


@dataclass(frozen=True)
class Lab:
    """An empty folder for one fault, and a finished run of `micro.settings` to copy; nothing may change that one."""

    folder: Path
    finished: Path

    def copy(self, name: str = "run") -> Path:
        """Return the root of a copy of the finished run."""
        return Path(shutil.copytree(self.finished, self.folder / name))


@dataclass(frozen=True)
class Case:
    """A fault, in the words of the table, and the function that injects it; a brief one is also part of the tests."""

    fault: str
    inject: Callable[[Lab], Seen]
    brief: bool


CASES: list[Case] = []


def fault(what: str, *, brief: bool = False) -> Callable[[Callable[[Lab], Seen]], Callable[[Lab], Seen]]:
    """Add the decorated function to the `CASES`."""

    def add(inject: Callable[[Lab], Seen]) -> Callable[[Lab], Seen]:
        CASES.append(Case(what, inject, brief))
        return inject

    return add


def cases() -> list[Case]:
    """Return the cases of all modules of this package, module by module."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__package__}.{module.name}")
    return sorted(CASES, key=lambda case: case.inject.__module__)


def inject(case: Case, folder: Path, finished: Path) -> Seen:
    """Inject a fault in an empty folder and return what is seen, in words that are the same every time."""
    folder.mkdir()
    seen = case.inject(Lab(folder, finished))
    said = seen.said.replace(str(folder / "run"), "RUN").replace(str(folder), "…")
    said = re.sub(r"\d+\.\d GB", "… GB", said)
    said = re.sub(r"process \d+ on \S+ since \S+ \S+ \(.*?\)", "process … on … since … (…)", said)
    return replace(seen, said=" ".join(said.split()))


def printed(root: Path, *overrides: str, until: str = "report") -> list[str]:
    """Run the finished run's recipe with changes in this process and return the lines that it prints."""
    path = micro.write(root / "again.yaml", micro.settings(root))
    console = Console(file=io.StringIO(), width=200)
    whole_run.run_recipe(load_recipe(path, ["compute.processes=1", *overrides]), until=until, console=console)
    return console.file.getvalue().splitlines()


def again(root: Path, *overrides: str, until: str = "report") -> list[str]:
    """Run the finished run's recipe with changes in this process and return the names of the units that were done."""
    return [line.split()[1] for line in printed(root, *overrides, until=until) if line.startswith("✓")]


def tables(root: Path) -> dict[str, Any]:
    """Return everything that an interrupted run must end with as an undisturbed one does, bit for bit.

    Shards are joined: how rows lie in files may depend on when a run was stopped.
    """
    found: dict[str, Any] = {}
    for folder in sorted({path.parent for path in root.glob("rollouts/part-*/part-*.parquet")}):
        shards = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])
        rows = shards.sort_by([("prompt_id", "ascending"), ("index", "ascending")])
        found[str(folder.relative_to(root))] = rows.to_pylist()
    single = ("scores/part-*.parquet", "evaluation*/*/scores.parquet", "calibrated.parquet")
    for path in sorted(path for pattern in single for path in root.glob(pattern)):
        found[str(path.relative_to(root))] = pq.read_table(path).to_pylist()
    if (root / "results.json").exists():
        found["results.json"] = json.loads((root / "results.json").read_text())
    return found
