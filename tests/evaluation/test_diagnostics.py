"""Diagnostics of ranks against scipy, simulation and closed forms."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from infalign.evaluation.diagnostics import agreement, best_of_n_by_judge, rank_error, saturation, turning_point
from infalign.evaluation.samples import Samples


def test_saturation_of_the_base_is_one_in_k_plus_one() -> None:
    """Fresh base samples beat all K references with probability 1/(K + 1); a better policy does so more often."""
    rng = np.random.default_rng(15)
    references, fresh = rng.random((4000, 9)), rng.random((4000, 5))
    assert saturation(fresh, references).mean() == pytest.approx(0.1, abs=0.01)
    assert saturation(fresh**0.1, references).mean() == pytest.approx(10 / 19, abs=0.02)  # ∫ u^9 dF, F = u^10


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


def gaussian(rho: float, prompts: int, samples: int, seed: int = 0) -> Samples:
    """Return samples whose reward and judge are jointly normal."""
    rng = np.random.default_rng(seed)
    reward, own = rng.standard_normal((2, prompts, samples))
    return Samples(reward, rho * reward + np.sqrt(1.0 - rho**2) * own)


def test_best_of_n_by_the_judge_is_that_of_fresh_draws() -> None:
    """N = 1 wins one half; every N agrees with one comparison a prompt on other samples, within its error."""
    sizes, won_NP = best_of_n_by_judge(gaussian(0.5, 2000, 32), 8)
    assert sizes == [1, 2, 4, 8]
    assert won_NP[0].mean() == pytest.approx(0.5, abs=1e-9)
    fresh = gaussian(0.5, 20_000, 9, seed=1)
    for n, wins in zip(sizes, won_NP, strict=True):
        best = fresh.judged[np.arange(20_000), fresh.selected[:, :n].argmax(axis=1)]
        assert wins.mean() == pytest.approx(np.mean(best > fresh.judged[:, -1]), abs=0.015)


def test_the_turning_point_is_said_only_where_it_is_sure() -> None:
    """A judge who dislikes the top turns at the N that wins most; one who agrees never does."""
    agreeing = gaussian(0.5, 300, 64)
    assert turning_point(*best_of_n_by_judge(agreeing, 32)) is None
    turned = Samples(agreeing.selected, np.where(agreeing.selected > 1.5, -agreeing.selected, agreeing.selected))
    sizes, won_NP = best_of_n_by_judge(turned, 32)
    found = turning_point(sizes, won_NP)
    assert found is not None
    assert found[0] == sizes[int(won_NP.mean(axis=1).argmax())] == 4
    assert found[1].low > 0.4
