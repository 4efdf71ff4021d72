"""How much of what theory promises arrives, with fewer rollouts, fewer prompts and more passes over them.

``python benchmarks/captured.py [RECIPE [key=value …]]`` (hh-helpful-tiny) trains exp:±10 and identity by
`qrpo` at one nat under each of the changes below to the recipe, and prints, on training and on test prompts, the
policy's KL, its win rate by the reward it was trained on, its efficiency and its share of theory's gap (`infalign
compare`). What is done is kept in RUN_DIR/captured.json. Roughly an hour on two cores.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from infalign.experiments.compare import compare_methods
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe

METHODS, BUDGET = ["qrpo", "qrpo-identity"], 1.0
WHOLE = ["fit.lora=null", "fit.learning_rate=0.0001"]  # instead of an adapter


def changes(recipe: Recipe) -> dict[str, list[str]]:
    """Return what is changed in the recipe, by how it is called; ``fit`` is that of the offline policies."""
    k, prompts = recipe.rollout.k, recipe.rollout.prompts
    return {
        f"{prompts} prompts × {k}": [],
        f"K = {k // 4}": [f"rollout.k={k // 4}"],
        f"{prompts // 4} prompts": [f"rollout.prompts={prompts // 4}"],
        f"{prompts // 4} prompts, 4 epochs": [f"rollout.prompts={prompts // 4}", "fit.epochs=4"],
        "whole network": WHOLE,
    }


def main() -> None:
    """Train what is missing and print the table."""
    path, *overrides = sys.argv[1:] or ["hh-helpful-tiny"]
    overrides = ["run_dir=runs/captured", "evaluate.prompts=48", *overrides]
    recipe = load_recipe(path, overrides)
    offline = next(name for name, policy in recipe.policies.items() if policy.solver == "qrpo")
    kept = Path(recipe.run_dir) / "captured.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for name, changed in changes(recipe).items():
        if name not in rows:
            changed = [f"policies.{offline}.{change}" if change.startswith("fit.") else change for change in changed]
            rows[name] = captured(load_recipe(path, [*overrides, *changed]))
            kept.write_text(json.dumps(rows, indent=1))
    columns = ("changed", "method", "prompts", "KL", "win rate, %", "efficiency", "share of the gap")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, methods in rows.items():
        for method, splits in methods.items():
            for split, found in splits.items():
                e, kl = found["win_rate"], f"{found['kl']:.2f}"
                rate = f"{100 * e['mean']:.1f} ({100 * e['low']:.1f}–{100 * e['high']:.1f})"
                placed = (_said(found[key]) for key in ("efficiency", "share"))
                print(f"| {' | '.join([name, method, split, kl, rate, *placed])} |")


def captured(recipe: Recipe) -> dict[str, dict[str, dict[str, object]]]:
    """Return what arrives of each method on each split."""
    results = compare_methods(recipe, methods=METHODS, budgets=[BUDGET], console=Console())
    return {policy["method"]: policy["captured"] for policy in results["policies"].values()}


def _said(e: dict[str, float] | None) -> str:
    return "–" if e is None else f"{e['mean']:.2f} ({e['low']:.2f} to {e['high']:.2f})"


if __name__ == "__main__":
    main()
