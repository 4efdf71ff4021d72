"""The paper's figures and claims again, from trainings of several seeds: one page, and each figure's numbers."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from infalign.core.display import heading, plain_table, say
from infalign.core.errors import ConfigError
from infalign.core.storage import write_text
from infalign.evaluation.intervals import Estimate
from infalign.evaluation.seeds import verdict
from infalign.experiments.compare import ROUNDS, checked_budgets, train_methods, wanted_units
from infalign.experiments.methods import Compared, extreme_procedure, possible_methods
from infalign.experiments.paper import BY_NUMBER, FIGURES, Claim, Figure
from infalign.experiments.seeds import Seed
from infalign.pipeline.lock import held
from infalign.pipeline.ownership import claim as claimed
from infalign.pipeline.pending import pending
from infalign.pipeline.records import records
from infalign.recipe.reading import dump_recipe
from infalign.recipe.settings import Recipe
from infalign.report.html import check_drawable, embedded, template
from infalign.report.pictures import STYLE, Picture, save_picture
from infalign.steps.run import Run

Numbers = dict[str, Any]
REM_PER_INCH = 6.5  # on the page
FOLDER, PAGE, CLAIMS = "page", "index.html", "claims.json"


@dataclass(frozen=True)
class Reproduction:
    """Figures to repeat with a recipe, from some seeds at some KL budgets, in the folder ``output``.

    ``seeds`` and ``recipe`` are not used by figures that need none. Raises ConfigError for what cannot be: fewer than
    two seeds, no recipe where one is needed, a procedure other than best-of-N or worst-of-N.
    """

    figures: Sequence[Figure]
    output: Path
    recipe: Recipe | None = None
    seeds: Sequence[int] = (0, 1, 2)
    budgets: Sequence[float] | None = None  # None: those of a comparison, and further ones as there

    def __post_init__(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"{self.output} is a file; --output names a folder")
        if not any(figure.trains for figure in self.figures):
            return
        if self.recipe is None:
            names = ", ".join(str(figure.numbers[0]) for figure in self.figures if figure.trains)
            raise ConfigError(f"figure {names} is trained: give a recipe, such as hh-helpful-tiny")
        if len(set(self.seeds)) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {list(self.seeds)}; give two or more, each once, such as 0,1,2")
        if any(figure.methods for figure in self.figures):
            extreme_procedure(self.recipe)
            checked_budgets(self.budgets)

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe of each seed."""
        if self.recipe is None or not any(figure.trains for figure in self.figures):
            return []
        return [Seed.recipe_of(self.recipe, seed, self.output) for seed in self.seeds]

    @property
    def spent(self) -> tuple[float, ...]:
        """The KL budgets, in order."""
        return checked_budgets(self.budgets)

    def without(self) -> dict[str, str]:
        """Return the figures that the recipe cannot have, and why."""
        return {
            figure.name: reason
            for figure in self.figures
            if figure.trains and self.recipe is not None and (reason := figure.lacks(self.recipe))
        }

    def wanted(self) -> list[Figure]:
        """Return the figures that the recipe can have."""
        return [figure for figure in self.figures if figure.name not in self.without()]

    def methods(self) -> tuple[list[str], dict[str, str]]:
        """Return the methods that are trained, and why others of the figures are left out."""
        names = list(dict.fromkeys(name for figure in self.wanted() for name in figure.methods))
        return possible_methods(self.recipe, self.spent, names) if self.recipe is not None and names else ([], {})


def read_figures(numbers: str) -> list[Figure]:
    """Return the figures with some numbers, "4,12", or "all". Raises ConfigError for a number that is none."""
    if numbers == "all":
        return FIGURES
    unknown = [number for number in numbers.split(",") if not number.isdecimal() or int(number) not in BY_NUMBER]
    if unknown:
        known = f"{min(BY_NUMBER)} to {max(BY_NUMBER)}"
        raise ConfigError(f"the paper has no figure {unknown[0]!r} to reproduce; its figures are {known}, or give all")
    return [figure for figure in FIGURES if any(int(number) in figure.numbers for number in numbers.split(","))]


def reproduce(asked: Reproduction, console: Console) -> Numbers:
    """Train what the figures need for every seed, and write page, figures, tables and verdicts; return the verdicts.

    They go to the folder ``page`` of the output; each seed's run directory is beside it. Finished work is not
    repeated. Raises ConfigError without matplotlib or jinja2.
    """
    check_drawable("the page")
    import matplotlib

    methods, left_out = asked.methods()
    for name, reason in {**asked.without(), **left_out}.items():
        say(console, f"left out: {name}: {reason}", markup=False)
    seeds = []
    for number, recipe in enumerate(asked.recipes):
        heading(console, f"Seed {recipe.seed}, {number + 1} of {len(asked.seeds)}: {recipe.run_dir}")
        with held(Path(recipe.run_dir)):
            seeds.append(_trained(asked, recipe, methods, console))
    folder = asked.output / FOLDER
    asked.output.mkdir(parents=True, exist_ok=True)
    endings = (".svg", ".png", ".csv")
    claimed(folder, [PAGE, CLAIMS, *(f"{figure.name}{ending}" for figure in asked.wanted() for ending in endings)])
    with matplotlib.rc_context(STYLE):
        figures = [_figure(figure, seeds, folder) for figure in asked.wanted()]
    found = {
        "procedure": asked.recipe.procedure.name if asked.recipe else None,
        "seeds": [seed.recipe.seed for seed in seeds],
        "budgets": list(asked.spent) if methods else [],
        "left_out": {**asked.without(), **left_out},
        "figures": {one["name"]: {key: one[key] for key in ("numbers", "title", "claims")} for one in figures},
    }
    write_text(folder / CLAIMS, json.dumps(found, indent=1))
    html = template("infalign.experiments", "reproduction.html.j2").render(
        found=found,
        figures=figures,
        recipe=asked.recipe,
        recipe_yaml=dump_recipe(asked.recipe) if seeds and asked.recipe else None,
        claims_json=embedded(folder / CLAIMS, "application/json"),
        folders=[seed.recipe.run_dir for seed in seeds],
    )
    write_text(folder / PAGE, html)
    return found


def _trained(asked: Reproduction, recipe: Recipe, methods: Sequence[str], console: Console) -> Seed:
    """Train the methods from one seed, and do what else the figures need of it."""
    rounds, compared = 0 if asked.budgets else ROUNDS, None
    if methods:
        compared = train_methods(recipe, methods, asked.spent, rounds=rounds, splits=["test"], console=console)
    for figure in asked.wanted():
        if figure.study is not None:
            figure.study(recipe, console)
    return Seed(recipe, compared)


def _figure(figure: Figure, seeds: Sequence[Seed], folder: Path) -> Numbers:
    """Write a figure and its table, and return what the page says of it."""
    drawn = figure.draw(seeds)
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(drawn.columns)
    rows.writerows(drawn.rows)
    write_text(folder / f"{figure.name}.csv", table.getvalue())
    saved = save_picture(Picture(figure.name, drawn.figure, drawn.caption, drawn.alt), folder)
    return {
        **saved,
        "numbers": list(figure.numbers),
        "title": figure.title,
        "width": round(REM_PER_INCH * float(drawn.figure.get_figwidth()), 1),
        "png": embedded(folder / f"{figure.name}.png", "image/png"),
        "csv": embedded(folder / f"{figure.name}.csv", "text/csv"),
        "claims": [judged(one, seeds) for one in figure.claims],
    }


def judged(one: Claim, seeds: Sequence[Seed]) -> Numbers:
    """Return what was measured for a claim, and whether it is confirmed, refuted or undecided.

    This is where all verdicts are made: of the interval over seeds and prompts (`evaluation.seeds.over_seeds`).
    """
    measurement = one.value(seeds)
    by_seed = [float(seed.values.mean()) for seed in measurement.seeds]
    estimate = measurement.estimate(seeds[0].recipe.evaluate.confidence if seeds else 0.95)
    return {
        "says": one.says,
        "measured": one.measured,
        "holds": one.holds,
        "note": measurement.note,
        "estimate": None if estimate is None else estimate.as_dict(),
        "by_seed": by_seed,
        "seeds_shown": ", ".join(one.write(value) for value in by_seed).replace("-", "−"),
        "shown": "–" if estimate is None else _shown(one, estimate, exact=measurement.exact is not None),
        "verdict": "undecided" if estimate is None else verdict(estimate, one.least, one.most),
    }


def _shown(one: Claim, e: Estimate, *, exact: bool) -> str:
    """Return an estimate with its interval: ``+3.4 (+2.9 to +4.0) points``."""
    interval = "" if exact else f" ({one.write(e.low)} to {one.write(e.high)})"
    return f"{one.write(e.mean)}{interval} {one.unit}".replace("-", "−")


def print_verdicts(found: Numbers, console: Console) -> None:
    """Print every claim with what was measured and the verdict."""
    table = plain_table("figure", "claim", "measured", "verdict", breaking=(1, 2))
    for figure in found["figures"].values():
        for i, one in enumerate(figure["claims"]):
            number = ", ".join(map(str, figure["numbers"])) if i == 0 else ""
            table.add_row(number, f"{one['measured']}: {one['holds']}", one["shown"], one["verdict"])
        table.add_section()
    heading(console, "The paper's claims")
    console.print(table)


def print_plan(asked: Reproduction, console: Console) -> None:
    """Print which figures, methods and policies there will be, what of it is done, and how long the rest takes.

    The time is that of the same steps in seeds that are done, or in the recipe's own run directory; a step that no
    record knows takes the mean of its stage. Nothing is written.
    """
    methods, left_out = asked.methods()
    table = plain_table("figure", "shows", "methods", breaking=(1, 2))
    for figure in asked.wanted():
        table.add_row(", ".join(map(str, figure.numbers)), figure.title, ", ".join(figure.methods))
    heading(console, "Figures")
    console.print(table)
    for name, reason in {**asked.without(), **left_out}.items():
        say(console, f"left out: {name}: {reason}", markup=False)
    if studies := [figure.name for figure in asked.wanted() if figure.study is not None]:
        say(
            console,
            f"{', '.join(studies)}: a study of its own for each of {len(asked.recipes)} seeds, not counted here",
        )
    if methods:
        _print_policies(asked, methods, console)


def _print_policies(asked: Reproduction, methods: Sequence[str], console: Console) -> None:
    """Print how many policies are trained for each seed, what of it is done, and how long the rest takes."""
    assert asked.recipe is not None
    seconds = _seconds([Path(asked.recipe.run_dir), *(Path(recipe.run_dir) for recipe in asked.recipes)])
    at_once, left, total = asked.recipe.compute.processes, list[tuple[str, str]](), 0
    table = plain_table("seed", "policies", "steps done")
    for recipe in asked.recipes:
        run = Run.of(Compared(recipe, methods, asked.spent).recipe)
        units = wanted_units(run, ["test"])
        todo = pending(units, run.layout.root)
        left += [(unit.stage, unit.name) for unit in units if unit.name in todo]
        total += len(run.recipe.policies)
        table.add_row(f"{recipe.seed}", f"{len(run.recipe.policies)}", f"{len(units) - len(todo)} of {len(units)}")
    heading(console, "What is trained")
    console.print(table)
    budgets = " and ".join(f"{budget:g}" for budget in asked.spent)
    say(console, f"{total} policies: {len(methods)} methods at {budgets} nats for {len(asked.seeds)} seeds")
    if asked.budgets is None:
        say(console, f"and further budgets, in up to {ROUNDS} rounds, for methods that miss the common KL")
    if not left:
        say(console, "nothing of this is left to do")
        return
    by_stage: dict[str, list[float]] = {}
    for (stage, _), spent in seconds.items():
        by_stage.setdefault(stage, []).append(spent)
    if unknown := {stage for stage, _ in left} - by_stage.keys():
        say(
            console,
            f"how long it takes is known when a seed is done: there is no record of {', '.join(sorted(unknown))}",
        )
        return
    minutes = sum(seconds.get(step, float(np.mean(by_stage[step[0]]))) for step in left) / 60 / at_once
    time = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    say(console, f"about {time} are left, with {at_once} processes and by the records of {len(seconds)} steps")


def _seconds(roots: Sequence[Path]) -> dict[tuple[str, str], float]:
    """Return the mean seconds of every step, by stage and name, that is recorded in one of some run directories."""
    found: dict[tuple[str, str], list[float]] = {}
    for root in roots:
        for name, record in records(root).items():
            found.setdefault((record["stage"], name), []).append(record["seconds"])
    return {step: float(np.mean(spent)) for step, spent in found.items()}
