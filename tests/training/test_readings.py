"""What is read of a rank on the way: known exactly where the law is, and never from the prompt itself."""

import numpy as np
import pytest
from scipy.special import ndtri

from infalign.core.errors import DataError
from infalign.method.calibration import calibrate
from infalign.training import readings
from infalign.training.readings import read_from_log_ratios, read_on_the_way


def silent(*_: object) -> None:
    """Report no progress."""


def world(prompts: int, k: int, tokens: int, *, noise: float) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Return states of three numbers a token, and rewards: the sum of the first, and noise that no state tells of."""
    rng = np.random.default_rng(0)
    states = [[rng.standard_normal((tokens, 3)).astype(np.float32) for _ in range(k)] for _ in range(prompts)]
    told = np.array([[one[:, 0].sum() for one in of_prompt] for of_prompt in states])
    return states, told + rng.normal(0, noise * np.sqrt(tokens), told.shape)


def test_correlations_are_those_of_a_world_that_is_known() -> None:
    """After t of L independent tokens a Gaussian sum is known with a correlation of √(t/L), less what is noise."""
    states, rewards = world(200, 16, 8, noise=0.5)
    read = read_on_the_way(lambda prompt: states[prompt], rewards, seed=0, on_progress=silent)
    rho = read[0][0][:, 1]
    assert rho == pytest.approx(np.sqrt(np.arange(1, 9) / 8 / 1.25), abs=0.05)
    scores = ndtri(calibrate(rewards, np.sort(rewards, axis=1)))
    last = np.array([[one[-1, 0] for one in of_prompt] for of_prompt in read])
    assert np.corrcoef(last.ravel(), scores.ravel())[0, 1] == pytest.approx(rho[-1], abs=0.02)
    assert np.std(last) == pytest.approx(1.0)


def test_nothing_is_read_of_rewards_that_states_do_not_tell_of() -> None:
    """Regressors outnumber prompts, and yet no prompt's own rewards are in what is read of it."""
    states, _ = world(40, 8, 4, noise=0.0)
    rewards = np.random.default_rng(1).standard_normal((40, 8))
    read = read_on_the_way(lambda prompt: states[prompt], rewards, seed=0, on_progress=silent)
    assert max(abs(one[:, 1]).max() for of_prompt in read for one in of_prompt) < 0.15


def test_responses_end_at_different_lengths() -> None:
    """Each has a row a token; where too few are as long, ρ is what it was."""
    states, rewards = world(60, 8, 6, noise=0.5)
    states = [[one[: 1 + (p + i) % 6] for i, one in enumerate(of_prompt)] for p, of_prompt in enumerate(states)]
    read = read_on_the_way(lambda prompt: states[prompt], rewards, seed=0, on_progress=silent)
    assert [[len(one) for one in row] for row in read] == [[len(one) for one in row] for row in states]
    assert all(np.isfinite(one).all() for row in read for one in row)
    longest = max((one for row in read for one in row), key=len)
    assert longest[4, 1] == longest[5, 1]


def test_of_many_tokens_some_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regression takes every so manieth token; prompts whose responses are shorter than that are read too."""
    monkeypatch.setattr(readings, "TOKENS", 1500)
    states, rewards = world(200, 16, 8, noise=0.5)
    states[7] = [one[:1] for one in states[7]]
    read = read_on_the_way(lambda prompt: states[prompt], rewards, seed=0, on_progress=silent)
    assert read[0][0][:, 1] == pytest.approx(np.sqrt(np.arange(1, 9) / 8 / 1.25), abs=0.06)
    assert read[7][0].shape == (1, 2)


def test_too_few_prompts_are_refused() -> None:
    """Folds need two prompts each."""
    states, rewards = world(7, 4, 3, noise=0.1)
    with pytest.raises(DataError, match="needs at least 8 prompts, found 7"):
        read_on_the_way(lambda prompt: states[prompt], rewards, seed=0, on_progress=silent)
    with pytest.raises(DataError, match="it was on all but 1 of 7"):
        read_from_log_ratios([np.ones(3)] * 28, rewards, slice(None, None, 10))


def test_a_policy_tells_of_ranks_by_its_running_sum() -> None:
    """ρ is that of prompts it has not seen, of which it knows half as much here; what a prompt adds is left out."""
    states, rewards = world(400, 16, 8, noise=0.0)
    rng = np.random.default_rng(2)
    log_ratios = [one[:, 0] + 5.0 * (prompt % 7) for prompt, of_prompt in enumerate(states) for one in of_prompt]
    for row in range(len(log_ratios)):
        if row // 16 % 2 == 0:
            log_ratios[row] = log_ratios[row] + rng.standard_normal(8)
    read = read_from_log_ratios(log_ratios, rewards, slice(None, None, 2))
    assert read[1][3][:, 1] == pytest.approx(np.sqrt(np.arange(1, 9) / 8 / 2), abs=0.05)
    seen = np.array([[one[-1, 0] for one in of_prompt] for of_prompt in read[1::2]])
    assert seen.mean(axis=1) == pytest.approx(0.0, abs=1e-5)
    scores = ndtri(calibrate(rewards, np.sort(rewards, axis=1)))
    assert np.corrcoef(seen.ravel(), scores[1::2].ravel())[0, 1] > 0.95


def test_a_policy_tells_of_responses_of_different_lengths() -> None:
    """Each has a row a token, the empty one none; ρ is known of few rollouts too."""
    rewards = np.random.default_rng(0).standard_normal((12, 4))
    log_ratios = [np.full(row % 4, 0.1) for row in range(48)]
    read = read_from_log_ratios(log_ratios, rewards, slice(None, None, 10))
    assert [one.shape for of_prompt in read for one in of_prompt] == [(row % 4, 2) for row in range(48)]
    assert all(np.isfinite(one).all() for of_prompt in read for one in of_prompt)
