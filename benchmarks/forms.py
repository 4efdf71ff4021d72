"""All methods as guides and as plain language models, in the world of a recipe.

``python benchmarks/forms.py RECIPE FOLDER [PROCEDURE …] [SEED …] [key=value …]``, by default the recipe's procedure and
seeds 0, 1, 2: the recipe's data, models and rollouts are made once a seed; in a copy of its run directory for each form
the methods are trained at the KL budget of its first policy, which has a guide, for one procedure after the other: what
does not depend on it is trained once. A plain policy is trained at the learning rate of the recipe's student, by the
solver's own loss. A guide is scaled to its budget; a plain policy spends what it spends, so a method gets a further
budget to have policies on both sides of the median KL, and the guided qrpo half the budget
too, to be compared with plain policies that spend little. Prints a row a method: of its policy
nearest to the budget the KL, the served win rate by each judge and the share of theory's gap, and by how many points
qrpo of the same form, and over a plain policy the guided one, is ahead by each judge, at the budget or the KL that the
two spend; all with 95 % intervals over seeds and prompts (`seeds.over_seeds`), of one seed over prompts.
``FOLDER/PROCEDURE.svg`` shows the leads. What is done is not repeated. `preferences` takes an hour or two a seed on two
cores, `hh-harmless-tiny` with 192 prompts an hour on one.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from method_policies import MethodPolicies
from methods import METHODS
from plots import COLORS, QUIET, STYLE, panels, save
from run_files import load_recipe
from seeds import Seed, Trained, WinRate, estimated, lead, read_words, share_of_gap
from train_methods import train_methods

OFFLINE = ["qrpo", "qrpo-identity", "qrpo-raw", "qrpo-raw-prompt", "resample", "ipo", "bon-sft", "bonbon"]
ON_POLICY = ["rloo", "rloo-raw", "grpo", "grpo-raw", "maxk"]
FORMS = {"guide": (OFFLINE, 0), "plain": ([*OFFLINE, *ON_POLICY], 1)}  # methods, and rounds of further budgets
TITLES = {"guide": "guides", "plain": "plain models"}
OURS = "qrpo"
GUIDED = f"the guided {OURS}"

Row = Mapping[str, Mapping[str, float] | None]  # estimates by column; None where methods cannot be compared


def changes(name: str, form: str) -> list[str]:
    """Return the settings of a form: those of the recipe, for a guide, or the same without one."""
    policies = load_recipe(name).policies
    if form == "guide":
        return []
    first, student = next(iter(policies)), next(policy for policy in policies.values() if policy.solver == "distil")
    own = {"guide": "null", "loss": "logistic", "fit.learning_rate": student.fit.learning_rate}
    return [f"policies.{first}.{key}={value}" for key, value in own.items()]


def base_run(name: str, folder: Path, settings: Sequence[str]) -> Path:
    """Return the directory with a seed's data, models and calibrated rollouts, made if it is not there."""
    base = folder / "base"
    command = [sys.executable, "-m", "infalign", "run", name, "--until", "calibrate"]
    subprocess.run(
        [*command, *(word for change in (f"run_dir={base}", *settings) for word in ("--set", change))], check=True
    )
    return base


def trained(name: str, folder: Path, seed: str, procedure: str, form: str, overrides: Sequence[str]) -> Seed:
    """Return a seed with all methods in a form, trained and evaluated where they are not yet."""
    of_seed, settings = folder / f"seed-{seed}", [f"seed={seed}", *overrides]
    base, run_dir, (methods, rounds) = base_run(name, of_seed, settings), of_seed / form, FORMS[form]
    if not run_dir.exists():
        shutil.copytree(base, run_dir)
    recipe = load_recipe(name, [f"run_dir={run_dir}", f"procedure={procedure}", *settings, *changes(name, form)])
    budget = next(kl for policy in recipe.policies.values() if (kl := policy.budget) is not None)
    more = {OURS: [budget / 2]} if form == "guide" else {}
    policies = MethodPolicies(recipe, methods, [budget], more)
    return Seed(recipe, train_methods(policies, rounds=rounds))


def ahead(ours: Seed, theirs: Seed, method: str, rate: WinRate) -> Trained | None:
    """Return by how many points our qrpo is ahead of a method there, at the budget or the KL that both reach.

    None where one of them has no policy that spends about as much.
    """
    if (found := lead((ours, OURS), (theirs, method), rate, budget_of(ours))) is None:
        return None
    own, its = found
    return ours.trained(100 * (own.values - its.values), 100 * own.shift, -100 * its.shift)


def budget_of(seed: Seed) -> float:
    """Return the KL budget of a seed's methods."""
    (budget,) = seed.policies.budgets
    return budget


def row(seeds: Sequence[Seed], guides: Sequence[Seed], method: str) -> Row:
    """Return the numbers of a method; leads in points, of the same form's qrpo and, over plain models, of the guide."""
    won = {judge: WinRate(seeds[0].recipe.procedure, judge) for judge in seeds[0].evaluated.sources}

    def nearest(seed: Seed) -> str:
        return min(seed.by_method[method], key=lambda name: abs(float(seed.kl(name).mean()) - budget_of(seed)))

    own = [(seed, nearest(seed)) for seed in seeds]
    found: dict[str, Mapping[str, float] | None] = {
        "KL": estimated([seed.trained(seed.kl(name)) for seed, name in own])
    }
    for judge, rate in won.items():
        found[f"{judge}, %"] = estimated([seed.trained(100 * seed.values(rate, name)) for seed, name in own])
    for said, ours in ({OURS: seeds} if guides is seeds else {OURS: seeds, GUIDED: guides}).items():
        for judge, rate in won.items():
            pairs = zip(ours, seeds, strict=True)
            leads = [None if said == method else ahead(*pair, method, rate) for pair in pairs]
            found[f"{said} is ahead by the {judge}"] = None if None in leads else estimated(leads)
    shares = [share_of_gap(seed, name) for seed, name in own]
    known = [seed.trained(values) for (seed, _), values in zip(own, shares, strict=True) if values is not None]
    return found | {"share": estimated(known) if len(known) == len(own) else None}


def shown(estimate: Mapping[str, float] | None, digits: int) -> str:
    """Return an estimate with its interval: ``0.12 (−0.05 to 0.29)``."""
    if estimate is None:
        return ""
    mean, low, high = (f"{estimate[end]:.{digits}f}".replace("-", "−") for end in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def table(title: str, rows: Mapping[str, Row]) -> str:
    """Return rows as Markdown; methods that optimize the served win rate have a star."""
    columns = list(rows[OURS])
    lines = [f"{title}\n", f"| method | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    digits = {column: 2 if column in {"KL", "share"} else 1 for column in columns}
    for method, found in rows.items():
        cells = (shown(cell, digits[column]) for column, cell in found.items())
        lines.append(f"| {method}{'*' if METHODS[method].ours else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(by_form: Mapping[str, Mapping[str, Row]], path: Path) -> None:
    """Draw who is ahead of each method of a form by how many points, a panel each and a color for each judge."""
    drawn = [("guide", OURS), ("plain", OURS), ("plain", GUIDED)]
    with rc_context(STYLE):
        figure, axes = panels(1, len(drawn), (3.6 * len(drawn), 4.0))
        for panel, (form, ours) in zip(np.atleast_1d(axes), drawn, strict=True):
            rows, begins = by_form[form], f"{ours} is ahead "
            methods = [method for method in rows if method != ours]
            judges = [column for column in rows[OURS] if column.startswith(begins)]
            for number, (column, color) in enumerate(zip(judges, COLORS, strict=False)):
                for place, method in enumerate(methods):
                    if (found := rows[method][column]) is None:
                        continue
                    at = place + 0.3 * (number - 0.5 * (len(judges) - 1))
                    panel.plot([found["low"], found["high"]], [at, at], color=color)
                    panel.plot(found["mean"], at, "o", color=color, label=column.removeprefix(begins))
            panel.axvline(0, color=QUIET, linewidth=0.8)
            panel.set(title=f"{ours.removeprefix('the ')} over {TITLES[form]}", xlabel=f"points of {path.stem}")
            panel.set_yticks(range(len(methods)), methods)
            panel.set_ylim(len(methods) - 0.5, -0.5)
        handles, labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        figure.legend(once.values(), once, loc="outside upper left", ncols=2)
        save(figure, path)


def main() -> None:
    """Do what is missing and print a table for each procedure and form."""
    name, folder, *words = sys.argv[1:]
    named = [word for word in words if word.startswith(("best-of-", "worst-of-"))]
    seeds, overrides = read_words([word for word in words if word not in named])
    for procedure in named or [load_recipe(name).procedure.name]:
        by_form, found = dict[str, Mapping[str, Row]](), dict[str, Sequence[Seed]]()
        for form, (methods, _) in FORMS.items():
            found[form] = [trained(name, Path(folder), seed, procedure, form, overrides) for seed in seeds]
            by_form[form] = {method: row(found[form], found["guide"], method) for method in methods}
            print(f"\n{table(f'{procedure}, {form}', by_form[form])}", flush=True)
        draw(by_form, Path(folder) / f"{procedure}.svg")


if __name__ == "__main__":
    main()
