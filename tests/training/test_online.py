"""The on-policy solvers: each goes to the exact optimum of its method; resumed, stopped, from stored rollouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import enumerable
import pytest
import torch
from enumerable import Enumerable
from jobs import job_in, problem
from online_solvers import METHODS, trained

from infalign.method.procedures import Standard
from infalign.models.pretrained import load_policy
from infalign.theory.aims import tilted
from infalign.training.objectives import Ascent
from infalign.training.on_policy_trainer import fit_on_policy, on_policy_trainer
from infalign.training.solvers import read_solver
from infalign.training.solvers.ppo import gae


def fit(epochs: float, batch_size: int = 256) -> Any:
    """Return how these models are trained."""
    return read_solver(beta=1.0, fit={"epochs": epochs, "batch_size": batch_size, "learning_rate": 3e-3}).fit


def bond(anchor_rate: float, **changes: Any) -> Ascent:
    """Return bond with an anchor that follows as fast as one likes; at 0 it takes the first step for ever."""
    ascent = read_solver(solver="bond", kl_budget=1.0).ascent(None, Standard())
    return replace(ascent, trl_options={**ascent.trl_options, "ref_model_mixup_alpha": anchor_rate}, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_solver_reaches_the_optimum_of_its_method(name: str, case: Enumerable) -> None:
    """What `fit_online` returns is near the exact population optimum, or where the method rests if it has none."""
    method = METHODS[name]
    assert enumerable.kl(trained(case, method), method.optimum(case)) < method.within


def test_a_few_steps_go_the_right_way(case: Enumerable) -> None:
    """After 24 small steps the policy is nearer to the optimum than the reference is."""
    method = METHODS["maxk best-of-4"]
    optimum, law = method.optimum(case), trained(case, method, epochs=2, batch_size=128)
    assert enumerable.kl(law, optimum) < 0.9 * enumerable.kl(case.log_reference, optimum)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "within"), [(fit(2, 128), 0.053), (fit(80), 0.01)], ids=["a few steps", "many"])
def test_bond_goes_to_the_optimum_of_one_step(how: Any, within: float, case: Enumerable, tmp_path: Path) -> None:
    """With an anchor that is held, which `fit_online` moves; the reference is 0.06 nats from it."""
    optimum = enumerable.bond_step(case, case.log_reference, 1.0)
    assert enumerable.kl(case.log_reference, optimum) > 0.056
    fit_on_policy(problem(case), bond(0.0), how, job_in(tmp_path))
    assert enumerable.kl(case.laws(load_policy(tmp_path / "policy")[0]), optimum) < within


def test_bond_stops_when_the_budget_is_spent(case: Enumerable, tmp_path: Path) -> None:
    """With a moving anchor the policy leaves the start, and training ends soon after its KL passes the budget."""
    history = fit_on_policy(problem(case), bond(0.1, beta=0.01, stops_at=0.3), fit(20), job_in(tmp_path))
    spent = enumerable.kl(case.laws(load_policy(tmp_path / "policy")[0]), case.log_reference)
    assert 0.25 < spent < 0.6
    assert [row["kl"] >= 0.3 for row in history if "kl" in row].index(True) == sum("kl" in row for row in history) - 1


def test_rloo_is_set_to_the_objective_of_the_theory(case: Enumerable, tmp_path: Path) -> None:
    """KL in the reward at the given β, advantages as they are, and the policy's own distribution is sampled."""
    ascent = read_solver(solver="rloo", beta=1.0).ascent(tilted([[0.0, 1.0]], "exp:10", beta=0.1), Standard())
    made = on_policy_trainer(problem(case), ascent, fit(80), job_in(tmp_path)).args
    assert (made.beta, made.normalize_advantages, made.num_iterations) == (0.1, False, 1)
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_advantages_of_gae_by_hand() -> None:
    """Two tokens with λ = 1/2, and a response that ends after one: values after the end are 0."""
    rewards, values = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[0.25, 0.5], [0.5, 0.0]])
    found = gae(rewards, values, 0.5)
    assert found.tolist() == [[0.25 + 0.5 * 0.5, 0.5], [1.5, 0.0]]
