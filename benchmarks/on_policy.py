"""What a win costs on-policy and by a guide: ``python benchmarks/on_policy.py FOLDER [SEED …] [key=value …]``.

In the recipe `preferences`, by default seeds 0, 1 and 2, 480 prompts: TRL's GRPO (three passes, groups of 8) on the raw
reward and on the aware transformation, and a guide on few stored rollouts, 8 a prompt, scaled to the KL budget; methods
get further budgets until each has policies on both sides of the median KL. Prints for each method the mean over seeds
with Student's 95 % interval: by how many points of Best-of-4 the guide is ahead at one KL, by each judge; tokens drawn
and seconds of one core, and what share of them the guide takes. The guide pays for its rollouts, their scores and its
training; GRPO for one training, that of the policy nearest to this KL, and not for the rollouts that its ranks need.
What is done is not repeated. A quarter of an hour a seed on two cores.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from method_policies import MethodPolicies
from run_files import drawn, records
from seeds import AtOneKL, Seed, mean_over_seeds, read_words, recipe_of_seed
from train_methods import train_methods

FEW = ["rollout.k=8", "policies.aware.fit.batch_size=32", "policies.aware.fit.epochs=2"]
GUIDE, METHODS = "qrpo", ["qrpo", "grpo", "grpo-raw"]


def trained(folder: Path, seed: str, changes: list[str]) -> Seed:
    """Return a seed with all methods, trained and evaluated where they are not yet."""
    recipe = recipe_of_seed("preferences", folder, seed, [*FEW, *changes])
    budget = next(kl for policy in recipe.policies.values() if (kl := policy.budget) is not None)
    policies = train_methods(MethodPolicies(recipe, METHODS, [budget]))
    return Seed(policies.recipe, policies)


def row(seed: Seed, method: str) -> dict[str, float]:
    """Return a method's numbers; a win rate is NaN where it spent a KL too far from the others'."""
    kls, procedure = {name: seed.kl(name) for name in seed.recipe.policies}, seed.recipe.procedure
    common = AtOneKL.of(seed.by_method, kls, seed.law_at)
    wins = {name: seed.evaluated.wins(name, [procedure]) for name in kls}
    price = {name: _price(seed, name, common.kl or 0.0) for name in (method, GUIDE)}
    found = {"KL of the nearest policy": price[method]["kl"]}
    for judge in seed.evaluated.sources:
        won = common.matched({name: wins[name][judge][procedure.name] for name in kls}, procedure)
        own, guide = (100 * won[name].values.mean() if name in won else np.nan for name in (method, GUIDE))
        found |= {f"% by {judge}": own, f"guide ahead by {judge}": guide - own}
    for what in ("tokens", "seconds"):
        found |= {what: price[method][what], f"{what}, guide's share": price[GUIDE][what] / price[method][what]}
    return found


def _price(seed: Seed, method: str, kl: float) -> dict[str, float]:
    """Return what the policy of a method nearest to a KL took."""
    made = records(seed.root)
    name = min(seed.by_method[method], key=lambda name: abs(float(seed.kl(name).mean()) - kl))
    record = made[f"train-{name}"]
    found = {"kl": float(seed.kl(name).mean()), "seconds": record["seconds"]}
    found["tokens"] = _generated_tokens(record["summary"]["history"], seed.recipe.policies[name])
    if method == GUIDE:
        parts = (seed.root / "rollouts").glob("part-*")
        found["tokens"] += sum(len(ids) for part in parts for ids in drawn(part, "token_ids").values())
        found["seconds"] += sum(made[unit]["seconds"] for unit in made if unit.startswith(("rollout-", "score-")))
        found["seconds"] += made["calibrate"]["seconds"]
    return found


def _generated_tokens(history: Sequence[dict[str, float]], policy: Any) -> float:
    """Return the tokens that a training drew; TRL logs the mean length since the previous row."""
    rows = [row for row in history if "completions/mean_length" in row]
    if not policy.draws_per_response:
        return 0.0
    steps = np.diff([0, *(row["step"] for row in rows)])
    length = np.average([row["completions/mean_length"] for row in rows], weights=steps)
    return float(length * policy.fit.batch_size * history[-1]["step"] * policy.draws_per_response)


def main() -> None:
    """Do what is missing and print a row for each method."""
    folder, *words = sys.argv[1:]
    seeds, changes = read_words(words)
    rows = defaultdict[str, list[dict[str, float]]](list)
    for number in seeds:
        seed = trained(Path(folder), number, changes)
        for method in METHODS:
            rows[method].append(row(seed, method))
    columns = list(rows[GUIDE][0])
    print(f"| method | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for method, found in rows.items():
        print(f"| {method} | {' | '.join(mean_over_seeds([one[column] for one in found]) for column in columns)} |")


if __name__ == "__main__":
    main()
