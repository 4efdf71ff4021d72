"""Doing what is left of some units: each runs as soon as its inputs are done, and is recorded with its key."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from infalign.core.display import say, warn
from infalign.core.distributed import is_first, processes
from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress, ProgressDisplay
from infalign.core.storage import inventory, remove, write_record, write_text, writing
from infalign.pipeline.ownership import check_outputs_free
from infalign.pipeline.pending import Pending, attempt, check_outputs, holds, pending, reasons
from infalign.pipeline.records import FORMAT, Record, record_path, records, started_path, write_metrics
from infalign.pipeline.units import Identity, Summary, Unit, identify
from infalign.pipeline.workers import Task, Workers, run_tasks


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left to do of some units in a run directory, after a check of what it builds on."""

    root: Path
    units: Sequence[Unit]  # each after those that it needs
    todo: Mapping[str, Pending]

    @classmethod
    def of(cls, units: Sequence[Unit], root: Path) -> "Remaining":
        """Return what is left. Raises DataError for a damaged output, ConfigError for another's file in its place."""
        todo = pending(units, root)
        check_outputs((unit for unit in units if unit.name not in todo), root)
        check_outputs_free((unit for unit in units if unit.name in todo), root)
        return cls(root, units, todo)

    @property
    def done(self) -> list[Record]:
        """The records of the units that are done."""
        made = records(self.root)
        return [made[unit.name] for unit in self.units if unit.name not in self.todo]

    def describe(self, console: Console) -> None:
        """Print how much is done already, and why the rest is not."""
        if done := len(self.units) - len(self.todo):
            say(console, f"{done} of {len(self.units)} steps are already done")
        for line in reasons(self.todo):
            say(console, line)


def run_units(
    remaining: Remaining,
    workers: Workers,
    *,
    console: Console,
    versions: Mapping[str, str],
    after_unit: Callable[[Record], Sequence[str]],
    plan: Sequence[Unit] = (),
) -> None:
    """Do what is left and record each unit with the ``versions`` of libraries.

    The threads of a unit follow from the ``plan``, all units of the recipe, so that no result depends on what is left.
    Partial outputs of an earlier attempt are continued if at most their extent differs, and removed otherwise.
    ``after_unit`` returns the warnings about a finished unit, and stops the run by raising. In a distributed run all
    processes call this; what is left must then be one stage.
    """
    root, units = remaining.root, remaining.units
    by_name, place = {unit.name: unit for unit in units}, {unit.stage: i for i, unit in enumerate(units)}
    ids = identify(units)

    def finish(name: str, summary: Summary, seconds: float) -> None:
        if not is_first():  # the first process moves the output to its place, so it alone can record it
            return
        unit = by_name[name]
        record = {
            "format": FORMAT,
            "kind": unit.kind,
            "subject": unit.subject,
            "stage": unit.stage,
            "settings": unit.settings,
            "extent": unit.extent,
            "summary": summary,
            "output": inventory(unit.output, root),
            "key": ids[name].key,
            "needs": {need: ids[need].key for need in ids[name].needs},
            "seconds": round(seconds, 2),
            "versions": dict(versions),
        }
        write_record(record_path(root, name), record)
        write_metrics(root)
        say(console, f"{name:<24} {seconds:6.1f} s   {_headline(summary)}", mark="✓ ", style="green")
        for line in after_unit(record):
            warn(console, line)

    alone = _alone(identify(plan or units))
    # Later stages come first, so that a fault in one of them shows before the whole of an earlier stage is done.
    tasks = [
        Task(name, partial(_work, root, by_name[name], ids[name]), frozenset(ids[name].needs), name in alone)
        for name in sorted(remaining.todo, key=lambda name: -place[by_name[name].stage])
    ]
    with ProgressDisplay(console) as display:
        run_tasks(tasks, workers, display=display, on_done=finish)


def _alone(ids: Mapping[str, Identity]) -> set[str]:
    """Return the units beside which no other ever runs: each other one is needed by them, or needs them."""
    before: dict[str, set[str]] = {}
    for name, unit in ids.items():
        before[name] = {name}.union(*(before[need] for need in unit.needs))
    after = Counter(name for names in before.values() for name in names)
    return {name for name in ids if len(before[name]) + after[name] == len(ids) + 1}


def check_distributed(remaining: Remaining, stage: str) -> None:
    """Raise ConfigError if this is one of several processes, and another stage than ``stage`` is to be done first."""
    waiting = [unit.name for unit in remaining.units if unit.name in remaining.todo and unit.stage != stage]
    if processes() > 1 and waiting:
        raise ConfigError(f"{', '.join(waiting)} must be done before a distributed {stage}; run them without it first")


def begin(root: Path, unit: Unit, identity: Identity) -> None:
    """Make the place of a unit's output ready: what another `attempt` left is removed."""
    started, this = started_path(root, unit.name), partial(attempt, identity.base, identity.needs, root)
    if not is_first():
        while not holds(started, this()):  # the first process removes the old output
            time.sleep(0.1)
    else:
        continued = holds(started, this())
        check_outputs_free([unit], root)  # again: hours may have passed
        if not unit.clears and not (continued and unit.only_adds):  # other units replace the recorded output
            record_path(root, unit.name).unlink(missing_ok=True)
        if not continued:
            if not unit.clears:
                for left in filter(None, (unit.output, unit.workspace)):
                    remove(left)
            write_text(started, this())
    with writing(unit.output.parent):
        unit.output.parent.mkdir(parents=True, exist_ok=True)


def _work(root: Path, unit: Unit, identity: Identity, *, on_progress: OnProgress) -> Summary:
    """Do a unit; the output of another attempt is removed first."""
    begin(root, unit, identity)
    if not (unit.together or is_first()):
        return {}  # the next unit begins when the first process has done this one
    return unit.work(on_progress=on_progress)


def _headline(summary: Mapping[str, Any]) -> str:
    shown = []
    for name, value in summary.items():
        if isinstance(value, dict) and "mean" in value:
            shown.append(f"{name} {value['mean']:.3f} ({value['low']:.3f}–{value['high']:.3f})")
        elif isinstance(value, (int, float)) and value:
            shown.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}")
    return "  ".join(shown[:5])
