"""The on-policy solvers, each against the exact optimum of its method on a language model that can be enumerated.

``python tests/test_online.py`` trains all of them and prints how far each lands from it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import enumerable
import micro
import numpy as np
import pytest
import torch
from enumerable import Enumerable

from infalign.data.examples import prompt_id
from infalign.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Standard, WorstOfN
from infalign.method.shapings import Raw, parse_shaping
from infalign.method.transforms import Exponential
from infalign.models.pretrained import load_policy
from infalign.runs.reading import load_recipe
from infalign.runs.recipe import Policy
from infalign.theory.law import law_at_kl
from infalign.training.common import Job
from infalign.training.online import Objective, StoredRollouts, fit_online, gae, online_trainer
from infalign.models.settings import Fit

EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
BEST, WORST = BestOfN(4), WorstOfN(4)
K = 512  # references a prompt


def quiet(done: int, total: int, note: str) -> None:
    """Report to nobody."""


def references(case: Enumerable, k: int) -> list[list[float]]:
    """Return k sorted reference rewards of each prompt, drawn systematically: any rank is right to 1/k."""
    found = []
    for logprobs, rewards in zip(case.log_reference, case.rewards, strict=True):
        order = rewards.argsort()
        cdf = np.exp(logprobs[order]).cumsum()
        found.append(rewards[order][np.searchsorted(cdf / cdf[-1], (np.arange(k) + 0.5) / k)].tolist())
    return found


def rewarded(case: Enumerable) -> Callable[[list[str], list[str]], list[float]]:
    """Return the reward function of text that the rewards of the harness are."""
    _, tokenizer = load_policy(case.folder)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in case.responses]
    table = {
        (prompt, text): float(reward)
        for prompt, row in zip(enumerable.PROMPTS, case.rewards, strict=True)
        for text, reward in zip(texts, row, strict=True)
    }
    return lambda prompts, responses: [table[pair] for pair in zip(prompts, responses, strict=True)]


@dataclass(frozen=True)
class Method:
    """A solver, its objective, how long it is trained, its population optimum and how near it gets, in nats."""

    policy: Policy
    objective: Callable[[Enumerable], Objective]
    optimum: Callable[[Enumerable], Array]
    within: float = 0.01


def fit(epochs: float) -> Fit:
    """Return how these models are trained; an epoch has six steps of 256 responses."""
    return Fit(epochs=epochs, batch_size=256, learning_rate=3e-3)


def transformed(case: Enumerable) -> Objective:
    """Return the objective of exp:10 at one nat."""
    return Objective(rewarded(case), parse_shaping("exp:10"), BETA10 / EXP10.scale)


def tilted(case: Enumerable) -> Array:
    """Return its optimum."""
    return enumerable.tilted(case, EXP10, BETA10)


def served(procedure: BestOfN | WorstOfN) -> Callable[[Enumerable], Objective]:
    """Return the objective of maxk: the win rate itself, at a KL weight of 0.2."""
    return lambda case: Objective(rewarded(case), parse_shaping("identity"), 0.2, procedure=procedure)


def at_rest(case: Enumerable) -> Array:
    """Return where GRPO as shipped rests at β = 1: the law that its own group advantages tilt to, token by token."""
    others = np.random.default_rng(0).random((4096, 7))
    values, law = enumerable.transformed(case, EXP10), case.log_reference
    for _ in range(60):
        advantages = enumerable.group_advantages(values, law, others)
        law = np.logaddexp(law, enumerable.token_tilted(case, advantages, 1.0)) - np.log(2.0)
    return law


METHODS = {
    "rloo exp:10": Method(Policy(solver="rloo", transform="exp:10", beta=1.0, fit=fit(80)), transformed, tilted),
    "ppo exp:10": Method(Policy(solver="ppo", transform="exp:10", beta=1.0, fit=fit(240)), transformed, tilted),
    "maxk best-of-4": Method(
        Policy(solver="maxk", beta=1.0, fit=fit(160)), served(BEST), lambda case: enumerable.optimum(case, BEST, 0.2)
    ),
    "maxk worst-of-4": Method(
        Policy(solver="maxk", beta=1.0, fit=fit(160)), served(WORST), lambda case: enumerable.optimum(case, WORST, 0.2)
    ),
    "bond, one step": Method(
        Policy(solver="bond", kl_budget=1.0, fit=fit(80)),
        lambda case: Objective(rewarded(case), Raw(), 1.0, anchor_rate=0.0),
        lambda case: enumerable.bond_step(case, case.log_reference, 1.0),
    ),
    "grpo, Φ kept": Method(
        Policy(solver="grpo", transform="exp:10", beta=1.0, fit=fit(80)),
        transformed,
        # the group's mean has the response itself in it, which takes an eighth of the reward's gradient
        lambda case: enumerable.token_tilted(case, enumerable.transformed(case, EXP10), BETA10 / EXP10.scale * 8 / 7),
    ),
    "grpo, shipped": Method(
        Policy(solver="grpo", transform="exp:10", beta=1.0, shipped=True, fit=fit(80)),
        lambda case: Objective(rewarded(case), parse_shaping("exp:10"), 1.0),
        at_rest,
    ),
}


def trained(case: Enumerable, method: Method, folder: Path) -> Array:
    """Train from the reference and return the exact law of the policy that is saved."""
    fit_online(
        str(case.folder),
        left_padding(case),
        rows(case),
        method.objective(case),
        method.policy,
        Job(folder / "checkpoints", 0, "cpu", [], quiet),
        folder / "policy",
        max_new_tokens=2,
    )
    return case.laws(load_policy(folder / "policy")[0])


def left_padding(case: Enumerable) -> Any:
    """Return the tokenizer, set for generation."""
    _, tokenizer = load_policy(case.folder)
    tokenizer.padding_side = "left"
    return tokenizer


def rows(case: Enumerable) -> list[dict[str, Any]]:
    """Return the prompts with their references, 64 times over."""
    pairs = zip(enumerable.PROMPTS, references(case, K), strict=True)
    return [{"prompt": prompt, "reference_rewards": rewards} for prompt, rewards in pairs] * 64


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
    short = Method(
        method.policy.model_copy(update={"fit": fit(4)}), method.objective, method.optimum, within=method.within
    )
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
    policy = Policy(
        solver="grpo",
        transform="raw",
        stored=True,
        shipped=shipped,
        beta=0.1,
        fit=Fit(epochs=20, batch_size=64, learning_rate=1e-3),
    )
    fit_online(
        str(case.folder),
        left_padding(case),
        prompts,
        Objective(lambda prompts, responses: pytest.fail("asked for a reward"), Raw(), 0.1),
        policy,
        Job(tmp_path / "checkpoints", 0, "cpu", [], quiet),
        tmp_path / "policy",
        max_new_tokens=2,
        stored=StoredRollouts(stored),
    )
    law = case.laws(load_policy(tmp_path / "policy")[0])
    assert enumerable.win_rate(case, law, Standard()) > 0.6


@pytest.mark.parametrize("name", ["ppo exp:10", "bond, one step"])
def test_a_resumed_training_ends_as_an_undisturbed_one(name: str, case: Enumerable, tmp_path: Path) -> None:
    """Critic and moving anchor come back from a checkpoint in the second epoch, whose rest gives the same policy."""
    method = METHODS[name]
    policy = method.policy.model_copy(update={"fit": fit(2)})
    objective = replace(method.objective(case), anchor_rate=0.2)
    laws = []
    for folder in ("undisturbed", "resumed"):
        job = Job(tmp_path / folder, 0, "cpu", [], quiet)
        trainer = online_trainer(
            str(case.folder), left_padding(case), rows(case), objective, policy, job, max_new_tokens=2
        )
        if folder == "undisturbed":
            trainer.train()
        else:
            trainer.train(resume_from_checkpoint=str(tmp_path / "undisturbed" / "checkpoint-9"))
        laws.append(case.laws(trainer.model))
    assert laws[0] == pytest.approx(laws[1], abs=1e-6)


def test_bond_stops_when_the_budget_is_spent(case: Enumerable, tmp_path: Path) -> None:
    """With a moving anchor the policy leaves the start, and training ends soon after its KL passes the budget."""
    objective = Objective(rewarded(case), Raw(), 0.01, kl_budget=0.3, anchor_rate=0.1)
    history = fit_online(
        str(case.folder),
        left_padding(case),
        rows(case),
        objective,
        METHODS["bond, one step"].policy.model_copy(update={"fit": fit(20)}),
        Job(tmp_path / "checkpoints", 0, "cpu", [], quiet),
        tmp_path / "policy",
        max_new_tokens=2,
    )
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
        ("{solver: maxk, kl_budget: 1, transform: log}", "maxk has the transformation identity, not log"),
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


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
