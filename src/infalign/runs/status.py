"""What of a run is done, what is not and why, and what it was made with."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from infalign.display import plain_table, say
from infalign.runs.layout import records
from infalign.runs.lock import describe, holder
from infalign.runs.pending import listed_names, pending
from infalign.runs.pipeline import units, versions
from infalign.runs.reading import load_recipe
from infalign.runs.recipe import Recipe
from infalign.runs.run import Run


@dataclass(frozen=True)
class UnitStatus:
    """Where a unit stands: done, or what is there of it and why that is not enough."""

    stage: str
    name: str
    state: Literal["done", "missing", "partial", "stale"]
    because: str
    made_with: dict[str, tuple[str | None, str | None]]  # of a done unit: libraries of another version, then and now


@dataclass(frozen=True)
class Status:
    """Where a run stands, and the process that holds its directory."""

    run_dir: str
    held_by: dict[str, str | int] | None
    units: Sequence[UnitStatus]

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return all(unit.state == "done" for unit in self.units)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return asdict(self) | {"done": self.done}


def status(recipe: Recipe) -> Status:
    """Return where a recipe's run stands; nothing is written and no lock is taken.

    A version that differs does not undo what is done. Inputs whose hash is not kept are hashed each time.
    """
    run = Run.of(recipe)
    root, wanted = run.layout.root, units(run)
    todo, made, now = pending(wanted, run.layout), records(root), versions()
    found = []
    for unit in wanted:
        if (left := todo.get(unit.name)) is not None:
            found.append(UnitStatus(unit.stage, unit.name, left.state, left.because, {}))
        else:
            then = made[unit.name]["versions"]
            differ = {lib: (then.get(lib), now.get(lib)) for lib in then | now if then.get(lib) != now.get(lib)}
            found.append(UnitStatus(unit.stage, unit.name, "done", "", differ))
    return Status(str(root), holder(root), found)


def recorded_recipe(root: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe of the last run in a run directory, with changes, and with that directory for its own."""
    return load_recipe(root / "recipe.yaml", overrides).model_copy(update={"run_dir": str(root)})


def print_status(found: Status, console: Console) -> None:
    """Print a row for each unit, the versions that differ and who holds the run directory."""

    table = plain_table("unit", "state", "because", breaking=[2])
    for unit in found.units:
        table.add_row(unit.name, unit.state, unit.because)
    console.print(table, markup=False)
    made: dict[tuple[str, str | None, str | None], list[str]] = {}
    for unit in found.units:
        for library, (then, now) in unit.made_with.items():
            made.setdefault((library, then, now), []).append(unit.name)
    for (library, then, now), names in made.items():
        text = f"{listed_names(names)}: made with {library} {then or 'absent'}, now {now or 'absent'}"
        say(console, text, markup=False)
    done = sum(unit.state == "done" for unit in found.units)
    say(console, f"{done} of {len(found.units)} done in {found.run_dir}", markup=False)
    if found.held_by:
        say(console, f"in use by {describe(found.held_by)}", markup=False)
