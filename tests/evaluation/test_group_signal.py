"""The share of groups with a gradient, against every group that stored verdicts and known pass rates can give."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import betabinom

from infalign import advantages, groups_with_signal
from infalign.core.errors import DataError

SILENT = {8: 0.829, 16: 0.457, 32: 0.306}  # of pass@8, for pass rates of Beta(0.4, 1.6)


@pytest.mark.parametrize("objective", ["pass@3", "pass^2", "maxrl", "grpo"])
def test_up_to_the_stored_responses_it_is_the_share_of_all_their_groups(objective: str) -> None:
    """Every set of the responses of a prompt, also where their numbers differ."""
    rewards = [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    for size, found in zip((3, 4), groups_with_signal(rewards, objective, (3, 4)), strict=True):
        shares = [
            np.mean([advantages(group, [0] * size, objective).any() for group in combinations(row, size)])
            for row in rewards
        ]
        assert found.mean == pytest.approx(np.mean(shares))
        assert found.low <= found.mean <= found.high


@pytest.mark.parametrize("size", SILENT)
def test_groups_of_eight_are_nearly_all_silent_for_pass_at_8(size: int) -> None:
    """A group needs a right response and 7 wrong ones; 16 stored responses bound groups of 32."""
    rates = np.random.default_rng(0).beta(0.4, 1.6, 3000)
    rewards = (np.random.default_rng(1).random((3000, 16)) < rates[:, None]).astype(float)
    (found,) = groups_with_signal(rewards, "pass@8", [size])
    silent = 1.0 - betabinom(size, 0.4, 1.6).pmf(np.arange(1, size - 6)).sum()
    assert silent == pytest.approx(SILENT[size], abs=1e-3)
    assert found.low <= 1.0 - silent <= found.high
    assert found.mean == pytest.approx(1.0 - silent, abs=0.03)


def test_what_is_no_group_is_refused() -> None:
    """Groups that are too small for the objective, and graded rewards without a threshold."""
    with pytest.raises(DataError, match="pass@4 needs at least 4 responses per group; one group has 2"):
        groups_with_signal([[0, 1], [1, 1]], "pass@4", [2])
    with pytest.raises(DataError, match="not all 0 or 1"):
        groups_with_signal([[0.5, 1.0], [1.0, 0.0]], "maxrl", [2])
    assert groups_with_signal([[0.5, 1.0], [1.0, 0.0]], "maxrl", [2], threshold=1.0)[0].mean == 1.0
