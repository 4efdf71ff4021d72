"""A run small enough for tests: a few rows of the built-in world and models of a few thousand parameters."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

COMMAND = Path(sys.executable).with_name("infalign")
SCRATCH = {"vocabulary": 300, "hidden": 16, "layers": 1, "heads": 2, "context": 192}
FIT = {"batch_size": 32, "max_length": 192}
GOLD = {"function": "infalign.world:gold"}


def settings(root: Path) -> dict[str, Any]:
    """Return the recipe of a whole run with every stage and both solvers, as `load_recipe` reads it."""
    return {
        "run_dir": str(root),
        "data": {"sources": [{"world": 200}], "max_prompt_tokens": 180},
        "policy": {"scratch": SCRATCH, "fit": FIT},
        "reward": {"fit": FIT},
        "judge": {"scratch": SCRATCH, "fit": FIT},
        "gold": GOLD,
        "rollout": {"prompts": 12, "k": 6, "max_new_tokens": 12},
        "policies": {
            "aware": {"transform": "exp:10", "kl_budget": 1.0, "fit": FIT},
            "plain": {"kl_budget": 1.0, "fit": FIT},
            "online": {"kl_budget": 0.5, "solver": "rloo", "generations": 4, "fit": FIT | {"batch_size": 24}},
        },
        "evaluate": {"prompts": 6, "samples": 8, "max_n": 4, "rewind": "rewind:0.75:4"},
        "compute": {"device": "cpu", "processes": 2, "threads": 1},
    }


def given(root: Path, policy: str) -> dict[str, Any]:
    """Return the recipe of a run that trains no model but one policy, all in one process; gold is the only reward."""
    changes = {"policy": {"model": policy}, "reward": GOLD, "judge": GOLD, "compute": {"device": "cpu", "threads": 1}}
    recipe = settings(root) | changes
    recipe["policies"] = {"aware": recipe["policies"]["aware"]}
    return recipe


def write(path: Path, recipe: Mapping[str, Any]) -> str:
    """Write a recipe and return its path."""
    path.write_text(yaml.safe_dump(dict(recipe)), encoding="utf-8")
    return str(path)


def nan_reward(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return NaN for the third response of a batch."""
    return [float("nan") if i == 2 else 0.0 for i in range(len(responses))]


def infalign(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the installed command to its end."""
    return subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
