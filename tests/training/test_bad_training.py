"""What stops a training before it does harm: another model's rewards, a loss that is no number, too few rollouts."""

import shutil
from collections.abc import Callable
from functools import partial
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import micro
import pyarrow.parquet as pq
import pytest
from enumerable import Enumerable
from jobs import job_in
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from infalign.core.errors import DataError, InfalignError
from infalign.core.storage import write_table
from infalign.models.pretrained import load_policy, model_digest
from infalign.models.settings import Fit
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run
from infalign.steps.dry_run import print_plan
from infalign.steps.train import coarse_ranks
from infalign.training.common import run_training, trainer_config


def settings(root: Path) -> dict[str, Any]:
    """Return the recipe of a run with a trained reward model and one policy, in one process."""
    recipe = micro.settings(root) | {"judge": micro.GOLD, "report_to": []}
    recipe["policies"] = {"aware": recipe["policies"]["aware"]}
    del recipe["gold"]
    return recipe


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that has calibrated its rewards."""
    folder = tmp_path_factory.mktemp("calibrated")
    train(folder / "run", until="calibrate")
    return folder / "run"


@pytest.fixture
def root(calibrated: Path, tmp_path: Path) -> Path:
    """Return a copy of that run."""
    return Path(shutil.copytree(calibrated, tmp_path / "run"))


def train(root: Path, *, until: str = "train") -> None:
    """Go on with the run."""
    whole_run.run_recipe(recipe_of(root), until=until, console=Console(quiet=True))


def recipe_of(root: Path) -> Recipe:
    """Return the recipe of the run."""
    return load_recipe(micro.write(root.parent / "recipe.yaml", settings(root)))


@pytest.mark.parametrize("name", ["reward", "reference"])
def test_an_exchanged_model_is_noticed(name: str, root: Path) -> None:
    """A run takes no rewards of other weights; what it says to do helps."""
    weights = Layout(root).model(name) / "model.safetensors"
    others = {name: 2 * values for name, values in load_file(weights).items()}
    save_file(others, weights, {"format": "pt"})
    damaged = f"models/{name}/model.safetensors is damaged, so it is no longer what .* made; delete it and rerun"
    with pytest.raises(DataError, match=damaged):
        train(root)
    assert not Layout(root).model("aware").exists()
    weights.unlink()
    train(root)
    assert Layout(root).model("aware").is_dir()


def test_calibrated_rewards_of_unknown_origin_are_refused(root: Path) -> None:
    """A table that the run did not write has to be made again."""
    path = Layout(root).calibrated
    write_table(path, pq.read_table(path).slice(1))
    with pytest.raises(
        DataError, match=r"calibrated\.parquet has .* so it is no longer what calibrate made; delete it"
    ):
        train(root)
    path.unlink()
    train(root)


def test_a_digest_is_of_what_a_model_computes(root: Path, tmp_path: Path) -> None:
    """A copy elsewhere has the same digest, a changed tokenizer another; a hub id is its own."""
    folder = Layout(root).model("reference")
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (elsewhere / "README.md").write_text("A note changes nothing.\n")
    assert model_digest(str(elsewhere)) == model_digest(str(folder))
    tokenizer = elsewhere / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("0", "1", 1))
    assert model_digest(str(elsewhere)) != model_digest(str(folder))
    assert model_digest("owner/name") == "owner/name"


@pytest.mark.parametrize(("step", "stopped", "kept"), [(10, 10, None), (61, 62, 50), (75, 75, 50)])
def test_a_loss_that_is_no_number_stops_the_training(
    step: int, stopped: int, kept: int | None, case: Enumerable, tmp_path: Path
) -> None:
    """Of 100 steps every second is logged and every 25th saved; no checkpoint is written once the loss was NaN."""

    class NaNAt(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            return super().compute_loss(model, inputs) * (nan if self.state.global_step + 1 == step else 1.0)

    model, _ = load_policy(case.folder)
    rows = [{"input_ids": ids, "labels": ids} for ids in case.prompt_ids[:1]] * 100
    fit, job = Fit(batch_size=1, learning_rate=1e-4), job_in(tmp_path)
    trainer = NaNAt(model=model, args=trainer_config(TrainingArguments, fit, job), train_dataset=rows)
    said = f"the checkpoint of step {kept} is kept" if kept else "no step was saved"
    with pytest.raises(InfalignError, match=f"at step {stopped} .* nan; {said}; lower fit.learning_rate"):
        run_training(trainer, job)
    checkpoints = list(job.folder.glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ([f"checkpoint-{kept}"] if kept else [])
    for path in checkpoints:
        assert all(bool(values.isfinite().all()) for values in load_file(path / "model.safetensors").values())
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["policies.aware: with 16 rollouts per prompt, exp:10 at 1 nats gains 3.8 ± 0.1 points less of"]),
        ({"rollout.k": 100}, []),
        ({"procedure": "rewind:0.75:4"}, []),
        ({"policies.aware.kl_budget": 4}, ["policies.aware: 16 rollouts cannot spend a KL of 4.0 nats"]),
        ({"policies.aware.transform": "identity"}, []),
        ({"policies.aware": "{solver: maxk, kl_budget: 1}"}, []),
        ({"policies.aware": "{transform: raw, kl_budget: 1}"}, []),
    ],
)
def test_too_few_rollouts_are_said_before_they_are_drawn(changes: Any, said: list[str], tmp_path: Path) -> None:
    """A policy that loses more than two points to coarse ranks has a warning, where theory knows; others have none."""
    rollout = {"prompts": 12, "k": 16, "max_new_tokens": 12}
    path = micro.write(tmp_path / "recipe.yaml", settings(tmp_path) | {"rollout": rollout})
    recipe = load_recipe(path, [f"{key}={value}" for key, value in changes.items()])
    warnings = [warning for name in recipe.policies for warning in coarse_ranks(recipe, name)]
    assert len(warnings) == len(said)
    assert all(warning.startswith(start) for warning, start in zip(warnings, said, strict=True))
    assert all("raise rollout.k" in warning for warning in warnings)


def times_said(text: str, work: Callable[[Console], object]) -> int:
    """Return how often what is printed has the text."""
    console = Console(file=StringIO(), width=80)
    work(console)
    return console.file.getvalue().count(text)


def test_plan_and_run_print_the_warning_once(root: Path) -> None:
    """Six rollouts per prompt cost exp:10 eight points; a run says so before it trains, and not when it has trained."""
    recipe, said = recipe_of(root), "! policies.aware: with 6 rollouts per prompt, exp:10 at"
    run = partial(whole_run.run_recipe, recipe, until="train")
    prints = [partial(print_plan, recipe), *[lambda console: run(console=console)] * 2]
    assert [times_said(said, work) for work in prints] == [1, 1, 0]


def test_a_machine_without_bfloat16_is_told_to_be_slow(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by plan and run, for models that compute in it and trainings that do; the run works."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    recipe, said = recipe_of(root), "! this machine emulates bfloat16"
    half = recipe.model_copy(update={"compute": recipe.compute.model_copy(update={"dtype": "bfloat16"})})
    aware = recipe.policies["aware"]
    mixed = aware.model_copy(update={"fit": aware.fit.model_copy(update={"bf16": True})})
    mixed = recipe.model_copy(update={"policies": {"aware": mixed}})
    assert [len(found.machine_warnings()) for found in (recipe, half, mixed)] == [0, 1, 1]
    assert times_said(said, partial(print_plan, half)) == 1
    runs = [partial(whole_run.run_recipe, asked, until="rollout") for asked in (recipe, half, half)]
    assert [times_said(said, lambda console, run=run: run(console=console)) for run in runs] == [0, 1, 0]
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": True, "avx512_bf16": True})
    assert half.machine_warnings() == []
