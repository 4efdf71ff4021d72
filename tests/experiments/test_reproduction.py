"""Figures and claims of the paper, repeated from two tiny seeds."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from rich.console import Console

from infalign.experiments.paper import FIGURES
from infalign.experiments.reproduction import Reproduction, print_plan, read_figures, reproduce
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.runs.reading import load_recipe
from infalign.runs.recipe import Recipe
from infalign.training.common import save_model

METHODS = ("qrpo", "qrpo-identity", "qrpo-for-2", "best-of-n")  # of those that the figures compare
SEEDS = (0, 1)


def recipe(root: Path) -> Recipe:
    """Return a recipe that trains no model but policies, and whose judge is not the reward."""
    scratch = Scratch.model_validate(micro.SCRATCH)
    if not (root / "policy").is_dir():
        root.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(["one two three"], scratch)
        save_model(new_policy(scratch, tokenizer, seed=0), tokenizer, root / "policy")
    settings = micro.given(root / "run", str(root / "policy"))
    settings |= {"reward": {"function": "micro:brightness"}, "procedure": "best-of-2", "gold": None}
    settings["policies"]["aware"]["fit"] = micro.FIT | {"epochs": 4, "learning_rate": 1e-2}
    return load_recipe(micro.write(root / "recipe.yaml", settings), ["compute.processes=1"])


def asked(root: Path) -> Reproduction:
    """Return all figures, of which those that compare methods compare `METHODS` only."""
    figures = [replace(one, methods=tuple(m for m in one.methods if m in METHODS)) for one in FIGURES]
    figures = [one for one in figures if one.numbers != (2, 11)]
    return Reproduction(figures, root / "output", recipe(root), SEEDS, [0.2])


def done(root: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the verdicts and what was done for them."""
    console = Console(file=io.StringIO(), width=200)
    found = reproduce(asked(root), console)
    return found, console.file.getvalue().splitlines()


if __name__ == "__main__":
    import sys
    root = Path(sys.argv[1])
    found, lines = done(root)
    print("\n".join(lines))
