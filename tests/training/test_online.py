"""The on-policy solvers: each goes to the exact optimum of its method; resumed, stopped, from stored rollouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import enumerable
import micro
import pytest
import torch
from enumerable import Enumerable
from online_solvers import BEST, METHODS, Bond, fit, left_padding, trained

from infalign.core.errors import ConfigError
from infalign.data.examples import prompt_id
from infalign.method.procedures import Standard
from infalign.models.pretrained import load_policy
from infalign.models.settings import Fit
from infalign.recipe.reading import load_recipe
from infalign.training.on_policy_trainer import Problem, StoredGroups, fit_on_policy, on_policy_trainer
from infalign.training.solvers import read_solver
from infalign.training.solvers.ppo import gae


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Enumerable:
    """Make the reference."""
    return enumerable.enumerable(tmp_path_factory.mktemp("enumerable") / "reference")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_solver_reaches_the_optimum_of_its_method(name: str, case: Enumerable, tmp_path: Path) -> None:
    """A trained transformer is near the exact population optimum, or where the method rests if it has none."""
    method = METHODS[name]
    assert enumerable.kl(trained(case, method, tmp_path), method.optimum(case)) < method.within


@pytest.mark.parametrize("name", ["maxk best-of-4", "bond, one step"])
def test_a_few_steps_go_the_right_way(name: str, case: Enumerable, tmp_path: Path) -> None:
    """After 24 steps the policy is nearer to the optimum than the reference is."""
    method = METHODS[name]
    short = replace(method, solver=method.solver.model_copy(update={"fit": fit(4)}))
    optimum = method.optimum(case)
    assert enumerable.kl(trained(case, short, tmp_path), optimum) < 0.9 * enumerable.kl(case.log_reference, optimum)


@pytest.mark.parametrize("shipped", [True, False])
def test_grpo_learns_from_stored_rollouts_without_generating(shipped: bool, case: Enumerable, tmp_path: Path) -> None:
    """One outer iteration on the reference's rollouts raises the probability of the better responses."""
    stored: dict[str, list[dict[str, Any]]] = {}
    for row in case.rollouts(64):
        stored.setdefault(row["prompt_id"], []).append(row)
    messages = {text: [{"role": "user", "content": text}] for text in enumerable.PROMPTS}
    stored = {prompt_id(message): stored[f"{text} 0"] for text, message in messages.items()}
    prompts = [
        {"prompt": message, "reference_rewards": sorted(row["reward"] for row in stored[prompt_id(message)])}
        for message in messages.values()
    ]
    problem = Problem(
        str(case.folder),
        left_padding(case),
        prompts,
        lambda prompts, responses: pytest.fail("asked for a reward"),
        0.1,
        BEST,
        max_new_tokens=2,
        stored=StoredGroups(stored),
    )
    solver = read_solver(
        solver="grpo",
        transform="raw",
        stored=True,
        shipped=shipped,
        beta=0.1,
        fit=Fit(epochs=20, batch_size=64, learning_rate=1e-3),
    )
    fit_on_policy(problem, solver, enumerable.job_in(tmp_path))
    law = case.laws(load_policy(tmp_path / "policy")[0])
    assert enumerable.win_rate(case, law, Standard()) > 0.6


@pytest.mark.parametrize("name", ["ppo exp:10", "bond, one step"])
def test_a_resumed_training_ends_as_an_undisturbed_one(name: str, case: Enumerable, tmp_path: Path) -> None:
    """Critic and moving anchor come back from a checkpoint in the second epoch, whose rest gives the same policy."""
    method, short = METHODS[name], {"fit": fit(2)}
    solver = method.solver.model_copy(update=short | ({"anchor_rate": 0.2} if name == "bond, one step" else {}))
    laws = []
    for folder in ("undisturbed", "resumed"):
        trainer = on_policy_trainer(method.problem(case), solver, enumerable.job_in(tmp_path / folder))
        if folder == "undisturbed":
            trainer.train()
        else:
            trainer.train(resume_from_checkpoint=str(tmp_path / "undisturbed" / "checkpoints" / "checkpoint-9"))
        laws.append(case.laws(trainer.model))
    assert laws[0] == pytest.approx(laws[1], abs=1e-6)


def test_bond_stops_when_the_budget_is_spent(case: Enumerable, tmp_path: Path) -> None:
    """With a moving anchor the policy leaves the start, and training ends soon after its KL passes the budget."""
    problem = replace(METHODS["bond, one step"], beta=0.01).problem(case)
    solver = Bond(solver="bond", kl_budget=0.3, anchor_rate=0.1, fit=fit(20))
    history = fit_on_policy(problem, solver, enumerable.job_in(tmp_path))
    spent = enumerable.kl(case.laws(load_policy(tmp_path / "policy")[0]), case.log_reference)
    assert 0.25 < spent < 0.6
    assert [row["kl"] >= 0.3 for row in history if "kl" in row].index(True) == sum("kl" in row for row in history) - 1


def test_advantages_of_gae_by_hand() -> None:
    """Two tokens with λ = 1/2, and a response that ends after one: values after the end are 0."""
    rewards, values = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[0.25, 0.5], [0.5, 0.0]])
    found = gae(rewards, values, 0.5)
    assert found.tolist() == [[0.25 + 0.5 * 0.5, 0.5], [1.5, 0.0]]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("{solver: maxk, kl_budget: 1, generations: 2}", "best-of-4 needs generations and rollout.k of at least 4"),
        ("{solver: maxk, kl_budget: 1, transform: log}", "transform is for the solver qrpo or "),
        ("{solver: bond, beta: 1}", "bond has no beta: give kl_budget, at which it stops"),
        ("{solver: ppo, beta: 1, generations: 5}", "fit.batch_size 32 is no multiple of generations 5"),
        ("{solver: grpo, beta: 1, stored: true}", "fit.batch_size 32 is no multiple of rollout.k 6, its group"),
        ("{solver: rloo, beta: 1, shipped: true}", "shipped is for the solver grpo, found rloo"),
        ("{solver: qrpo, beta: 1, stored: true}", "stored is for the solver grpo, found qrpo"),
        ("{solver: qrpo, transform: rawest, kl_budget: 1}", "raw-prompt"),
    ],
)
def test_a_setting_that_a_solver_does_not_take_is_an_error(tmp_path: Path, override: str, said: str) -> None:
    """It is refused with what to do."""
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path))
    with pytest.raises(ConfigError, match="recipe") as error:
        load_recipe(path, [f"policies.new={override}"])
    assert said in str(error.value)


def test_maxk_climbs_only_best_and_worst_of_n(tmp_path: Path) -> None:
    """For another procedure there is no such gradient, and the recipe says so."""
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path))
    with pytest.raises(ConfigError, match="maxk climbs best-of-N and worst-of-N, and the procedure is 2nd-best-of-4"):
        load_recipe(path, ["procedure=2nd-best-of-4", "policies.new={solver: maxk, kl_budget: 1}"])
