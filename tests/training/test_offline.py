"""The offline solvers: each ends at the exact optimum of its method; their losses, pairs, weights and settings."""

from pathlib import Path
from typing import Any

import enumerable
import numpy as np
import pytest
import torch
from enumerable import Enumerable
from jobs import job_in
from offline_solvers import METHODS, TAU, trained
from peft import TaskType
from transformers import TrainingArguments

from infalign.core.errors import DataError
from infalign.method.optimum import optimum
from infalign.method.transforms import Exponential, Identity
from infalign.models.packed import packing, response_logprobs
from infalign.models.pretrained import load_policy
from infalign.models.settings import Fit, Lora
from infalign.theory.aims import tilted
from infalign.theory.law import law_at_kl
from infalign.training.common import LossTrainer, trainer_config, with_adapter
from infalign.training.offline_trainer import RolloutRegression, _collate, fit_to_rollouts
from infalign.training.solvers.pairs import bonbon, bonbon_margin, ipo
from infalign.training.solvers.qrpo import DIVERGENCES, logistic, qrpo, regression_targets, squared
from infalign.training.solvers.snips import snips


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "qrpo guided" else []) for name in METHODS]
)
def test_a_solver_reaches_the_optimum_of_its_method(name: str, case: Enumerable) -> None:
    """What `fit` returns is near the exact population optimum, from which it started at least 0.2 nats away."""
    method = METHODS[name]
    optimum = method.optimum(case)
    assert enumerable.kl(case.log_reference, optimum) > 0.2
    assert enumerable.kl(trained(case, method), optimum) < method.within


def test_losses_of_pairs_have_their_optima(case: Enumerable) -> None:
    """IPO π_ref·e^{C/τ}/Z; BoNBoN's square for n = 2 that at β = 1/2, and for n = 4 more KL than Best-of-4."""
    assert enumerable.pair_optimum(case, TAU) == pytest.approx(enumerable.tilted(case, Identity(), TAU), abs=1e-5)
    two, *four = enumerable.best_worst_optimum(case, 2, alpha=0.0), enumerable.best_of_n(case, 4)
    assert two == pytest.approx(enumerable.tilted(case, Identity(), 0.5), abs=1e-3)
    spent = [enumerable.kl(law, case.log_reference) for law in (*four, enumerable.best_worst_optimum(case, 4))]
    assert spent == pytest.approx([0.63, 0.85], abs=0.02)  # continuous: 0.636 and 0.854


def test_losses_are_those_of_the_papers() -> None:
    """One pair by hand: h = (1, −1), τ = 0.25, n = 2; β_n of BoNBoN as its authors' README has it."""
    assert [0.5 / bonbon_margin(n) for n in (2, 4, 8)] == pytest.approx([0.5, 1 / 11, 0.0275482094])
    h, number = torch.tensor([[1.0, -1.0]]), torch.tensor([2.0])
    assert ipo(0.25).loss(h, number).item() == pytest.approx((1 + 1 - 2) ** 2)
    assert bonbon(2).loss(h, torch.tensor([bonbon_margin(2)])).item() == pytest.approx(-0.005 + 0.995 * (2 - 1) ** 2)


@pytest.mark.parametrize("objective", ["reward", "win-rate"])
def test_snips_is_least_at_the_optimum_of_the_procedure(objective: Any) -> None:
    """Free log-ratios of rewards that tie reach its value; where prompts have several K, sets are of the smallest."""
    rng = np.random.default_rng(0)
    drawn: list[Any] = [rng.integers(0, 4, (20, 6)), [[0, 1, 1, 2, 2], [0, 1]]]
    law, uneven = (optimum(rewards, "best-of-4", kl=0.3, objective=objective) for rewards in drawn)
    worth = torch.tensor(np.concatenate([snips(law).examples(row, row, rng)[1] for row in law.rewards_PK]))
    h = torch.zeros(20, 6, dtype=torch.double, requires_grad=True)
    for _ in range(2000):
        h.data -= 100.0 * torch.autograd.grad(snips(law).loss(h, worth), h)[0]
    assert snips(law).loss(h, worth).item() == pytest.approx(law.beta * law.kl - law.value, abs=1e-6)
    assert snips(uneven).examples(uneven.rewards_PK[0], uneven.log_ratios_PK[0], rng)[0].shape == (2, 2)


def test_mixed_precision_begins_at_the_reference(case: Enumerable, tmp_path: Path) -> None:
    """An adapter is nothing at first, so log π/π_ref is 0 to the last bit: loss and reference round alike."""
    model, _ = load_policy(case.folder)
    rows = case.rollouts(8)
    texts = [[row[ids] for row in rows] for ids in ("prompt_ids", "completion_ids")]
    reference = response_logprobs(model, *texts, bf16=True)
    assert np.abs(reference - response_logprobs(model, *texts)).max() > 1e-3
    rows = [row | {"reference_logprob": float(own)} for row, own in zip(rows, reference, strict=True)]
    fit = Fit(bf16=True, lora=Lora())
    adapted = with_adapter(model, fit, TaskType.CAUSAL_LM)
    settings = trainer_config(TrainingArguments, fit, job_in(tmp_path))
    trainer = LossTrainer(RolloutRegression(qrpo(squared)).of_batch, model=adapted, args=settings)
    batch = _collate(rows, [{"rollouts": [row], "number": 0.0} for row in range(len(rows))])
    with packing(model), trainer.compute_loss_context_manager(), torch.no_grad():
        _, found = trainer.compute_loss(adapted, batch, return_outputs=True)
    assert found["log_ratio"].abs().max() == 0


def test_a_process_trains_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with four GPUs, and no launcher, the batch is not split."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 4)
    assert trainer_config(TrainingArguments, Fit(), job_in(tmp_path))._n_gpu == 1


def test_targets_stop_where_the_rollouts_cannot_see() -> None:
    """−e^{−10u} at one nat asks for log-ratios of −1000; the targets stop near 1/K, the rest is as it was."""
    law = law_at_kl(Exponential(-10), kl=1.0)
    over_rollouts = tilted(np.arange(64.0)[None], "exp:-10", beta=law.beta / Exponential(-10).scale)
    targets = regression_targets(over_rollouts.log_ratios_PK[0])
    exact = np.interp((np.arange(64) + 0.5) / 64, law.u.ravel(), np.log(np.maximum(law.density.ravel(), 1e-300)))
    assert exact.min() < -600
    assert targets.min() == pytest.approx(-np.log(64), abs=0.05)
    assert targets[exact > -3] == pytest.approx(exact[exact > -3], abs=0.1)


def test_accumulated_batches_have_the_loss_of_whole_ones(case: Enumerable, tmp_path: Path) -> None:
    """The first training loss is the same with one batch of 64 and with eight of 8."""
    losses = []
    for size in (64, 8):
        fit, (model, _) = Fit(batch_size=64, device_batch_size=size, learning_rate=1e-4), load_policy(case.folder)
        job, law = job_in(tmp_path / str(size)), case.law(16, "identity", 0.3)
        history = fit_to_rollouts(RolloutRegression(qrpo()), model, case.rollouts(16), law, fit, job).history
        losses.append(next(row["loss"] for row in history if "loss" in row))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("loss", DIVERGENCES.values(), ids=DIVERGENCES)
def test_every_loss_of_qrpo_is_least_at_the_target_alone(loss: Any) -> None:
    """It is 0 at h = T, positive elsewhere, and its slope has the sign of h − T."""
    target = torch.tensor([-4.0, -1.0, 0.0, 0.5, 2.0]).repeat_interleave(5)
    h = (target + torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0]).repeat(5)).requires_grad_()
    found = loss(h, target)
    found.sum().backward()
    assert h.grad is not None
    assert found[h == target].tolist() == pytest.approx([0.0] * 5, abs=1e-6)
    assert (found[h != target] > 0).all()
    assert torch.equal(torch.sign(h.grad).where(h != target, torch.tensor(0.0)), torch.sign(h - target).detach())


def test_the_logistic_loss_does_not_chase_log_ratios_where_the_optimum_has_no_mass() -> None:
    """At T = −10 its slope is below a hundredth of what it is at T = 1, where the squared loss pulls as hard."""
    for loss, ratio in ((logistic, 0.01), (squared, 1.0)):
        h = torch.tensor([-9.0, 2.0], requires_grad=True)
        loss(h, torch.tensor([-10.0, 1.0])).sum().backward()
        assert h.grad is not None
        low, high = h.grad.tolist()
        assert low / high <= ratio
    assert low / high == 1.0


def test_rollouts_are_drawn_half_from_the_reference_and_half_from_the_optimum() -> None:
    """K of K rollouts in each pass, each (1 + e^T)/2 times rounded up or down, and on average exactly."""
    rewards, rng = np.random.default_rng(1).normal(size=16), np.random.default_rng(0)
    beta = law_at_kl(Exponential(10), kl=1.0).beta
    (log_ratios,) = tilted(rewards[None], "exp:10", beta=beta / Exponential(10).scale).log_ratios_PK
    expected = 0.5 + 0.5 * np.exp(regression_targets(log_ratios))
    counts = []
    for _ in range(4000):
        rollouts, targets = qrpo().examples(rewards, log_ratios, rng)
        assert rollouts.shape == (16, 1)
        assert np.log(2 * expected - 1)[rollouts[:, 0]] == pytest.approx(targets)
        counts.append(np.bincount(rollouts[:, 0], minlength=16))
    assert (np.abs(counts - expected) < 1).all()
    assert np.mean(counts, axis=0) == pytest.approx(expected, abs=0.03)


def test_sets_are_disjoint() -> None:
    """IPO's pairs are new in each pass, labeled ±1/2τ or 0 for a tie; BoNBoN's best and worst are of 7/3 sets."""
    rewards, rng = np.array([0.0, 0.0, 1.0, 2.0, 2.0, 2.0]), np.random.default_rng(0)
    passes = [ipo(0.25).examples(rewards, 0.0 * rewards, rng) for _ in range(2)]
    for pairs, labels in passes:
        assert sorted(pairs.ravel()) == list(range(6))
        assert labels.tolist() == [2.0 * np.sign(rewards[i] - rewards[j]) for i, j in pairs]
    assert passes[0][0].tolist() != passes[1][0].tolist()
    rewards = np.arange(7.0)
    pairs, numbers = bonbon(3).examples(rewards, 0.0 * rewards, rng)
    assert pairs.shape == (2, 2)
    assert len(set(pairs.ravel())) == 4
    assert (rewards[pairs[:, 0]] - rewards[pairs[:, 1]] >= 2).all()
    assert numbers == pytest.approx([3.0, 3.0])  # (n − 1)·H_{n−1} = 2·1.5


def test_a_law_of_other_rollouts_is_refused(case: Enumerable, tmp_path: Path) -> None:
    """Of fewer rollouts per prompt than there are."""
    (model, _), law = load_policy(case.folder), case.law(8, "identity", 0.3)
    with pytest.raises(DataError, match="make the law from the rewards of these rollouts"):
        fit_to_rollouts(RolloutRegression(qrpo()), model, case.rollouts(16), law, Fit(), job_in(tmp_path))
