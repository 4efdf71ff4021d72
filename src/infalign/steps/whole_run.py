"""A run of a recipe: its units of work, and doing those that are left."""

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from infalign.core.display import counted, say, warn
from infalign.core.distributed import is_first, processes
from infalign.core.storage import write_text, writing
from infalign.evaluation.worth import print_budgets
from infalign.models.conversion import convert
from infalign.models.pretrained import check_reachable
from infalign.pipeline.ownership import check_inputs, held
from infalign.pipeline.pending import check_outputs
from infalign.pipeline.records import Record, records
from infalign.pipeline.scheduler import Remaining, check_distributed, run_units
from infalign.pipeline.units import Unit
from infalign.pipeline.workers import Workers
from infalign.recipe.layout import Layout
from infalign.recipe.reading import dump_recipe, load_recipe
from infalign.recipe.settings import Recipe
from infalign.recipe.stored_laws import stored_budgets
from infalign.report import page
from infalign.report.findings import Finding, check_worth, findings, sentences
from infalign.report.results import Results, read_results
from infalign.report.tables import print_table
from infalign.steps import STAGES, calibrate, data, evaluate, reward_model, rollout, score, sft, train
from infalign.steps.checks import check_setup
from infalign.steps.run import Run
from infalign.steps.time_estimate import within_minutes

STEPS = (data, sft, reward_model, rollout, score, calibrate, train, evaluate)  # in the order of `STAGES`
LIBRARIES = (  # that affect numbers
    *("infalign", "numpy", "pyarrow", "torch", "transformers", "trl", "peft", "datasets"),
    *("reasoning-gym", "math-verify"),
)
RECORDED = "# The recipe of this run as infalign read it. To change it, edit a copy elsewhere.\n"


def units(run: Run, *, until: str = "report") -> list[Unit]:
    """Return the units of all stages up to ``until``, each after those it needs."""
    wanted = [unit for step in STEPS[: list(STAGES).index(until) + 1] for unit in step.units(run)]
    if until == "report":
        names = tuple(unit.name for unit in wanted)
        work, output = partial(page.write, run.recipe, run.layout, names), run.layout.report
        wanted.append(Unit("report", "report", inputs=(run.layout.results,), settings={}, output=output, work=work))
    return wanted


def check_opened(run: Run, *paths: str | Path) -> None:
    """Raise DataError if one of ``paths``, about to be read, is an output of the run and not as it was recorded."""
    opened = {Path(path).resolve() for path in paths}
    check_outputs((unit for unit in units(run) if unit.output.resolve() in opened), run.layout.root)


def run(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> Results:
    """Run a recipe, a YAML file or the name of a built-in one, and return the numbers of its ``results.json``.

    ``overrides`` change settings by dotted key. Work that is done already is not repeated. Prints what
    ``infalign run`` prints, to stderr. Raises `infalign.core.errors.InfalignError` where the command fails.

    >>> results = run("recipe.yaml", {"run_dir": "runs/mine", "rollout.k": 8})
    >>> sorted(results["policies"])
    ['aware', 'ordinary']
    """
    changes = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    return read_results(run_recipe(within_minutes(load_recipe(recipe, changes)), console=Console(stderr=True)))


def run_recipe(recipe: Recipe, *, until: str = "report", console: Console) -> Path:
    """Do all unfinished work up to stage ``until``, print what came of it, and return the run directory."""
    with open_run(recipe) as opened_run:
        root, wanted = opened_run.layout.root, units(opened_run, until=until)
        write_recipe(recipe, root)
        do_units(opened_run, wanted, until=until, console=console)
    made = records(root)
    read = made["data"]["summary"]
    if columns := read.get("kept_columns"):
        more = f" and {len(columns) - 100:,} more" if len(columns) > 100 else ""
        say(console, f"columns kept unchanged: {', '.join(columns[:100])}{more}")
    if skipped := read["skipped"]:
        say(console, f"skipped {counted(skipped, 'invalid row')}: {opened_run.layout.data / 'skipped.txt'}")
    if until == "report":
        print_findings((finding for unit in wanted for finding in findings(recipe, made[unit.name])), console)
        print_table(root, console)
    return root


def print_findings(found: Iterable[Finding], console: Console) -> None:
    """Print a line for each finding, with the units that share it."""
    for line in sentences(found):
        warn(console, line)


@contextmanager
def open_run(recipe: Recipe) -> Iterator[Run]:
    """Yield the run of a recipe with its directory created and locked; the file hashes are cached in it.

    Raises ConfigError, before anything is written, for a directory that is no run's and for inputs in the places of
    outputs.
    """
    layout = Layout(Path(recipe.run_dir))
    with held(layout.root):
        records(layout.root)  # raises for records that this version cannot read, before anything is written
        opened_run = Run.of(recipe)
        check_inputs(opened_run.digests.files, units(opened_run))
        with writing(layout.root / "stages"):
            (layout.root / "stages").mkdir(parents=True, exist_ok=True)
        for model in recipe.named_models.values():
            convert(model)
        if is_first():
            opened_run.digests.save()
        yield opened_run


def do_units(
    run: Run,
    wanted: Sequence[Unit],
    *,
    until: str,
    console: Console,
    before_units: Callable[[Remaining], None] = lambda _: None,
) -> None:
    """Do the units that are not done yet; a distributed run does only those of stage ``until``.

    ``before_units`` is called once all is checked. Warnings about a result are printed below it, each once. Raises
    InfalignError for a worthless result, also of an earlier run.
    """
    recipe, remaining = run.recipe, Remaining.of(wanted, run.layout.root)
    check_distributed(remaining, until)
    remaining.describe(console)
    if remaining.todo:
        recipe.compute.check()
        check_setup(recipe)
        for model in set(recipe.named_models.values()):
            check_reachable(model)
        trained = [name for name in recipe.policies if f"train-{name}" in remaining.todo]
        of_ranks = [warning for name in trained for warning in train.coarse_ranks(recipe, name)]
        for warning in recipe.machine_warnings() + of_ranks:
            warn(console, warning)
    for record in remaining.done:
        check_worth(recipe, findings(recipe, record))
    warned = set[str]()

    def after_unit(record: Record) -> list[str]:
        unit_findings = findings(recipe, record)
        check_worth(recipe, unit_findings)
        if record["kind"] == "calibrate" and (budgets := stored_budgets(recipe.policies, recipe.procedure, run.layout)):
            print_budgets(budgets, console)
        new = [finding for finding in unit_findings if finding.said not in warned]
        warned.update(finding.said for finding in new)
        return sentences(new)

    at_once = 1 if processes() > 1 else recipe.compute.processes
    workers = Workers(at_once, recipe.compute.threads, needed="infalign.training.supervised")
    before_units(remaining)
    run_units(remaining, workers, console=console, versions=versions(), after_unit=after_unit, plan=units(run))


def versions() -> dict[str, str]:
    """Return the versions of infalign and of the installed libraries that affect the numbers."""
    installed = dict[str, str]()
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def write_recipe(recipe: Recipe, root: Path) -> None:
    """Write the recipe with every default spelled out to ``recipe.yaml`` in the run directory."""
    write_text(root / "recipe.yaml", RECORDED + dump_recipe(recipe))
