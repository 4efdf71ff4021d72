"""The judge's view of the reward, estimated from samples: against rewards and judges whose law is known."""

import numpy as np
import pytest
from judges import GaussianJudge

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.judge import best_of_n_by_judge, estimated_judge, judged_chances, turning_point
from infalign.evaluation.samples import Samples
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN

SCORES = np.linspace(-2.0, 2.0, 9)


def gaussian(rho: float, prompts: int, samples: int, seed: int = 0) -> Samples:
    """Return samples whose reward and judge are jointly normal."""
    rng = np.random.default_rng(seed)
    reward, own = rng.standard_normal((2, prompts, samples))
    return Samples(reward, rho * reward + np.sqrt(1.0 - rho**2) * own)


@pytest.mark.parametrize("procedure", [Standard(), BestOfN(4), WorstOfN(2)])
def test_a_gaussian_judge_is_found(procedure: Standard | BestOfN | WorstOfN) -> None:
    """1,000 prompts × 32 samples show A to a point or two, and the resampled judges say how far it is off."""
    found = estimated_judge(gaussian(0.7, 1000, 32), procedure)
    known, fitted = GaussianJudge(0.7, procedure).chance(SCORES), found.judge.chance(SCORES)
    assert np.abs(fitted - known).max() < 0.02
    assert (np.abs(fitted - known) < 4.0 * found.resampled.chance(SCORES).std(axis=0) + 0.002).all()
    assert found.misfit <= found.noise


def test_intervals_of_the_judge_cover() -> None:
    """In 60 repetitions with 60 prompts × 16 samples, 95 % intervals of A at the median and at 0.9 hold A 50 times."""
    scores = np.array([0.0, 1.28])
    known, held = GaussianJudge(0.6, BestOfN(2)).chance(scores), np.zeros(2)
    for seed in range(60):
        found = estimated_judge(gaussian(0.6, 60, 16, seed), BestOfN(2))
        low, high = np.quantile(found.resampled.chance(scores), (0.025, 0.975), axis=0)
        held += (low <= known) & (known <= high)
    assert (held >= 50).all()


def test_chances_are_unbiased_for_finite_ranks() -> None:
    """By the reward itself the r-th lowest of H beats one more draw with r/(H + 1), and Best-of-2 with r(r+1)/…."""
    samples = gaussian(1.0, 20_000, 8)
    r = np.arange(1, 5)
    plain = judged_chances(samples, Standard())
    assert plain.mean(axis=0) == pytest.approx(r / 5, abs=0.005)
    assert judged_chances(samples, BestOfN(2)).mean(axis=0) == pytest.approx(r * (r + 1) / 30, abs=0.005)


def test_a_judge_who_turns_is_followed() -> None:
    """Where a judge falls steeply above the 0.9 quantile, more knots are taken and the fit falls there."""
    samples = gaussian(0.7, 400, 64)
    turned = Samples(samples.selected, samples.judged - 6.0 * np.maximum(samples.selected - 1.3, 0.0))
    found = estimated_judge(turned, BestOfN(4))
    chances = found.judge.chance(np.array([0.0, 1.2, 2.0]))
    assert chances[1] > chances[0] + 0.1
    assert chances[2] < chances[1] - 0.4
    assert len(found.judge.knots) > len(estimated_judge(samples, BestOfN(4)).judge.knots)


def won(samples: Samples, n: int) -> Array:
    """Return by brute force how often the best of the first N beats the last sample by the judge, (P,)."""
    best = samples.selected[:, :n].argmax(axis=1)
    return np.asarray(samples.judged[np.arange(len(best)), best] > samples.judged[:, -1], float)


def test_best_of_n_by_the_judge_is_that_of_fresh_draws() -> None:
    """N = 1 wins one half; every N agrees with one comparison a prompt on other samples, within its error."""
    sizes, won_NP = best_of_n_by_judge(gaussian(0.5, 2000, 32), 8)
    assert sizes == [1, 2, 4, 8]
    assert won_NP[0].mean() == pytest.approx(0.5, abs=1e-9)
    fresh = gaussian(0.5, 20_000, 9, seed=1)
    for n, wins in zip(sizes, won_NP, strict=True):
        assert wins.mean() == pytest.approx(won(fresh, n).mean(), abs=0.015)


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


def test_too_little_is_refused() -> None:
    """Fewer than 8 samples, fewer than 4 prompts, a procedure that draws more than half of them, and rewind."""
    with pytest.raises(ConfigError, match=r"rewind:0\.85:4 is not"):
        estimated_judge(gaussian(0.5, 10, 40), RewindAndRepeat(0.85, 4))
    for prompts, samples, procedure, words in (
        (10, 7, Standard(), "at least 8 samples per prompt, found 7"),
        (3, 8, Standard(), "at least 4 prompts, found 3"),
        (10, 8, BestOfN(5), "best-of-5 cannot be estimated from 4 samples"),
    ):
        with pytest.raises(DataError, match=words):
            estimated_judge(gaussian(0.5, prompts, samples), procedure)
