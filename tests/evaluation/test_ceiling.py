"""How well ranks are read from states: known correlations are found, and none where there is none."""

import numpy as np
import pytest

from infalign.core.errors import DataError
from infalign.evaluation.ceiling import readable


@pytest.mark.parametrize("known", [0.0, 0.4, 0.8, 1.0])
def test_what_states_know_of_a_rank_is_found(known: float) -> None:
    """Two of 20 states hold part of the reward's normal score, each prompt has a level of its own, and rewards a scale.

    What finite samples cost: 200 prompts × 16 give ρ to within 0.03, and a reading of nothing is no better than chance.
    """
    rng = np.random.default_rng(0)
    scores, states = rng.normal(size=(200, 16)), rng.normal(size=(200, 16, 20))
    states[..., 3] = known * scores + np.sqrt(1 - known**2) * states[..., 3] + 5 * rng.normal(size=(200, 1))
    found = readable(states, np.exp(scores))
    assert found.shape == (200,)
    assert found.mean() == pytest.approx(known, abs=0.03)


def test_a_state_that_only_tells_prompts_apart_reads_nothing() -> None:
    """Ranks are within a prompt."""
    rng = np.random.default_rng(1)
    level = rng.normal(size=(60, 1))
    states = np.repeat(level, 8, axis=1)[..., None] + 0.01 * rng.normal(size=(60, 8, 1))
    assert abs(readable(states, level + rng.normal(size=(60, 8))).mean()) < 0.1


def test_prompts_whose_rewards_tie_are_left_out() -> None:
    """And too few others are an error."""
    rng = np.random.default_rng(2)
    states, rewards = rng.normal(size=(12, 8, 3)), rng.normal(size=(12, 8))
    rewards[:4] = 1.0
    assert readable(states, rewards).shape == (8,)
    rewards[4] = 0.0
    with pytest.raises(DataError, match="at least 8 prompts of different rewards, found 7"):
        readable(states, rewards)
