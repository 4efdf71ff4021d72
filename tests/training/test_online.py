"""The on-policy solvers: each goes to the exact optimum of its method; resumed, stopped, from stored rollouts."""

from dataclasses import replace
from pathlib import Path

import enumerable
import pytest
import torch
from enumerable import Enumerable
from online_solvers import BEST, METHODS, Bond, fit, problem, trained

from infalign.models.pretrained import load_policy
from infalign.training.on_policy_trainer import fit_on_policy, on_policy_trainer
from infalign.training.solvers.ppo import gae


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_solver_reaches_the_optimum_of_its_method(name: str, case: Enumerable, tmp_path: Path) -> None:
    """A trained transformer is near the exact population optimum, or where the method rests if it has none."""
    method = METHODS[name]
    assert enumerable.kl(trained(case, method, tmp_path), method.optimum(case)) < method.within


@pytest.mark.parametrize("name", ["maxk best-of-4", pytest.param("bond, one step", marks=pytest.mark.slow)])
def test_a_few_steps_go_the_right_way(name: str, case: Enumerable, tmp_path: Path) -> None:
    """After 24 small steps the policy is nearer to the optimum than the reference is."""
    method = METHODS[name]
    small = fit(2).model_copy(update={"batch_size": 128})
    short = replace(method, solver=method.solver.model_copy(update={"fit": small}))
    optimum = method.optimum(case)
    assert enumerable.kl(trained(case, short, tmp_path), optimum) < 0.9 * enumerable.kl(case.log_reference, optimum)


def test_bond_stops_when_the_budget_is_spent(case: Enumerable, tmp_path: Path) -> None:
    """With a moving anchor the policy leaves the start, and training ends soon after its KL passes the budget."""
    ascent = Bond(solver="bond", kl_budget=0.3, anchor_rate=0.1, fit=fit(20)).ascent(None, BEST)
    history = fit_on_policy(problem(case), replace(ascent, beta=0.01), fit(20), enumerable.job_in(tmp_path))
    spent = enumerable.kl(case.laws(load_policy(tmp_path / "policy")[0]), case.log_reference)
    assert 0.25 < spent < 0.6
    assert [row["kl"] >= 0.3 for row in history if "kl" in row].index(True) == sum("kl" in row for row in history) - 1


def test_rloo_is_set_to_the_objective_of_the_theory(case: Enumerable, tmp_path: Path) -> None:
    """KL in the reward at the given β, advantages as they are, and the policy's own distribution is sampled."""
    method = METHODS["rloo exp:10"]
    made = on_policy_trainer(problem(case), method.ascent, method.solver.fit, enumerable.job_in(tmp_path)).args
    assert (made.beta, made.normalize_advantages, made.num_iterations) == (method.ascent.beta, False, 1)
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_advantages_of_gae_by_hand() -> None:
    """Two tokens with λ = 1/2, and a response that ends after one: values after the end are 0."""
    rewards, values = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[0.25, 0.5], [0.5, 0.0]])
    found = gae(rewards, values, 0.5)
    assert found.tolist() == [[0.25 + 0.5 * 0.5, 0.5], [1.5, 0.0]]
