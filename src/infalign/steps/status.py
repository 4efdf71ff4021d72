"""The status of a run: finished and unfinished units, the reasons, and library versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from infalign.core.display import plain_table, say
from infalign.core.errors import ConfigError
from infalign.core.storage import flaws
from infalign.pipeline.pending import pending
from infalign.pipeline.records import record_path, records
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.findings import Finding, findings
from infalign.steps.run import Run
from infalign.steps.whole_run import print_findings, units


@dataclass(frozen=True)
class UnitStatus:
    """The status of a unit: done, or its state and the reason why it is not."""

    stage: str
    name: str
    state: Literal["done", "missing", "partial", "stale", "damaged"]
    because: str


@dataclass(frozen=True)
class Status:
    """The status of a run, and what speaks against its results."""

    run_dir: str
    units: Sequence[UnitStatus]
    findings: Sequence[Finding]  # of the units that are done

    @property
    def done(self) -> bool:
        """Whether all units are done."""
        return all(unit.state == "done" for unit in self.units)


def status(recipe: Recipe) -> Status:
    """Return the status of a recipe's run; nothing is written and no lock is taken.

    Inputs without a cached hash, and outputs that were touched since their record was written, are hashed on each call.
    """
    run = Run.of(recipe)
    root, wanted = run.layout.root, units(run)
    todo, made = pending(wanted, root), records(root)
    statuses, against = list[UnitStatus](), list[Finding]()
    for unit in wanted:
        if (left := todo.get(unit.name)) is not None:
            statuses.append(UnitStatus(unit.stage, unit.name, left.state, left.because))
            continue
        record = record_path(root, unit.name)  # it is absent if the run has begun to do the unit again
        since = record.stat().st_ctime_ns if record.exists() else None
        if flaw := "; ".join(flaws(made[unit.name]["output"], root, since) if since else []):
            statuses.append(UnitStatus(unit.stage, unit.name, "damaged", f"{flaw}; delete it and rerun"))
        else:
            statuses.append(UnitStatus(unit.stage, unit.name, "done", ""))
            against += findings(recipe, made[unit.name])
    return Status(str(root), statuses, against)


def recorded_recipe(root: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe of the last run in a run directory, with overrides, and that directory as its ``run_dir``.

    Raises ConfigError for a folder that is no run's.
    """
    if not (root / "recipe.yaml").is_file():
        raise ConfigError(f"{root} is not a run directory: it has no recipe.yaml; give the run_dir of a recipe")
    return load_recipe(root / "recipe.yaml", overrides).model_copy(update={"run_dir": str(root)})


def print_status(found: Status, console: Console) -> None:
    """Print a row for each unit, and the findings."""
    table = plain_table("unit", "state", "because", breaking=[2])
    for unit in found.units:
        table.add_row(unit.name, unit.state, unit.because)
    console.print(table)
    print_findings(found.findings, console)
    say(console, f"{sum(unit.state == 'done' for unit in found.units)} of {len(found.units)} done in {found.run_dir}")
