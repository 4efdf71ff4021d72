"""Doing the remaining work of a run: each unit runs as soon as its inputs are done, and is recorded with its key."""

import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from infalign.core.distributed import is_first, processes
from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress, ProgressDisplay
from infalign.core.storage import inventory, remove, write_record, write_text, writing
from infalign.models.gguf import converted, is_gguf
from infalign.models.pretrained import check_reach
from infalign.recipe.fingerprints import Digests
from infalign.recipe.settings import Recipe
from infalign.runs import STAGES
from infalign.runs.findings import check_worth, findings, sentences
from infalign.runs.layout import FORMAT, Layout, Summary, records
from infalign.runs.lock import held
from infalign.runs.ownership import check_inputs, check_outputs_free, write_recipe
from infalign.runs.pending import check_outputs, holds, pending, reasons
from infalign.runs.run import Run
from infalign.runs.units import Unit, bases, follows, keys, needs
from infalign.runs.workers import Task, run_tasks


def units(run: Run, *, until: str = "report") -> list[Unit]:
    """Return the units of all stages up to ``until``, each after those it needs."""
    stages = list(STAGES)[: list(STAGES).index(until) + 1]
    modules = (import_module(f"infalign.runs.stages.{stage.replace('-', '_')}") for stage in stages)
    return [unit for module in modules for unit in module.units(run)]


def run(recipe: Recipe, *, until: str = "report", console: Console) -> Path:
    """Do all unfinished work up to stage ``until``, and return the run directory.

    Partial outputs of an earlier attempt are continued if at most their extent differs, and removed otherwise.
    """
    with opened(recipe) as found:
        write_recipe(recipe, found.layout.root)
        do(found, units(found, until=until), until=until, console=console)
    return found.layout.root


@contextmanager
def opened(recipe: Recipe) -> Iterator[Run]:
    """Yield the run of a recipe with its directory created and locked; the file hashes are cached in it.

    Raises ConfigError, before anything is written, for a directory that is no run's and for inputs in the places of
    outputs.
    """
    layout = Layout(Path(recipe.run_dir))
    with held(layout.root):
        records(layout.root)  # raises for records that this version cannot read, before anything is written
        digests = Digests(layout.digests)
        found = Run.of(recipe, digests)
        check_inputs(digests.files, units(found))
        with writing(layout.root / "stages"):
            (layout.root / "stages").mkdir(parents=True, exist_ok=True)
        for model in filter(is_gguf, recipe.named_models.values()):
            converted(model)
        if is_first():
            digests.save()
        yield found


def do(run: Run, wanted: Sequence[Unit], *, until: str, console: Console) -> None:
    """Do the units that are not done yet, and record each; a distributed run does only those of stage ``until``.

    What speaks against a result is said below it, once for all units alike. Raises InfalignError for a worthless
    result, also of an earlier run.
    """
    layout, by_name = run.layout, {unit.name: unit for unit in wanted}
    needed, first, base_of = needs(wanted), follows(wanted), bases(wanted)
    todo = pending(wanted, layout)
    check_outputs(wanted, todo, layout.root)
    check_outputs_free((by_name[name] for name in todo), layout)
    distributed = processes() > 1
    if distributed and (waiting := [name for name in todo if by_name[name].stage != until]):
        raise ConfigError(f"{', '.join(waiting)} must be done before a distributed {until}; run them without it first")
    if done := [unit.name for unit in wanted if unit.name not in todo]:
        console.print(f"{len(done)} of {len(wanted)} steps are done already", highlight=False)
    for line in reasons(todo):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if todo:
        run.recipe.compute.check()
        for model in {*run.recipe.named_models.values(), *run.recipe.named_trunks.values()}:
            check_reach(model)
        for warning in (*run.recipe.of_machine(), *(said for name in todo for said in by_name[name].warnings())):
            console.print(f"[yellow]![/] {warning}", highlight=False, soft_wrap=True)
    key_of, said = keys(wanted), set[str]()
    for name, record in records(layout.root).items():
        if name in done:
            check_worth(run.recipe, findings(run.recipe, name, record["summary"]))

    def finish(name: str, summary: Summary, seconds: float) -> None:
        if not is_first():  # the first process moves the output to its place, so it alone can record it
            return
        unit = by_name[name]
        of_inputs = {need: key_of[need] for need in needed[name]}
        write_record(layout.record(name), _record(unit, key_of[name], of_inputs, summary, seconds, layout))
        console.print(
            f"[green]✓[/] {name:<24} {seconds:6.1f} s   {_headline(summary)}", highlight=False, soft_wrap=True
        )
        found = findings(run.recipe, name, summary)
        check_worth(run.recipe, found)
        for line in sentences(finding for finding in found if finding.said not in said):
            console.print(f"[yellow]![/] {line}", highlight=False, soft_wrap=True)
        said.update(finding.said for finding in found)

    # Later stages come first, so that a fault in one of them shows before the whole of an earlier stage is done.
    stages = list(STAGES)
    tasks = [
        Task(name, partial(_work, layout, by_name[name], base_of[name]), first[name])
        for name in sorted(todo, key=lambda name: -stages.index(by_name[name].stage))
    ]
    with ProgressDisplay(console) as display:
        compute = run.recipe.compute
        at_once = 1 if distributed else compute.processes
        run_tasks(tasks, processes=at_once, threads=compute.threads, display=display, on_done=finish)


def _record(
    unit: Unit, key: str, of_inputs: dict[str, str], summary: Summary, seconds: float, layout: Layout
) -> dict[str, Any]:
    """Return the record of a finished unit."""
    return {
        "format": FORMAT,
        "key": key,
        "stage": unit.stage,
        "settings": unit.settings,
        "extent": unit.extent,
        "needs": of_inputs,
        "seconds": round(seconds, 2),
        "summary": summary,
        "versions": versions(),
        "output": inventory(unit.output, layout.root),
    }


def _work(layout: Layout, unit: Unit, base: str, *, on_progress: OnProgress) -> Summary:
    """Do a unit; the output of an earlier attempt with another ``base`` is removed first."""
    begin(layout, unit, base)
    if not (unit.together or is_first()):
        return {}  # the next unit begins when the first process has done this one
    summary: Summary = unit.work(on_progress=on_progress)
    return summary


def begin(layout: Layout, unit: Unit, base: str) -> None:
    """Make the place of a unit's output ready: what an attempt with another ``base`` left is removed."""
    started = layout.started(unit.name)
    if not is_first():
        while not holds(started, base):  # the first process removes the old output
            time.sleep(0.1)
    else:
        continued = holds(started, base)
        check_outputs_free([unit], layout)  # again: hours may have passed
        if not unit.clears:
            if not (continued and unit.only_adds):  # other units replace the recorded output
                layout.record(unit.name).unlink(missing_ok=True)
            if not continued:
                for left in (unit.output, unit.workspace):
                    if left is not None:
                        remove(left)
        if not continued:
            write_text(started, base)
    with writing(unit.output.parent):
        unit.output.parent.mkdir(parents=True, exist_ok=True)


def versions() -> dict[str, str]:
    """Return the versions of infalign and of the installed libraries that affect the numbers."""
    names = ("infalign", "numpy", "pyarrow", "torch", "transformers", "trl", "peft", "datasets")
    return {name: importlib.metadata.version(name) for name in names if _installed(name)}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _headline(summary: dict[str, Any]) -> str:
    """Return the first five numbers of a summary as one line."""
    shown = []
    for name, value in summary.items():
        if isinstance(value, dict) and "mean" in value:
            shown.append(f"{name} {value['mean']:.3f} ({value['low']:.3f}–{value['high']:.3f})")
        elif isinstance(value, (int, float)) and value:
            shown.append(f"{name} {value:.4g}")
    return "  ".join(shown[:5])
