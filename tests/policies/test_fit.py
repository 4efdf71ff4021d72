"""Policies fitted by calls are those of the trainers on the same rows, and what cannot be learned is refused."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from infalign import best_of, evaluate, fit, fit_online, optimum, sample, score, tilted
from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import from_cell
from infalign.method.laws import Law
from infalign.models.policy import Policy
from infalign.models.settings import Compute, Fit
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.sources import load_reward
from infalign.sampling.sample import Rollouts
from infalign.training.objectives import Ascent
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.on_policy_trainer import Problem, fit_on_policy
from infalign.training.output_folder import Target
from infalign.training.solvers import read_solver
from infalign.training.strength import choose_strength

PROMPTS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)]
HOW = {"epochs": 4, "learning_rate": 3e-3, "batch_size": 16}


def vowels(responses: list[str]) -> list[float]:
    """Return the number of vowels, which few responses share."""
    return [sum(text.count(letter) for letter in "aeiou") + len(set(text)) / 100 for text in responses]


@pytest.fixture(scope="module")
def rollouts(model: str) -> Rollouts:
    """Return eight responses to each prompt."""
    return sample(model, PROMPTS, 8, max_new_tokens=6)


def weights(policy: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a policy, or of a model folder."""
    found = policy[0] if isinstance(policy, tuple) else AutoModelForCausalLM.from_pretrained(policy)
    return found.state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two models have the same weights, to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_stored_training_is_that_of_the_solver(model: str, rollouts: Rollouts, tmp_path: Path) -> None:
    """The weights are those of the solver's own training on the rows; a loaded reference stays as it was."""
    law, how = tilted(score(vowels, rollouts), "exp:10", kl=0.5), HOW | {"epochs": 2, "learning_rate": 1e-2}
    reference = Policy.of(model)
    before = {name: weight.clone() for name, weight in weights(reference).items()}
    states = torch.get_rng_state(), random.getstate()
    policy = fit(reference, rollouts, law, folder=tmp_path / "mine", **how)
    assert (torch.equal(states[0], torch.get_rng_state()), random.getstate()) == (True, states[1])
    assert equal(weights(reference), before)
    assert equal(weights(policy), weights(str(tmp_path / "mine")))
    asked, drawn = rollouts.prompts, rollouts.drawn.to_pylist()
    rows = [
        {"prompt_id": row["prompt_id"], "prompt_ids": asked.token_ids[place // 8], "completion_ids": row["token_ids"]}
        | {"reference_logprob": row["logprob"]}
        for place, row in enumerate(drawn)
    ]
    solver = read_solver(solver="qrpo", kl_budget=0.5)
    target = Target(tmp_path / "checkpoints", tmp_path / "theirs", 0, Compute(device="cpu"), ())
    with target.job(lambda *_: None) as job:
        loss = RolloutRegression(solver.objective(law))  # type: ignore[attr-defined]
        fitted = fit_to_rollouts(loss, Policy.of(model).model, rows, law, Fit(**how), job)
        choose_strength(fitted, reference.model, rows, law, law.procedure)
        fitted.save(reference.tokenizer)
    for name, weight in weights(policy).items():
        torch.testing.assert_close(weight, weights(str(tmp_path / "theirs"))[name], rtol=1e-3, atol=1e-4)


def test_fresh_training_ranks_among_the_laws_rewards(model: str, rollouts: Rollouts, tmp_path: Path) -> None:
    """The weights are those of the on-policy trainer with the law's β, shaping and references; columns arrive."""

    def check(responses: list[str], answer: list[str]) -> list[float]:
        return [len(text) + len(true) for text, true in zip(responses, answer, strict=True)]

    law = tilted(score(check, rollouts), "exp:10", kl=0.5)
    how = {"epochs": 1, "learning_rate": 1e-2, "batch_size": 16}
    policy = fit_online(model, PROMPTS, check, law, generations=4, max_new_tokens=6, **how)
    table = rollouts.asked.to_pylist()
    rows = [
        {"prompt": from_cell(row["prompt"]), "columns": row["columns"], "reference_rewards": sorted(own)}
        for row, own in zip(table, law.rewards_PK.tolist(), strict=True)
    ]
    problem = Problem(model, load_tokenizer(model, padding_side="left"), rows, load_reward(check), 6)
    with Target(tmp_path / "c", tmp_path / "theirs", 0, Compute(device="cpu"), ()).job(lambda *_: None) as job:
        fit_on_policy(problem, Ascent(law.shaping, law.beta, 4), Fit(**how), job)
    assert equal(weights(policy), weights(str(tmp_path / "theirs")))
    assert not equal(weights(policy), weights(model))


def test_fresh_responses_lose_every_end(model: str, rollouts: Rollouts) -> None:
    """As those of `sample` do, also one that is not the tokenizer's EOS."""
    policy, texts = Policy.of(model), list[str]()
    policy.model.generation_config.eos_token_id = sorted(set().union(*rollouts.drawn["token_ids"].to_pylist()))
    law = tilted(score(vowels, rollouts), "exp:10", kl=0.5)
    how = {"generations": 4, "max_new_tokens": 6, "batch_size": 16, "epochs": 1}
    fit_online(policy, PROMPTS, lambda responses: texts.extend(responses) or vowels(responses), law, **how)  # type: ignore[func-returns-value]
    assert texts.count("") > len(texts) / 2


@pytest.mark.parametrize("form", [{}, {"guide": {}}, {"solver": "resample"}], ids=str)
def test_a_fitted_policy_gains_where_it_was_trained(model: str, form: dict[str, Any]) -> None:
    """Of any form and solver: of one token per response, right ones come more often, and the KL is spent."""

    def check(responses: list[str]) -> list[float]:
        return [float(text[:1] < "N") for text in responses]

    prompts = [f"What is {n} + {n}?" for n in range(40)]  # of which four are held out
    rollouts = sample(model, prompts, 32, max_new_tokens=1)
    policy = fit(model, rollouts, optimum(score(check, rollouts), "best-of-2", kl=0.2), **HOW, **form)
    found = evaluate(policy, prompts, check, "best-of-2", reference=model, samples=64, max_new_tokens=1)
    assert found["pass@1"]["difference"]["low"] > 0
    assert 0.02 < found["KL, nats"]["policy"]["mean"] < 0.5


@pytest.mark.parametrize(
    ("law", "settings", "said"),
    [
        (lambda r: tilted(r[:-1], "raw", kl=0.1), {}, r"the law is of \(11, 8\) rewards.* given are \(12, 8\)"),
        (lambda r: tilted(np.ones(r.shape), "raw", beta=1.0), {}, "no prompt has two different rewards"),
        (lambda r: tilted(r, "raw", kl=0.1), {"solver": "rloo"}, "fit_online"),
        (lambda r: tilted(r, "raw", kl=0.1), {"solver": "qrpoo"}, "qrpoo: .*did you mean qrpo"),
        (lambda r: tilted(r, "raw", kl=0.1), {"epoch": 2}, "qrpo: unknown key `epoch`"),
        (lambda r: tilted(r, "raw", kl=0.1), {"epochs": -1}, "qrpo: `fit.epochs`"),
        (lambda r: tilted(r, "raw", kl=0.1), {"guide": {"side": {}}}, "guide.side"),
        (lambda r: tilted(r, "raw", kl=0.1), {"solver": "bonbon", "n": 16}, "needs rollout.k of at least 16"),
        (lambda r: tilted(r, "raw", kl=0.1), {"kl_budget": 0.6}, "kl_budget: set by the law"),
    ],
)
def test_what_cannot_be_fitted_is_refused(model: str, rollouts: Rollouts, law: Any, settings: Any, said: str) -> None:
    """In one sentence that says what was found."""
    made: Law = law(score(vowels, rollouts))
    with pytest.raises((ConfigError, DataError), match=said):
        fit(model, rollouts, made, **settings)


def test_a_folder_that_is_not_empty_is_kept(model: str, rollouts: Rollouts, tmp_path: Path) -> None:
    """Nothing is trained into it."""
    (tmp_path / "thesis.tex").touch()
    law = optimum(score(lambda responses: [float("a" in text) for text in responses], rollouts), "best-of-2", kl=0.05)
    with pytest.raises(ConfigError, match="is not an empty folder"):
        fit(model, rollouts, law, folder=tmp_path)
    with pytest.raises(ConfigError, match="qrpo draws no responses; use fit"):
        fit_online(model, PROMPTS, vowels, law, solver="qrpo")
    with pytest.raises(DataError, match=r"the law is of \(12, 8\) rewards.* given are \(11, 8\)"):
        fit_online(model, PROMPTS[1:], vowels, law)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("make", [lambda r: tilted(r, "exp:10", kl=0.3), lambda r: best_of(r, 4)])
def test_prompts_that_the_reward_leaves_out_are_as_if_they_were_not_there(model: str, make: Any) -> None:
    """A row of NaN stays one in the law, changes no other, and its prompt is not trained on."""
    rollouts = sample(model, [f"What is {n} + {n}?" for n in range(40)], 8, max_new_tokens=1)
    rewards = score(lambda responses: [float(text[:1] < "N") for text in responses], rollouts)
    rewards[[0, 5]] = np.nan
    kept = ~np.isnan(rewards).any(axis=1)
    law, of_kept = make(rewards), make(rewards[kept])
    np.testing.assert_array_equal(law.log_ratios_PK[kept], of_kept.log_ratios_PK)
    assert np.isnan(law.log_ratios_PK[~kept]).all()
    assert np.isnan(law.shaped_PK).all(axis=1).tolist() == (~kept).tolist()
    some = Rollouts(rollouts.asked.filter(kept), rollouts.drawn.filter(np.repeat(kept, 8)))
    found = weights(fit(model, rollouts, law, **HOW))
    assert equal(found, weights(fit(model, some, of_kept, **HOW)))
    assert not equal(found, weights(model))
    few = np.full_like(rewards, np.nan)
    few[1:3] = np.arange(8)
    with pytest.raises(DataError, match="2 prompts have rewards, and a training needs at least 3"):
        fit(model, rollouts, make(few), **HOW)
    rewards[1, 0] = np.nan
    with pytest.raises(DataError, match="rewards must be finite"):
        make(rewards)


def test_rollouts_of_another_model_are_refused(model: str, rollouts: Rollouts) -> None:
    """By the log-probabilities that they were drawn with, or tokens that it does not have."""
    other, tokenizer = Policy.of(model)
    torch.nn.init.normal_(other.get_input_embeddings().weight, std=3.0)
    with pytest.raises(DataError, match="of another model: their log-probabilities differ"):
        fit((other, tokenizer), rollouts, tilted(score(vowels, rollouts), "raw", kl=0.1), **HOW)
    other.generation_config.do_sample, other.generation_config.temperature = False, 0.5
    with pytest.raises(ConfigError, match=r"the loaded model, which cannot be saved: ValueError: .*temperature"):
        fit((other, tokenizer), rollouts, tilted(score(vowels, rollouts), "raw", kl=0.1), **HOW)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template; choose a model"):
        fit((other, tokenizer), rollouts, tilted(score(vowels, rollouts), "raw", kl=0.1), **HOW)


def test_a_policy_that_gains_nothing_is_the_reference_and_that_is_said(model: str, rollouts: Rollouts) -> None:
    """With rewards that are noise."""
    law = tilted(np.random.default_rng(0).normal(size=(12, 8)), "raw", kl=0.1)
    with pytest.warns(UserWarning, match="the policy is the reference"):
        policy = fit(model, rollouts, law, **HOW)
    assert equal(weights(policy), weights(model))
