"""How much of what theory promises arrives, as rollouts, prompts and updates grow.

``python benchmarks/captured.py [RECIPE [key=value …]]`` (recipes/demo.yaml) trains the methods below at one nat for
each setting and prints, on training and on test prompts, the policy's KL, its win rate by the reward it was trained on,
its efficiency and its share of theory's gap (`infalign compare`). What is done is kept in RUN_DIR/captured.json.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from infalign.compare import compare_methods
from infalign.config import load_recipe

METHODS, BUDGET = ["qrpo", "qrpo-identity", "resample"], 1.0
USUAL = {"rollout.k": 64, "rollout.prompts": 256, "epochs": 1}
SETTINGS = [
    USUAL,
    *({**USUAL, "rollout.k": k} for k in (16, 256)),
    *({**USUAL, "rollout.prompts": prompts} for prompts in (64, 1024)),
    *({**USUAL, "epochs": epochs} for epochs in (2, 4)),
]


def main() -> None:
    """Train what is missing and print the table."""
    path, *overrides = sys.argv[1:] or ["recipes/demo.yaml"]
    overrides = ["run_dir=runs/captured", *overrides]
    kept = Path(load_recipe(path, overrides).run_dir) / "captured.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for setting in SETTINGS:
        name = ", ".join(f"{key.removeprefix('rollout.')} {value}" for key, value in setting.items())
        if name not in rows:
            rows[name] = captured(path, [*overrides, *_as_overrides(path, setting)])
            kept.write_text(json.dumps(rows, indent=1))
    columns = ("setting", "method", "prompts", "KL", "win rate, %", "efficiency", "share of the gap")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, methods in rows.items():
        for method, splits in methods.items():
            for split, found in splits.items():
                e, kl = found["win_rate"], f"{found['kl']:.2f}"
                rate = f"{100 * e['mean']:.1f} ({100 * e['low']:.1f}–{100 * e['high']:.1f})"
                placed = (_said(found[key]) for key in ("efficiency", "share"))
                print(f"| {' | '.join([name, method, split, kl, rate, *placed])} |")


def captured(path: str, overrides: list[str]) -> dict[str, dict[str, dict[str, object]]]:
    """Return what arrives of each method on each split."""
    recipe = load_recipe(path, overrides)
    results = compare_methods(recipe, methods=METHODS, budgets=[BUDGET], console=Console())
    return {policy["method"]: policy["captured"] for policy in results["policies"].values()}


def _as_overrides(path: str, setting: dict[str, int]) -> list[str]:
    offline = next(name for name, p in load_recipe(path).policies.items() if p.solver == "qrpo")
    return [f"{f'policies.{offline}.fit.epochs' if key == 'epochs' else key}={value}" for key, value in setting.items()]


def _said(e: dict[str, float] | None) -> str:
    return "–" if e is None else f"{e['mean']:.2f} ({e['low']:.2f} to {e['high']:.2f})"


if __name__ == "__main__":
    main()
