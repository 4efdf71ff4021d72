"""Calibration: ranks, ties and refusals; and the reward function that trainers call."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.measures import pass_at_k
from infalign.evaluation.win_rates import win_rates
from infalign.method.calibration import calibrate, win
from infalign.method.group_advantages import advantages
from infalign.method.optimum import optimum
from infalign.method.reward import CalibratedReward
from infalign.method.transforms import Identity

REWARDS = st.integers(-50, 50).map(float)


@given(arrays(float, st.integers(1, 20), elements=REWARDS), arrays(float, st.integers(2, 20), elements=REWARDS))
def test_calibration_is_the_mean_win_over_the_references(rewards: np.ndarray, references: np.ndarray) -> None:
    """Ĉ(y) is the mean of w(y, z) over the references, ties included."""
    exact = win(rewards[:, None], references[None, :]).mean(axis=1)
    assert calibrate(rewards, np.sort(references)) == pytest.approx(exact)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    """NaN would rank as the best response, so it is an error on either side, with its place."""
    with pytest.raises(DataError, match=r"reward \(1,\) is"):
        calibrate([0.0, bad], [0.0, 1.0])
    with pytest.raises(DataError, match="reference reward"):
        calibrate([0.0], sorted([0.0, bad]))


NO_REWARDS = {
    "a str": [["0.5", "1"], ["0", "1"]],
    "a complex": [[1j, 2], [0, 1]],
    "a NoneType": [[None, 1.0], [0.0, 1.0]],
    "NoneType": np.ma.masked_array([[0, 1], [0, 1]], [[True, False], [False, False]]),
    "inf": [[10**400, 1], [0, 1]],
    "9007199254740993": [[2**53 + 1, 2**53], [0, 1]],
    "-9007199254740995": np.array([[-(2**53) - 3, 0], [0, 1]]),
    "inhomogeneous": [[1.0, [2.0]], [0.0, 1.0]],
}
ENTRANCES = {
    "calibrate": lambda rewards: calibrate(rewards, [[0.0, 1.0]] * 2),
    "references": lambda rewards: calibrate([[0.5]] * 2, rewards),
    "win": lambda rewards: win(rewards, 0.0),
    "optimum": lambda rewards: optimum(rewards, "best-of-2", kl=0.01),
    "advantages": lambda rewards: advantages(rewards[0], [0, 0], "rloo"),
    "pass_at_k": lambda rewards: pass_at_k(rewards, 1, threshold=0.5),
    "win_rates": lambda rewards: win_rates(rewards, [[0.0, 1.0]] * 2, "standard"),
    "function": lambda rewards: CalibratedReward(lambda prompts, responses: rewards[0], "exp:10")(
        ["p"] * 2, ["r"] * 2, [[0.0, 1.0]] * 2
    ),
    "column": lambda rewards: CalibratedReward(lambda prompts, responses: [1.0] * 2, "exp:10")(
        ["p"] * 2, ["r"] * 2, [*rewards]
    ),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("found", NO_REWARDS)
def test_what_is_no_number_is_refused_at_every_entrance(entrance: str, found: str) -> None:
    """Text, complex numbers and whole numbers that would tie as floats; not that they are turned into others."""
    with pytest.raises(DataError, match=found if found != "inhomogeneous" else "inhomogeneous|found a list"):
        ENTRANCES[entrance](NO_REWARDS[found])


def test_unusable_references_are_refused() -> None:
    """One reference gives no rank; unsorted references would give a wrong one; other prompts' none at all."""
    with pytest.raises(DataError, match="at least 2 reference rewards"):
        calibrate([0.0], [1.0])
    with pytest.raises(DataError, match="sorted in ascending order"):
        calibrate([0.0], [1.0, 0.0])
    with pytest.raises(DataError, match="rewards have 2 prompts, references 3"):
        calibrate(np.zeros((2, 4)), np.zeros((3, 4)))
    with pytest.raises(DataError, match=r"found an array of shape \(2, 2, 2\)"):
        calibrate(np.zeros((2, 2, 2)), np.zeros((2, 2, 2)))


def lengths(prompts: list[object], responses: list[str]) -> list[float]:
    """Score a response by its length."""
    return [float(len(r)) for r in responses]


def test_the_reward_function_ranks_each_completion_among_its_own_prompt() -> None:
    """Text and message completions alike become Φ of their rank among their own prompt's references, logged as such."""
    logged: dict[str, float] = {}
    reward = CalibratedReward(lengths, Identity())
    values = reward(
        ["p", "q"],
        ["aaa", [{"role": "assistant", "content": "aaa"}]],
        reference_rewards=[[1.0, 2.0, 3.0, 4.0], [3.0, 3.0]],
        log_metric=lambda name, value: logged.update({name: value}),
        another_column=[1, 2],
    )
    assert values == pytest.approx([2.5 / 4, 0.5])
    assert logged == {"win_rate": pytest.approx((2.5 / 4 + 0.5) / 2), "reward_model": 3.0}


def test_the_reward_function_refuses_what_trl_would_train_on() -> None:
    """A missing column, a NaN reward and a wrong number of rewards are errors, where TRL would go on in silence."""
    with pytest.raises(DataError, match="no column reference_rewards"):
        CalibratedReward(lengths, Identity())(["p"], ["a"])
    with pytest.raises(DataError, match="is nan"):
        CalibratedReward(lambda prompts, responses: [np.nan], Identity())(["p"], ["a"], reference_rewards=[[0.0, 1.0]])
    with pytest.raises(DataError, match="found 1 reference_rewards, but 2 responses"):
        CalibratedReward(lengths, Identity())(["p"] * 2, ["a"] * 2, reference_rewards=[[0.0, 1.0]])
    with pytest.raises(ConfigError, match=r"a reward function is needed, found 'mine\.py:check'; import it"):
        CalibratedReward("mine.py:check", Identity())
    with pytest.raises(DataError, match="returned 2 rewards for the 1 responses"):
        CalibratedReward(lambda prompts, responses: [0.0, 0.0], Identity())(
            ["p"], ["a"], reference_rewards=[[0.0, 1.0]]
        )


def test_all_that_the_assistant_says_is_scored() -> None:
    """Of a completion with tools its turns together; nothing said is an empty text, and what is no message is named."""
    turns = [("assistant", "Let me look."), ("tool", "7"), ("assistant", None), ("assistant", "Seven.")]
    completion = [{"role": role, "content": content} for role, content in turns]
    seen: list[str] = []
    reward = CalibratedReward(
        lambda prompts, responses: (seen.extend(responses), [0.0] * len(responses))[1], "identity"
    )
    reward(["p"] * 2, [completion, []], reference_rewards=[[0.0, 1.0]] * 2)
    assert seen == ["Let me look.\n\nSeven.", ""]
    with pytest.raises(DataError, match="completion 0 must be text or a list of messages"):
        reward(["p"], [[{"text": "a"}]], reference_rewards=[[0.0, 1.0]])
