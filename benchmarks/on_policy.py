"""What a win costs on-policy and by a guide: ``python benchmarks/on_policy.py FOLDER [SEED …] [key=value …]``.

In the recipe `preferences`, by default seeds 0, 1 and 2, 480 prompts: TRL's GRPO (three passes, groups of 8) on the raw
reward and on the aware transformation, and a guide on few stored rollouts, 8 a prompt, scaled to the KL budget; methods
get further budgets until each has policies on both sides of the median KL. Prints for each method the mean over seeds
with Student's 95 % interval: by how many points of Best-of-4 the guide is ahead at one KL, by each judge; tokens drawn
and seconds of one core, and what share of them the guide takes. The guide pays for its rollouts, their scores and its
training; GRPO for one training, that of the policy nearest to this KL, and not for the rollouts that its ranks need.
What is done is not repeated. A quarter of an hour a seed on two cores.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from seeds import mean_over_seeds, read_words, recipe_of_seed

from infalign.compare.comparison import Comparison, train_methods
from infalign.compare.policies import MethodPolicies

FEW = ["rollout.k=8", "policies.aware.fit.batch_size=32", "policies.aware.fit.epochs=2"]
GUIDE, METHODS = "qrpo", ["qrpo", "grpo", "grpo-raw"]


def comparison(folder: Path, seed: str, changes: list[str]) -> dict[str, Any]:
    """Return the numbers of a comparison, from its file if it is done."""
    found = folder / f"seed-{seed}.json"
    if not found.exists():
        recipe = recipe_of_seed("preferences", folder, seed, [*FEW, *changes])
        budget = next(kl for policy in recipe.policies.values() if (kl := policy.theory.kl_budget) is not None)
        policies = train_methods(MethodPolicies(recipe, METHODS, [budget]), console=Console())
        found.write_text(json.dumps(Comparison(policies).measure()))
    return dict(json.loads(found.read_text()))


def row(results: dict[str, Any], method: str) -> dict[str, float]:
    """Return a method's numbers; a win rate is NaN where it spent a KL too far from the others'."""
    common = results["matched"][-1]
    price = {name: _price(results, name, common["kl"] or 0.0) for name in (method, GUIDE)}
    found = {"KL of the nearest policy": price[method]["kl"]}
    for judge, wins in common["win_rates"].items():
        served = wins[results["procedure"]]
        own, guide = (100 * served.get(name, {"mean": np.nan})["mean"] for name in (method, GUIDE))
        found |= {f"% by {judge}": own, f"guide ahead by {judge}": guide - own}
    for what in ("tokens", "seconds"):
        found |= {what: price[method][what], f"{what}, guide's share": price[GUIDE][what] / price[method][what]}
    return found


def _price(results: dict[str, Any], method: str, kl: float) -> dict[str, float]:
    """Return what the policy of a method nearest to a KL took."""
    own = [policy for policy in results["policies"].values() if policy["method"] == method]
    policy = min(own, key=lambda policy: abs(policy["kl"]["mean"] - kl))
    found = {"kl": policy["kl"]["mean"], "tokens": policy["cost"]["generated_tokens"]}
    found["seconds"] = policy["cost"]["seconds"]
    if method == GUIDE:
        found["tokens"] += results["shared_cost"]["generated_tokens"]
        found["seconds"] += results["shared_cost"]["seconds"]
    return found


def main() -> None:
    """Do what is missing and print a row for each method."""
    folder, *words = sys.argv[1:]
    seeds, changes = read_words(words)
    rows = defaultdict[str, list[dict[str, float]]](list)
    for seed in seeds:
        results = comparison(Path(folder), seed, changes)
        for method in METHODS:
            rows[method].append(row(results, method))
    columns = list(rows[GUIDE][0])
    print(f"| method | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for method, found in rows.items():
        print(f"| {method} | {' | '.join(mean_over_seeds([one[column] for one in found]) for column in columns)} |")


if __name__ == "__main__":
    main()
