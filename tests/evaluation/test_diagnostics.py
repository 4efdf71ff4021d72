"""Diagnostics of ranks against scipy, simulation and closed forms."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from infalign.evaluation.diagnostics import agreement, rank_error


def test_rank_error_holds_for_all_ranks_at_once() -> None:
    """The largest error of a calibrated reward exceeds the band in at most 5 % of simulations, and in more than 2 %."""
    rng = np.random.default_rng(16)
    steps = np.sort(rng.random((4000, 40)), axis=1)
    worst = np.maximum(np.arange(1, 41) / 40 - steps, steps - np.arange(40) / 40).max(axis=1)
    assert 0.02 < np.mean(worst > rank_error(40)) <= 0.05


def test_agreement_is_spearmans_correlation_where_there_is_one() -> None:
    """As scipy has it, with ties; a prompt whose rewards all tie by one source is left out."""
    rng = np.random.default_rng(0)
    rewards, judged = rng.integers(0, 6, (2, 5, 12)).astype(float)
    judged[1], rewards[3] = 2.0, -1.0
    expected = [spearmanr(rewards[row], judged[row]).statistic for row in (0, 2, 4)]
    assert agreement(rewards, judged) == pytest.approx(expected)
    assert agreement(rewards[1:2], judged[1:2]).shape == (0,)
