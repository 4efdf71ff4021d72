"""The figures and claims of the paper (InfAlign, ICML 2025, arXiv 2412.19792) again, from trainings of several seeds.

    python papers/reproduce.py 2                                theory, no recipe
    python papers/reproduce.py all hh-helpful-tiny --dry-run    which figures, methods and policies
    python papers/reproduce.py all hh-helpful-tiny              hours; `make paper`
    python papers/reproduce.py 4,10 hh-helpful --output figures

Figures by their numbers in the paper, in the order of captions: 2 and 11 theory; 3 calibration; 4 win rates against KL;
5 N = 2; 6 GRPO and Best-of-N; 7 reward hacking; 8 N = 32; 9 raw reward; 10 GRPO at Best-of-N; 12 Rewind-and-Repeat.
OUTPUT/page/README.md has every figure and claim: confirmed, refuted or undecided, by an interval over seeds and
prompts; all numbers are in claims.json and a CSV per figure beside it.

Every seed is a run directory of its own, OUTPUT/seed-0 and so on, of which only what the figures need is done. The same
command continues. Without --kl-budgets, methods that miss the common KL get further ones.
"""

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from best_of_n import BEST_OF_N, largest_n
from figures import BY_NUMBER, FIGURES, Claim, Figure
from method_policies import MethodPolicies, check_budgets, possible_methods
from methods import extreme_procedure
from plots import STYLE, save
from rich.box import SIMPLE_HEAD
from rich.table import Table
from run_files import Recipe, load_recipe
from seeds import Seed
from train_methods import ROUNDS, train_methods

from infalign import ConfigError, DataError, Estimate

Numbers = dict[str, Any]


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
        if not self.trains:
            return
        if self.recipe is None:
            names = ", ".join(str(figure.numbers[0]) for figure in self.figures if figure.trains)
            raise ConfigError(f"figure {names} is trained: give a recipe, such as hh-helpful-tiny")
        if len(set(self.seeds)) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {list(self.seeds)}; give two or more, each once, such as 0,1,2")
        if any(figure.methods for figure in self.figures):
            extreme_procedure(self.recipe)
            check_budgets(self.budgets)

    @property
    def trains(self) -> bool:
        """Whether any figure needs a recipe and seeds."""
        return any(figure.trains for figure in self.figures)

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe of each seed."""
        if not self.trains or self.recipe is None:
            return []
        folders = {seed: str(self.output / f"seed-{seed}") for seed in self.seeds}
        return [self.recipe.model_copy(update={"seed": seed, "run_dir": own}) for seed, own in folders.items()]

    def plan(self) -> tuple[list[Figure], list[str], dict[str, str]]:
        """Return the figures that the recipe can have, the methods that are trained, and why others are left out."""
        if self.recipe is None:
            return list(self.figures), [], {}
        left_out = {figure.name: reason for figure in self.figures if (reason := figure.lacks(self.recipe))}
        wanted = [figure for figure in self.figures if figure.name not in left_out]
        names = list(dict.fromkeys(name for figure in wanted for name in figure.methods))
        trained = [name for name in names if name != BEST_OF_N]
        methods, without = possible_methods(self.recipe, check_budgets(self.budgets), trained) if trained else ([], {})
        if BEST_OF_N in names and largest_n(self.recipe) < 2:
            without |= {BEST_OF_N: f"it needs more evaluate.samples than {self.recipe.evaluate.samples}"}
        elif BEST_OF_N in names:
            methods = [*methods, BEST_OF_N]
        return wanted, methods, left_out | without

    def print_plan(self) -> None:
        """Print which figures, methods and policies there will be. Nothing is written."""
        figures, methods, left_out = self.plan()
        table = Table("figure", "shows", "methods", box=SIMPLE_HEAD)
        for figure in figures:
            table.add_row(", ".join(map(str, figure.numbers)), figure.title, ", ".join(figure.methods))
        Console().print(table)
        for name, reason in left_out.items():
            print(f"left out: {name}: {reason}")
        if methods and self.recipe is not None:
            budgets = check_budgets(self.budgets)
            trained = [method for method in methods if method != BEST_OF_N]
            each = len(MethodPolicies(self.recipe, trained, budgets).recipe.policies)
            further = ", and further ones for methods that miss the common KL" if self.budgets is None else ""
            print(
                f"{each * len(self.seeds)} policies: {len(methods)} methods at "
                f"{' and '.join(f'{budget:g}' for budget in budgets)} nats for {len(self.seeds)} seeds{further}"
            )

    def make(self) -> Numbers:
        """Train what the figures need for every seed, write the folder ``page`` of the output, return the verdicts."""
        figures, methods, left_out = self.plan()
        for name, reason in left_out.items():
            print(f"left out: {name}: {reason}")
        seeds = []
        for recipe in self.recipes:
            print(f"\nSeed {recipe.seed}: {recipe.run_dir}", flush=True)
            trained = [method for method in methods if method != BEST_OF_N]
            policies = MethodPolicies(recipe, trained, check_budgets(self.budgets)) if trained else None
            if policies is not None:
                policies = train_methods(policies, rounds=0 if self.budgets else ROUNDS)
            for figure in figures:
                if figure.study is not None:
                    figure.study(recipe)
            seeds.append(Seed(recipe, policies, BEST_OF_N in methods))
        folder = self.output / "page"
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "procedure": self.recipe.procedure.name if self.recipe else None,
            "seeds": [seed.recipe.seed for seed in seeds],
            "left_out": left_out,
            "figures": {figure.name: write_figure(figure, seeds, folder) for figure in figures},
        }
        (folder / "claims.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        (folder / "README.md").write_text(write_page(found), encoding="utf-8")
        return found


def write_figure(figure: Figure, seeds: Sequence[Seed], folder: Path) -> Numbers:
    """Write a figure and its table, and return what the page says of it."""
    with rc_context(STYLE):
        drawing = figure.draw(seeds)
        for ending in (".svg", ".png"):
            save(drawing.figure, folder / f"{figure.name}{ending}")
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(drawing.columns)
    rows.writerows(drawing.rows)
    (folder / f"{figure.name}.csv").write_text(table.getvalue(), encoding="utf-8")
    claims = [judge(claim, seeds) for claim in figure.claims]
    return {"numbers": list(figure.numbers), "title": figure.title, "caption": drawing.caption, "claims": claims}


def judge(claim: Claim, seeds: Sequence[Seed]) -> Numbers:
    """Return what was measured for a claim, and whether it is confirmed, refuted or undecided."""
    measurement = claim.value(seeds)
    found = measurement.estimate()
    by_seed = [seed.mean for seed in measurement.seeds]
    return {
        "says": claim.says,
        "measured": f"{claim.measured}; holds for {claim.holds}",
        "note": measurement.note,
        "estimate": None if found is None else found.as_dict(),
        "by_seed": by_seed,
        "shown": measurement.note if found is None else shown(claim, found, exact=measurement.exact is not None),
        "verdict": claim.judge(found),
    }


def shown(claim: Claim, e: Estimate, *, exact: bool) -> str:
    """Return an estimate with its interval: ``+3.4 (+2.9 to +4.0) points``."""
    interval = "" if exact else f" ({claim.write(e.low)} to {claim.write(e.high)})"
    return f"{claim.write(e.mean)}{interval} {claim.unit}".replace("-", "−")


def write_page(found: Numbers) -> str:
    """Return the page: a table of all claims, then every figure."""
    lines = [
        "# InfAlign, repeated",
        "",
        f"{found['procedure']}, seeds {', '.join(map(str, found['seeds']))}. All numbers: [claims.json](claims.json)."
        if found["seeds"]
        else "All numbers: [claims.json](claims.json).",
        "",
        "Confirmed: the whole interval is where the claim holds. Refuted: none of it is. Undecided: the rest. "
        "Intervals are for another training on other prompts. Two methods are compared at a KL that both spend. The "
        "best baseline is the one that came out best here, which favors it a little.",
        "",
        "| figure | claim | what measures it | measured | verdict |",
        "|---|---|---|---|---|",
    ]
    for figure in found["figures"].values():
        for claim in figure["claims"]:
            numbers = ", ".join(map(str, figure["numbers"]))
            lines.append(
                f"| {numbers} | {claim['says']} | {claim['measured']} | {claim['shown']} | {claim['verdict']} |"
            )
    lines += ["", *(f"Left out: {name}: {reason}\n" for name, reason in found["left_out"].items())]
    for name, figure in found["figures"].items():
        lines += [
            f"## {figure['title']}\n",
            f"![{figure['title']}]({name}.svg)\n",
            f"{figure['caption']} [CSV]({name}.csv)\n",
        ]
    return "\n".join(lines)


def read_figures(numbers: str) -> list[Figure]:
    """Return the figures with some numbers, "4,12", or "all". Raises ConfigError for a number that is none."""
    if numbers == "all":
        return FIGURES
    unknown = [number for number in numbers.split(",") if not number.isdecimal() or int(number) not in BY_NUMBER]
    if unknown:
        known = f"{min(BY_NUMBER)} to {max(BY_NUMBER)}"
        raise ConfigError(f"the paper has no figure {unknown[0]!r} to reproduce; its figures are {known}, or give all")
    return [figure for figure in FIGURES if any(int(number) in figure.numbers for number in numbers.split(","))]


def numbers_of(kind: type) -> Any:
    """Return what reads numbers that commas separate."""
    return lambda text: [kind(word) for word in text.split(",")]


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, do what is missing and print every verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", help="all, or numbers of figures: 4,12")
    parser.add_argument("recipe", nargs="?", help="theory needs none")
    parser.add_argument("--output", type=Path, help="the folder for page and runs; default: RUN_DIR-paper")
    parser.add_argument("--seeds", type=numbers_of(int), default=[0, 1, 2], help="two or more; default: 0,1,2")
    parser.add_argument("--kl-budgets", type=numbers_of(float), help="in nats; default: 0.5,1 and further ones")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(words)
    try:
        recipe = None if given.recipe is None else load_recipe(given.recipe, given.settings)
        output = given.output or Path("paper" if recipe is None else f"{recipe.run_dir}-paper")
        asked = Reproduction(read_figures(given.figures), output, recipe, given.seeds, given.kl_budgets)
        if given.dry_run:
            asked.print_plan()
            return
        found = asked.make()
    except (ConfigError, DataError) as error:
        sys.exit(f"reproduce: {error}")
    table = Table("figure", "claim", "measured", "verdict", box=SIMPLE_HEAD)
    for figure in found["figures"].values():
        for claim in figure["claims"]:
            table.add_row(str(figure["numbers"][0]), claim["measured"], claim["shown"], claim["verdict"])
    Console().print(table)
    print(f"Page: {output / 'page' / 'README.md'}")


if __name__ == "__main__":
    main()
