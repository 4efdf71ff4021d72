"""All methods as guides and as plain language models, in the world of a recipe.

``python benchmarks/forms.py RECIPE FOLDER [PROCEDURE …] [SEED …] [key=value …]``, by default the recipe's procedure and
seeds 0, 1, 2: the recipe's data, models and rollouts are made once a seed; in a copy of its run directory for each form
the methods are trained at the KL budget of its first policy, which has a guide, for one procedure after the other: what
does not depend on it is trained once. A plain policy is trained at the learning rate of the recipe's student, by the
solver's own loss. A guide is scaled to its budget; a plain policy spends what it spends, so methods get further budgets
until each has policies on both sides of the median KL, as in `infalign compare`. Prints a row a method with the mean
over seeds and its 95 % interval (Student's t over seeds, each of which has its own test prompts): the served win rate
by each judge at the KL that all methods of the comparison reach, by how many points qrpo is ahead of it there, paired
by seed, and of its policy nearest to that KL its own KL and share of theory's gap. What is done is not repeated. The
demo takes an hour or two a seed on two cores.
"""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from seeded import interval, seeds_and_settings

from infalign.experiments.compare import ROUNDS, measured_comparison, train_methods
from infalign.experiments.methods import METHODS
from infalign.runs.reading import load_recipe
from infalign.training.solvers.distil import Settings as Distil

OFFLINE = ["qrpo", "qrpo-identity", "qrpo-raw", "qrpo-raw-prompt", "resample", "ipo", "bon-sft", "bonbon"]
ON_POLICY = ["rloo", "rloo-raw", "grpo", "grpo-raw", "maxk"]
FORMS = {"guide": (OFFLINE, 0), "plain": ([*OFFLINE, *ON_POLICY], ROUNDS)}
OURS = "qrpo"


def changes(name: str, form: str) -> list[str]:
    """Return the settings of a form: those of the recipe, for a guide, or the same without one."""
    policies = load_recipe(name).policies
    if form == "guide":
        return []
    first, student = next(iter(policies)), next(policy for policy in policies.values() if isinstance(policy, Distil))
    own = {"guide": "null", "loss": "logistic", "reader": "null", "fit.learning_rate": student.fit.learning_rate}
    return [f"policies.{first}.{key}={value}" for key, value in own.items()]


def base_run(name: str, folder: Path, seed: str, settings: list[str]) -> Path:
    """Return the directory with a seed's data, models and calibrated rollouts, made if it is not there."""
    base = folder / f"seed-{seed}" / "base"
    command = [sys.executable, "-m", "infalign", "calibrate", name]
    subprocess.run(
        [*command, *(word for change in (f"run_dir={base}", *settings) for word in ("--set", change))], check=True
    )
    return base


def comparison(name: str, folder: Path, seed: str, procedure: str, form: str, overrides: list[str]) -> dict[str, Any]:
    """Return the numbers of a comparison, from its file if it is done."""
    of_seed, settings = folder / f"seed-{seed}", [f"seed={seed}", *overrides]
    run_dir, found = of_seed / form, of_seed / f"{procedure}-{form}.json"
    if not found.exists():
        base, (methods, rounds) = base_run(name, folder, seed, settings), FORMS[form]
        if not run_dir.exists():
            shutil.copytree(base, run_dir)
        recipe = load_recipe(name, [f"run_dir={run_dir}", f"procedure={procedure}", *settings, *changes(name, form)])
        budget = next(policy.budget for policy in recipe.policies.values() if policy.budget is not None)
        compared = train_methods(recipe, methods, [budget], rounds=rounds, splits=["test"], console=Console())
        found.write_text(json.dumps(measured_comparison(compared, ["test"])))
    return dict(json.loads(found.read_text()))


def numbers(results: dict[str, Any], method: str) -> dict[str, float]:
    """Return the numbers of a method; win rates are NaN where it spent a KL too far from the others'."""
    common, own = results["matched"][-1], [p for p in results["policies"].values() if p["method"] == method]
    policy = min(own, key=lambda policy: abs(policy["kl"]["mean"] - (common["kl"] or 0.0)))
    share = policy["captured"]["test"]["share"]
    row = {"KL": policy["kl"]["mean"]}
    for judge, wins in common["win_rates"].items():
        own, ours = (100 * wins[results["procedure"]].get(m, {"mean": np.nan})["mean"] for m in (method, OURS))
        row |= {judge: own, f"{OURS} is ahead by {judge}": ours - own}
    return row | {"share": np.nan if share is None else share["mean"]}


def main() -> None:
    """Do what is missing and print a table for each procedure and form."""
    name, folder, *words = sys.argv[1:]
    procedures = [word for word in words if word.startswith(("best-of-", "worst-of-"))] or [
        load_recipe(name).procedure.name
    ]
    seeds, overrides = seeds_and_settings([word for word in words if word not in procedures])
    for form, (methods, *_) in FORMS.items():
        for procedure in procedures:
            rows = defaultdict(list)
            for seed in seeds:
                results = comparison(name, Path(folder), seed, procedure, form, overrides)
                for method in methods:
                    rows[method].append(numbers(results, method))
            columns = list(rows[methods[0]][0])
            print(f"\n{procedure}, {form}\n\n| method | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
            for method, found in rows.items():
                said = (interval([row[column] for row in found]) for column in columns)
                print(f"| {method}{'*' if METHODS[method].ours else ''} | {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    main()
