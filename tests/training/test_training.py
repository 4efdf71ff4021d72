"""Solvers and the TRL drop-in on real, tiny models."""

import re
from pathlib import Path
from typing import Any

import enumerable
import numpy as np
import pytest
from datasets import Dataset
from scipy.special import logsumexp
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from infalign.core.storage import read_table
from infalign.method.calibration import calibrate
from infalign.method.procedures import Standard
from infalign.method.transforms import Exponential, Identity, parse_transform
from infalign.models.pretrained import load_policy
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Scratch
from infalign.theory.law import aligned_law, law_at_kl
from infalign.training.common import save_model
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.on_policy_trainer import Problem, on_policy_trainer
from infalign.training.solvers import read_solver
from infalign.training.solvers.qrpo import qrpo, regression_targets
from infalign.world import gold

SCRATCH = Scratch(vocabulary=300, hidden=32, layers=2, heads=2, context=64)
PROMPTS = [f"say {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run directory's models and calibrated prompts, tiny and random."""
    root = tmp_path_factory.mktemp("demo")
    tokenizer = train_tokenizer([*PROMPTS, "yes no maybe"], SCRATCH)
    save_model(new_policy(SCRATCH, tokenizer, seed=0), tokenizer, root / "models" / "reference")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    save_model(LlamaForSequenceClassification(config), tokenizer, root / "models" / "reward")
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt_id": text,
            "prompt": [{"role": "user", "content": text}],
            "reference_rewards": np.sort(rng.normal(scale=0.1, size=16)).tolist(),
        }
        for text in PROMPTS
    ]
    Dataset.from_list(rows).to_parquet(root / "calibrated.parquet")
    return root


@pytest.mark.parametrize("transform", ["identity", "log", "exp:10", "exp:-10"])
def test_targets_are_the_optimum_of_each_prompts_rollouts(transform: str) -> None:
    """exp(target) averages to exactly 1 over the rollouts of a prompt, ties or not; where all tie, targets are 0."""
    rewards = np.random.default_rng(0).integers(0, 9, size=(7, 20)).astype(float)
    rewards[0] = 3.0
    targets = regression_targets(rewards, parse_transform(transform), beta=0.7)
    assert logsumexp(targets, axis=1) - np.log(20) == pytest.approx(np.zeros(7), abs=1e-10)  # exponents reach 3e4
    assert targets[0] == pytest.approx(np.zeros(20))


def test_targets_stop_where_the_rollouts_cannot_see() -> None:
    """−e^{−10u} at one nat asks for log-ratios of −1000; the targets stop near 1/K, the rest is as it was."""
    rewards = np.arange(64.0)[None, :]
    law = law_at_kl(Exponential(-10), kl=1.0)
    targets = regression_targets(rewards, Exponential(-10), law.beta)[0]
    exact = np.interp((np.arange(64) + 0.5) / 64, law.u.ravel(), np.log(np.maximum(law.density.ravel(), 1e-300)))
    assert exact.min() < -600
    assert targets.min() == pytest.approx(-np.log(64), abs=0.05)
    assert targets[exact > -3] == pytest.approx(exact[exact > -3], abs=0.1)


def test_targets_approach_the_continuous_log_density() -> None:
    """With many rollouts the targets are log f(u) of the analytic law, within the step of the ranks."""
    rewards = np.random.default_rng(1).normal(size=(1, 4000))
    law = aligned_law(Exponential(10), beta=5315.25)
    u = calibrate(rewards, np.sort(rewards, axis=1))[0]
    exact = np.interp(u, law.u.ravel(), np.log(law.density).ravel())
    assert regression_targets(rewards, Exponential(10), beta=5315.25)[0] == pytest.approx(exact, abs=2e-3)


def test_accumulated_batches_have_the_loss_of_whole_ones(tmp_path: Path) -> None:
    """The first training loss is the same with one batch of 64 and with eight of 8."""
    case, losses = enumerable.enumerable(tmp_path / "reference"), []
    for size in (64, 8):
        fit, _job = (
            Fit(batch_size=64, device_batch_size=size, learning_rate=1e-4),
            enumerable.job_in(tmp_path / str(size)),
        )
        loss, (model, _) = RolloutRegression(qrpo(Identity(), 0.3)), load_policy(case.folder)
        history = fit_to_rollouts(loss, model, case.rollouts(16), fit, enumerable.job_in(tmp_path / str(size))).history
        losses.append(next(row["loss"] for row in history if "loss" in row))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_rloo_is_set_to_the_objective_of_the_theory(folder: Path, tmp_path: Path) -> None:
    """KL in the reward at the given β, advantages as they are, and the policy's own distribution is sampled."""
    rows, reference = read_table(folder / "calibrated.parquet").to_pylist(), str(folder / "models" / "reference")
    problem = Problem(reference, load_policy(reference)[1], rows, gold, 0.136, Standard(), max_new_tokens=8)
    solver = read_solver(kl_budget=1.0, solver="rloo", fit=Fit(batch_size=16))
    made = on_policy_trainer(problem, solver, enumerable.job_in(tmp_path)).args
    assert (made.beta, made.normalize_advantages, made.num_iterations) == (0.136, False, 1)
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def readme_example() -> str:
    """Return the README's Python example."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(example)


def test_the_readmes_example_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TRL example trains as it stands, and the logged win rate of a policy that has not moved is near 1/2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(folder)
    namespace: dict[str, Any] = {}
    exec(readme_example(), namespace)
    logs = namespace["trainer"].state.log_history
    assert [row["win_rate"] for row in logs if "win_rate" in row]
    assert all(0 < row["reward"] <= 1 for row in logs if "reward" in row)


def test_llama_from_scratch_reads_its_own_tokenizer() -> None:
    """Any text round-trips through the tokenizer, a conversation ends in EOS, and the model has its vocabulary."""
    tokenizer = train_tokenizer(PROMPTS, SCRATCH)
    text = "naïve — 東京\n\tété \U0001f600"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    model = new_policy(SCRATCH, tokenizer, seed=0)
    assert isinstance(model, LlamaForCausalLM)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
