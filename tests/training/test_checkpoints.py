"""Trainings that are interrupted: what is resumed, what is not, and that the end is that of an undisturbed training."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enumerable import PROMPTS, Enumerable
from jobs import job_in, quiet
from rows import user
from safetensors.torch import load_file

from infalign.core.errors import StoppedError
from infalign.core.progress import OnProgress
from infalign.data.examples import Example
from infalign.data.messages import reply
from infalign.method.procedures import BestOfN, Standard
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Lora, Scratch
from infalign.theory.aims import tilted
from infalign.training.checkpoints import find_complete_checkpoint
from infalign.training.common import save_model, training_order
from infalign.training.offline_trainer import Distillation, RolloutRegression, fit_to_rollouts
from infalign.training.on_policy_trainer import Problem, fit_on_policy
from infalign.training.output_folder import Job
from infalign.training.solvers import read_solver
from infalign.training.solvers.qrpo import qrpo, squared
from infalign.training.strength import choose_strength
from infalign.training.supervised import demonstrations, fine_tune, fit_reward_model

SCRATCH = Scratch(vocabulary=300, hidden=16, layers=1, context=64)
WORDS = ("one", "two two", "three three three", "four", "five five", "six", "seven seven", "eight")
TWICE = Fit(epochs=2, batch_size=2, learning_rate=1e-2, max_length=64)  # eight steps on eight rows
OFFLINE = ("qrpo", "guided", "distil")
Training = Callable[[Path, OnProgress], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny Llama with a chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "reference"
    tokenizer = train_tokenizer(WORDS, SCRATCH)
    save_model(new_policy(SCRATCH, tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.fixture
def training(request: pytest.FixtureRequest, case: Enumerable, tiny: Path) -> Training:
    """Return the training of the kind that a test names: into a folder, with a report."""
    name: str = request.param

    def job(folder: Path, report: OnProgress) -> Job:
        torch.manual_seed(0)  # heads and adapters are drawn before a trainer sets the seed
        return job_in(folder, report)

    def supervised(folder: Path, report: OnProgress) -> list[dict[str, Any]]:
        fit = TWICE.model_copy(update={"lora": Lora(rank=2)}) if name == "sft, lora" else TWICE
        model, tokenizer = load_policy(tiny)
        rows = demonstrations(tokenizer, [Example((user(word),), (reply(word),), None, "") for word in WORDS])
        return fine_tune(model, tokenizer, rows, fit, job(folder, report))

    def reward(folder: Path, report: OnProgress) -> list[dict[str, Any]]:
        pairs = [([user(word)], [reply(word)], [reply("no")]) for word in WORDS]
        _, tokenizer = load_policy(tiny)
        return fit_reward_model(str(tiny), tokenizer, pairs, pairs[:3], TWICE, job(folder, report))

    def offline(folder: Path, report: OnProgress) -> list[dict[str, Any]]:
        fit = Fit(epochs=2, batch_size=216, learning_rate=3e-3)  # eight steps on 27 prompts × 32
        solver, rows, law = qrpo(), case.rollouts(32), case.law(32, "identity", 0.3)
        model, tokenizer = load_policy(case.folder)
        guided = add_network_guide(case.folder, *load_policy(case.folder))
        torch.nn.init.constant_(guided.guide.head.linear.bias, 0.1)
        loss = Distillation(guided, solver) if name == "distil" else RolloutRegression(solver)
        fitted = fit_to_rollouts(loss, guided if name == "guided" else model, rows, law, fit, job(folder, report))
        if name == "guided":
            choose_strength(fitted, model, rows, law, Standard())
        return fitted.save(tokenizer)

    def online(folder: Path, report: OnProgress) -> list[dict[str, Any]]:
        fit = Fit(epochs=2, batch_size=8, device_batch_size=4, learning_rate=1e-2)  # eight steps of two prompts
        rows = [{"prompt": PROMPTS[i % 3], "reference_rewards": [1.0, 2.0, 3.0 + i]} for i in range(8)]
        strength = {"kl_budget": 99.0} if name == "bond" else {"beta": 0.1}
        solver = read_solver(solver=name, generations=4, fit=fit, **strength)
        _, tokenizer = load_policy(case.folder)
        tokenizer.padding_side = "left"
        parts = str(case.folder), tokenizer, rows, lambda prompts, responses: [float(len(text)) for text in responses]
        ascent = replace(solver.ascent(tilted([[0.0, 1.0]], "identity", beta=0.1), BestOfN(4)), beta=0.1)
        return fit_on_policy(Problem(*parts, max_new_tokens=2), ascent, fit, job(folder, report))

    kinds = {"sft": supervised, "sft, lora": supervised, "reward model": reward}
    return kinds.get(name, offline if name in OFFLINE else online)


def weights(folder: Path) -> dict[str, Any]:
    """Return the weights that were saved."""
    return load_file(folder / "policy" / "model.safetensors")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that no weight differs."""
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-6, rtol=0)


def interrupted(training: Training, folder: Path, step: int) -> None:
    """Train until after a step, before anything of it is saved."""

    def stop(done: int, total: int, note: str) -> None:
        if done == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        training(folder, stop)


KINDS = ["sft", "reward model", *OFFLINE, "ppo"]
SLOW_KINDS = [pytest.param(name, marks=pytest.mark.slow) for name in ("sft, lora", "bond")]


@pytest.mark.parametrize("training", KINDS + SLOW_KINDS, indirect=True)
def test_a_training_resumed_in_its_second_epoch_ends_as_an_undisturbed_one(training: Training, tmp_path: Path) -> None:
    """Stopped in the seventh of eight steps and resumed from the sixth, it has the same weights, log and order."""
    whole = training(tmp_path / "undisturbed", quiet)
    interrupted(training, tmp_path / "resumed", 7)
    history = training(tmp_path / "resumed", quiet)
    assert history[-1]["resumed"] in ("resumed from checkpoint-6", "resumed from checkpoint-5")
    assert [row["step"] for row in history] == [row["step"] for row in whole]
    assert_same(weights(tmp_path / "resumed"), weights(tmp_path / "undisturbed"))


@pytest.mark.parametrize("training", ["ppo"], indirect=True)
def test_a_checkpoint_that_misses_anything_is_skipped_and_said(training: Training, tmp_path: Path) -> None:
    """With any of its files deleted, cut or changed it is removed, with a reason, and the one before it is taken."""
    folder = tmp_path / "checkpoints"
    interrupted(training, tmp_path, 4)
    shutil.copytree(folder / "checkpoint-2", tmp_path / "before")
    interrupted(training, tmp_path, 5)
    assert list(folder.glob("checkpoint-*")) == [folder / "checkpoint-4"]
    (tmp_path / "before").rename(folder / "checkpoint-2")
    names = {path.name for path in (folder / "checkpoint-4").iterdir()}
    needed = {"model.safetensors", "companion.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert needed | {"trainer_state.json", "complete.json"} <= names
    tears: dict[str, Callable[[Path], object]] = {
        "is missing": Path.unlink,
        "bytes": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "is damaged": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    }
    for name in names:
        for said, tear in tears.items():
            copy = shutil.copytree(folder, tmp_path / "copy")
            tear(copy / "checkpoint-4" / name)
            found, torn = find_complete_checkpoint(copy)
            assert found == copy / "checkpoint-2"
            assert len(torn) == 1
            assert torn[0].startswith(f"checkpoint-4: {name} ")
            assert said in torn[0] or name == "complete.json"
            assert list(copy.glob("checkpoint-*")) == [found]
            shutil.rmtree(copy)
    assert find_complete_checkpoint(folder) == (folder / "checkpoint-4", [])


@pytest.mark.parametrize("training", ["rloo"], indirect=True)
@pytest.mark.parametrize("lost", ["complete.json", pytest.param("optimizer.pt", marks=pytest.mark.slow)])
def test_a_torn_checkpoint_costs_time_and_nothing_else(lost: str, training: Training, tmp_path: Path) -> None:
    """Killed while a checkpoint was written, or before its seal, a training starts anew, says so and ends the same."""
    training(tmp_path / "undisturbed", quiet)
    interrupted(training, tmp_path / "torn", 3)
    (tmp_path / "torn" / "checkpoints" / "checkpoint-2" / lost).unlink()
    notes: list[str] = []
    history = training(tmp_path / "torn", lambda done, total, note: notes.append(note))
    said = f"restarted from the beginning; skipped checkpoint-2: {lost} is missing"
    assert history[-1]["resumed"] == said
    assert all(note.endswith(said) for note in notes)
    assert_same(weights(tmp_path / "torn"), weights(tmp_path / "undisturbed"))


def test_every_pass_has_every_row_once() -> None:
    """Two and a half passes over ten rows are two permutations and a half, all different, and the same for a seed."""
    order = training_order([1] * 10, 2.5, 4, seed=3)
    passes = [order[:10], order[10:20], order[20:]]
    assert [sorted(rows) for rows in passes[:2]] == [list(range(10))] * 2
    assert len(set(passes[2])) == len(passes[2]) == 5
    assert passes[0] != passes[1]
    assert order == training_order([1] * 10, 2.5, 4, seed=3) != training_order([1] * 10, 2.5, 4, seed=4)


@pytest.mark.parametrize(("longer", "mixed"), [(40, range(5)), (9, range(60, 101))])
def test_only_rows_of_like_length_come_together(longer: int, mixed: range) -> None:
    """Of a hundred batches four at most hold short and long rows; if they differ by a few tokens, most hold both."""
    order = training_order([1, longer] * 200, 1, 4, seed=0)
    assert sum(len({i % 2 for i in order[start : start + 4]}) > 1 for start in range(0, 400, 4)) in mixed


def test_a_training_makes_one_step_at_least() -> None:
    """A hundredth of a pass is a whole batch, where there are rows for one."""
    assert [len(training_order([1] * n, 0.01, 8, seed=0)) for n in (3, 50)] == [3, 8]


def test_a_fit_keeps_its_last_weights(case: Enumerable, tmp_path: Path) -> None:
    """Also where the held-out loss was lower before: by steps far too large it goes from 1 over 256 to 679."""
    fit, job = Fit(epochs=5, batch_size=216, learning_rate=0.3), job_in(tmp_path, seed=1)
    loss, (model, tokenizer) = RolloutRegression(qrpo(squared)), load_policy(case.folder)
    history = fit_to_rollouts(loss, model, case.rollouts(16), case.law(16, "identity", 0.3), fit, job).save(tokenizer)
    *before, last = (row["eval_loss"] for row in history if "eval_loss" in row)
    assert min(before) < last
    assert_same(weights(tmp_path), load_file(job.folder / "checkpoint-10" / "model.safetensors"))
