"""The strength of a policy: the KL asked for and the gain as served, exactly, on a model whose laws are known."""

from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import enumerable
import numpy as np
import pytest
import torch
from enumerable import Enumerable
from jobs import job_in

from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.method.procedures import BestOfN, Extreme, RewindAndRepeat, Served, Standard, WorstOfN
from infalign.method.transforms import Exponential
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.models.settings import Fit, Lora
from infalign.theory.aims import tilted
from infalign.training.common import Fitted
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.solvers.qrpo import qrpo
from infalign.training.strength import Choice, choose_strength, served_gain

FORMS = ("guide", "lora", "whole")


def fitted(case: Enumerable, rows: list[dict[str, Any]], form: str, folder: Path) -> Fitted:
    """Fit a policy of this form to rollouts, in a few steps."""
    model, tokenizer = load_policy(case.folder)
    torch.manual_seed(0)
    if form == "guide":
        model = add_network_guide(case.folder, model, tokenizer)
    fit = Fit(epochs=1, batch_size=216, learning_rate=3e-3, lora=Lora(rank=4) if form == "lora" else None)
    return fit_to_rollouts(RolloutRegression(qrpo()), model, rows, law(rows), fit, job_in(folder))


def law(rows: list[dict[str, Any]], kl: float = 0.0) -> Law:
    """Return a weak law of the rewards, but with another KL."""
    rewards_PK = np.array([row["reward"] for row in rows]).reshape(len({row["prompt_id"] for row in rows}), -1)
    return replace(tilted(rewards_PK, Exponential(4.0), beta=20.0 / Exponential(4.0).scale), kl=kl)


def chosen(case: Enumerable, policy: Fitted, rows: list[dict[str, Any]], budget: float, *report: Any) -> Choice:
    """Choose the strength of a policy that is served as Best-of-4."""
    return choose_strength(policy, load_policy(case.folder)[0], rows, law(rows, budget), BestOfN(4), *report)


@pytest.mark.parametrize(("form", "budget"), [*zip(FORMS, (0.05, 0.2, 0.2), strict=True)])
def test_a_policy_is_brought_to_its_budget(case: Enumerable, form: str, budget: float, tmp_path: Path) -> None:
    """Weaker or stronger than it was trained, its KL is the one asked for and its gain the one that it has."""
    rows, reports = case.rollouts(64), list[tuple[int, int, str]]()
    policy = fitted(case, rows, form, tmp_path)
    choice = chosen(case, policy, rows, budget, lambda *report: reports.append(report))
    assert reports[-1] == (reports[0][1], reports[0][1], f"measuring at strength {choice.chosen.strength:.3g}")
    laws = case.laws(policy.model)
    kl = enumerable.kl(laws, case.log_reference)
    assert (kl, choice.chosen.kl) == (pytest.approx(budget, rel=0.07), pytest.approx(kl, rel=0.03))
    weights_PY, base_PY = np.exp(laws), np.exp(case.log_reference)
    gains = [win_rate(case.rewards[p], weights_PY[p], base_PY[p], 4) - 0.5 for p in range(len(base_PY))]
    assert choice.chosen.gain.mean == pytest.approx(np.mean(gains), abs=0.02)
    assert np.mean(gains) > 0.03


def win_rate(rewards_Y: Array, policy_Y: Array, base_Y: Array, n: int) -> float:
    """Return the win rate of one law over another, both served as Best-of-n, over distinct rewards."""
    order = np.argsort(rewards_Y)
    policy, base = (np.diff(np.append(0.0, law[order].cumsum() ** n)) for law in (policy_Y, base_Y))
    return float(policy @ (base.cumsum() - base / 2))


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_kept_where_nothing_carries_over(case: Enumerable, form: str, tmp_path: Path) -> None:
    """What is learned from random rewards gains nothing on other prompts; the weights are the reference's again."""
    rng, rows = np.random.default_rng(0), case.rollouts(64)
    rows = [row | {"reward": float(reward)} for row, reward in zip(rows, rng.normal(size=len(rows)), strict=True)]
    policy = fitted(case, rows, form, tmp_path)
    choice = chosen(case, policy, rows, 0.2)
    assert (choice.chosen.strength, choice.chosen.kl) == (0.0, 0.0)
    assert choice.summary()["gain"]["low"] <= 0.0 < choice.best.strength
    assert choice.seen_gain is not None
    np.testing.assert_allclose(case.laws(policy.model), case.log_reference, atol=1e-6)


def test_the_reference_is_kept_where_rollouts_tell_nothing(case: Enumerable, tmp_path: Path) -> None:
    """A guide that is so far away that a quarter of the way is unknown."""
    rows = case.rollouts(16)
    policy = fitted(case, rows, "guide", tmp_path)
    torch.nn.init.normal_(policy.model.guide.head.linear.weight, std=4.0)
    assert chosen(case, policy, rows, 1.0).summary() == {"strength": 0.0, "strength_kl": 0.0}


@pytest.mark.parametrize("procedure", [Standard(), BestOfN(6), WorstOfN(2), RewindAndRepeat(0.5, 3)])
@pytest.mark.parametrize("binary", [True, False])
def test_the_gain_is_that_of_what_is_served(procedure: Served, binary: bool) -> None:
    """By all draws of a law over six rollouts, with ties, against all of the reference; of N by sets of 3 at most."""
    rewards = np.array([0.0, 1, 0, 1, 1, 0]) if binary else np.array([2.0, 0, 3, 3, 5, 1])
    weights = np.array([1.0, 2, 3, 1, 2, 4])

    def served(law: Array) -> Array:
        found, draws = np.zeros(6), min(getattr(procedure, "n", 1), 3)
        sets = permutations(range(6), draws) if isinstance(procedure, Extreme) else product(range(6), repeat=draws)
        for drawn in sets:
            values = rewards[[*drawn]]
            if isinstance(procedure, RewindAndRepeat):
                passing = np.flatnonzero(values >= np.quantile(rewards, 0.5))
                which = passing[0] if passing.size else draws - 1
            else:
                which = values.argmin() if isinstance(procedure, WorstOfN) else values.argmax()
            found[drawn[which]] += law[[*drawn]].prod()
        return found

    policy, base = (law / law.sum() for law in map(served, (weights, np.ones(6))))
    wins = (rewards[:, None] > rewards) + 0.5 * (rewards[:, None] == rewards)
    worth = rewards if binary else wins @ base
    expected = float((policy - base) @ worth)
    assert served_gain(rewards, weights, procedure, binary=binary) == pytest.approx(expected, abs=1e-12)
