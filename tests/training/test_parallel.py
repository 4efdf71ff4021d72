"""Adapters, gradient checkpointing and several processes, for every solver."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
import torch
from enumerable import Enumerable
from jobs import job_in, problem
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from infalign.method.procedures import BestOfN
from infalign.models.pretrained import load_policy
from infalign.models.settings import Fit, Lora
from infalign.pipeline.pending import pending
from infalign.pipeline.records import records
from infalign.recipe.reading import load_recipe
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.theory.aims import tilted
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.on_policy_trainer import fit_on_policy
from infalign.training.solvers import read_solver

K = 16  # rollouts of a prompt

OFFLINE = {"qrpo": {"solver": "qrpo", "transform": "exp:10", "beta": 1.0}, "ipo": {"solver": "ipo", "beta": 0.3}}
ONLINE = {
    "rloo": {"solver": "rloo", "beta": 0.3},
    "ppo": {"solver": "ppo", "beta": 0.3},
    "bond": {"solver": "bond", "kl_budget": 5.0},
}
WAYS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "lora, checkpointing": {"lora": Lora(rank=4), "gradient_checkpointing": True},
}


def trained(name: str, way: str, case: Enumerable, folder: Path) -> dict[str, Any]:
    """Train a few steps of a solver and return the weights that it saved."""
    fit = Fit(batch_size=K, epochs=0.5, learning_rate=0.001, **WAYS[way])
    job, saved = job_in(folder), folder / "policy"
    torch.manual_seed(0)
    if name in OFFLINE:
        solver = read_solver(**OFFLINE[name], fit=fit)
        model, tokenizer = load_policy(case.folder)
        rows = case.rollouts(K)
        aimed = solver.aim(BestOfN(2)).law(np.array([row["reward"] for row in rows]).reshape(-1, K))
        loss = RolloutRegression(solver.objective(aimed))
        fit_to_rollouts(loss, model, rows, aimed, fit, job).save(tokenizer)
    else:
        solver = read_solver(**ONLINE[name], generations=4, fit=fit)
        start, ascent = problem(case), solver.ascent(tilted([[0.0, 1.0]], "raw", beta=0.1), BestOfN(2))
        fit_on_policy(replace(start, rows=start.rows[:30]), replace(ascent, beta=0.1), fit, job)
    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    assert not list(saved.glob("adapter_*"))
    return load_file(saved / "model.safetensors")


def moved(weights: dict[str, Any], start: Path) -> float:
    """Return by how much the weight that moved most did."""
    before = load_file(start / "model.safetensors")
    assert weights.keys() == before.keys()
    return max(float((weights[name] - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])  # of each kind of pass one
def test_gradient_checkpointing_changes_no_weight(name: str, case: Enumerable, tmp_path: Path) -> None:
    """A policy that is trained with it moves, and to where it moves without."""
    plain = trained(name, "plain", case, tmp_path / "plain")
    checkpointed = trained(name, "checkpointing", case, tmp_path / "checkpointed")
    assert moved(plain, case.folder) > 1e-3
    for weight, values in plain.items():
        torch.testing.assert_close(checkpointed[weight], values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qrpo", "rloo", "ppo"])
def test_an_adapter_is_trained_and_merged(name: str, case: Enumerable, tmp_path: Path) -> None:
    """With checkpointing too, what is saved is a whole model, and not the reference any more."""
    assert moved(trained(name, "lora, checkpointing", case, tmp_path), case.folder) > 1e-3


@pytest.mark.slow
def test_two_processes_train_the_policies_of_a_run(tmp_path: Path) -> None:
    """`infalign run --until train` under torchrun leaves whole models, and a run that goes on from there."""
    root, fit = tmp_path / "run", micro.FIT | {"batch_size": 24}
    one = {"reward": micro.GOLD, "judge": micro.GOLD, "report_to": []}
    policies = {name: {"solver": name, "beta": 0.5, "generations": 4, "fit": fit} for name in ("ppo", "maxk")}
    policies["adapter"] = policies["ppo"] | {"fit": fit | {"lora": {"rank": 2}, "device_batch_size": 6}}
    last = {"bf16": True, "epochs": 4, "learning_rate": 1e-2, "lora": {"rank": 2, "layers": 1}}
    policies["last"] = {"beta": 0.5, "fit": fit | last}
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(root) | one | {"policies": policies})
    recipe = load_recipe(path)
    whole_run.run_recipe(recipe, until="calibrate", console=Console(quiet=True))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "infalign", "run", path, "--until", "train"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    done = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("✓")]
    states = [f"states-below-1-{part}" for part in range(4)]
    assert sorted(done) == sorted([*(f"train-{name}" for name in policies), *states, "logprobs-below-1-bf16"])
    for name in ("ppo", "maxk", "adapter"):
        assert moved(load_file(root / "models" / name / "model.safetensors"), root / "models" / "reference") > 1e-5
    last = records(root)["train-last"]["summary"]  # on so few prompts it shows no gain, so the reference is kept
    assert (last["strength"], last["held_out_loss_end"] != last["held_out_loss_start"]) == (0.0, True)
    run = Run.of(recipe)
    assert not [name for name in pending(whole_run.units(run), run.layout.root) if name.startswith("train")]
