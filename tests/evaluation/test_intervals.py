"""Intervals against simulation and closed forms."""

from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit
from scipy.stats import binom, multinomial

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.intervals import Estimate, estimate, estimate_difference, estimate_share
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates, win_rates_of
from infalign.method.procedures import BestOfN, WorstOfN


@pytest.mark.parametrize(
    ("procedure", "strength", "interval", "prompts", "low", "high"),
    [
        (BestOfN(4), lambda rng: rng.gamma(4, 0.6, size=(20000, 1)), estimate, 20, 0.93, 0.97),
        (BestOfN(4), lambda rng: rng.gamma(4, 0.6, size=(20000, 1)), estimate, 200, 0.93, 0.97),
        (WorstOfN(4), lambda rng: 15 * np.exp(0.9 * rng.normal(size=(20000, 1))), estimate_share, 50, 0.94, 1.0),
    ],
    ids=["20", "200", "nearly always wins"],
)
def test_intervals_cover(procedure: Any, strength: Any, interval: Any, prompts: int, low: float, high: float) -> None:
    """95 % intervals of skewed win rates, one with mean 98.6 %, cover the mean in 93–97 % of 600 simulations."""
    rng = np.random.default_rng(9)
    u, v = rng.random((20000, 12)) ** (1 / strength(rng)), rng.random((20000, 12))
    (population,) = win_rates_of(Samples(u, u), Samples(v, v), [procedure])
    found = [interval(rng.choice(population, prompts), seed=seed) for seed in range(600)]
    assert low <= np.mean([e.low <= population.mean() <= e.high for e in found]) <= high


@pytest.mark.parametrize("prompts", [20, 50, 200])
@pytest.mark.parametrize("won", [0.9, 0.98, 0.995])
def test_intervals_cover_near_the_end(prompts: int, won: float) -> None:
    """Outcomes 0 and 1: the exact coverage, summed over all counts of wins, is at least 94 %, and so when mirrored."""
    counts = np.arange(prompts + 1)
    chance = binom.pmf(counts, prompts, won)
    kept = counts[chance > 1e-6]
    found = [estimate_share(np.arange(prompts) < count) for count in kept]
    covered = [e.low <= won <= e.high for e in found]
    assert chance[kept] @ covered > 0.94
    for count, e in zip(kept, found, strict=True):
        mirrored = estimate_share(np.arange(prompts) >= count)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((e.low, e.high), abs=0.02)


@pytest.mark.parametrize(("prompts", "won", "lost"), [(20, 0.03, 0.01), (20, 0.05, 0.0), (80, 0.01, 0.002)])
def test_intervals_cover_rare_differences(prompts: int, won: float, lost: float) -> None:
    """Few prompts of which a policy wins or loses one outright: the exact coverage, over all counts, is above 93 %."""
    covered = 0.0
    for up, down in np.ndindex(8, 5):
        chance = multinomial.pmf([up, down, prompts - up - down], prompts, [won, lost, 1 - won - lost])
        if chance > 1e-3:
            found = estimate_difference(np.repeat([1.0, -1.0, 0.0], [up, down, prompts - up - down]))
            covered += chance * (found.low <= won - lost <= found.high)
    assert covered > 0.93
    tie = estimate_difference(np.zeros(prompts))
    assert -0.2 < tie.low < -0.03 < 0.03 < tie.high < 0.2


@pytest.mark.parametrize("prompts", [2, 20, 300])
def test_all_won_is_not_certain(prompts: int) -> None:
    """Of P prompts all won the interval ends at Clopper and Pearson's (α/2)^(1/P), all lost at its mirror image."""
    least = 0.025 ** (1 / prompts)
    assert estimate_share(np.ones(prompts)) == Estimate(1.0, pytest.approx(least, abs=0.02 * (1 - least) + 5e-3), 1.0)
    lost = estimate_share(np.zeros(prompts), confidence=0.8)
    assert lost == Estimate(0.0, 0.0, pytest.approx(1 - 0.1 ** (1 / prompts), rel=0.06))


@pytest.mark.parametrize("noise", [1e-15, 1e-9, 1e-5])
@pytest.mark.parametrize(("prompts", "few"), [(20, 1), (80, 1), (500, 2)])
def test_values_that_hardly_differ_are_equal(prompts: int, few: int, noise: float) -> None:
    """As pass@k gives them: a few prompts decide, many a resample has none of them, and its spread says nothing."""
    equal = (np.arange(prompts) < few).astype(float)
    nearly = equal + noise * (np.arange(prompts) % 2)
    for interval in (estimate, estimate_share, estimate_difference):
        found, exact = interval(nearly), interval(equal)
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high), rel=0.05, abs=2.0 * noise)


@pytest.mark.parametrize("prompts", [24, 60])
def test_the_intervals_of_worst_of_n_change_smoothly_with_n(prompts: int) -> None:
    """Ever fewer prompts of a checker decide: no N has an interval that sticks out from those of its neighbors."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        rates = rng.beta(0.6, 1.4, prompts)[:, None]
        ours, theirs = (rng.random((prompts, 32)) < rate for rate in (rates**0.8, rates))
        ends = np.array(
            [(e.low, e.high) for n in range(2, 32) for e in [win_rates(ours, theirs, f"worst-of-{n}", seed=seed)]]
        )
        inner, beside = ends[1:-1], np.stack([ends[:-2], ends[2:]])
        assert (inner[:, 1] - beside[:, :, 1].max(axis=0)).max() < 0.006
        assert (beside[:, :, 0].min(axis=0) - inner[:, 0]).max() < 0.006


def test_away_from_the_end_the_interval_is_the_bootstraps() -> None:
    """Neither a middling mean nor one near 1 that many prompts share changes the interval, also for many prompts."""
    rng = np.random.default_rng(0)
    for values in (rng.random(20), rng.beta(5, 1, 80), 1 - 0.05 * rng.random(60), 1 - 0.05 * rng.random(10_001)):
        assert estimate_share(values) == estimate(values)
    wide = estimate_share([0.3, 0.9, 1.2, 1.1, 1.3])  # unbiased estimates of single prompts
    assert wide.mean == pytest.approx(0.96)
    assert (wide.low < 0.8, wide.high) == (True, 1.0)


def test_an_interval_repeats_with_its_seed_and_contains_the_mean() -> None:
    """The same seed gives the same interval, another one nearly so, a higher confidence a wider one."""
    values = np.random.default_rng(0).beta(5, 1, size=80)
    once = estimate(values, seed=1)
    assert once == estimate(values, seed=1)
    assert once != estimate(values, seed=2)
    for interval in (estimate, estimate_share, estimate_difference):  # in any order of the prompts
        for some in (values, values**0.01, 0.1 * (values < 0.6)):
            assert interval(some) == interval(some[::-1])
    assert once.low == pytest.approx(estimate(values, seed=2).low, abs=0.2 * (once.high - once.low))
    wide = estimate(values, confidence=0.99)
    assert wide.low < once.low < once.mean < once.high < wide.high


def test_the_interval_of_many_prompts_is_the_limit_of_the_bootstrap() -> None:
    """Just above 10,000 prompts the interval is the one just below, for a skewed law, within the bootstrap's noise."""
    values = np.random.default_rng(1).exponential(size=10_001) ** 2
    below, above = estimate(values[:-1]), estimate(values)
    width = above.high - above.low
    assert above.low == pytest.approx(below.low, abs=0.05 * width)
    assert above.high == pytest.approx(below.high, abs=0.05 * width)


def test_an_interval_needs_two_prompts_and_finite_values() -> None:
    """Equal values have one without width."""
    assert estimate([0.75, 0.75, 0.75]) == Estimate(0.75, 0.75, 0.75)
    assert estimate([0.4, 0.6]).low == pytest.approx(0.5 - 0.1 * stdtrit(1, 0.975))  # Student's
    with pytest.raises(DataError, match="at least 2 prompts, found 1"):
        estimate([0.5])
    with pytest.raises(DataError, match="prompt 1 is not finite"):
        estimate([0.5, np.nan])
    for confidence in (95, 1 - 1e-16):  # a half of the other rounds to 0
        with pytest.raises(ConfigError, match=f"found {confidence}"):
            estimate([0.5, 0.6], confidence=confidence)


LAWS = {
    "graded": np.random.default_rng(0).beta(2, 3, size=40),
    "few lost": np.arange(30) < 27.0,
    "one won": np.eye(1, 20)[0],
    "skewed": np.random.default_rng(1).random(60) ** 9,
    "many prompts": np.eye(1, 10_001)[0],
    "two prompts": np.array([0.4, 0.6]),
}


@pytest.mark.parametrize("values", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("interval", [estimate, estimate_share, estimate_difference])
def test_no_higher_confidence_is_a_narrower_interval(interval: Any, values: Any) -> None:
    """From .5 to .9999, also where resampling ends, and the mean is always inside."""
    levels = [*np.linspace(0.5, 0.99, 8), 0.998, 0.9985, 0.999, 0.9991, 0.9995, 0.9999]
    found = [interval(values, confidence=float(level)) for level in levels]
    assert np.all(np.diff([one.low for one in found]) <= 1e-12)
    assert np.all(np.diff([one.high for one in found]) >= -1e-12)
    assert all(one.low <= one.mean <= one.high for one in found)


@pytest.mark.parametrize("prompts", [20, 300])
def test_rounding_at_an_end_is_the_end(prompts: int) -> None:
    """As sums of weights give 1 − 1e-16: the interval is that of prompts that are all won, or all tie."""
    noise = 1.1e-16 * (np.arange(prompts) % 3)
    for interval, end in ((estimate_share, 1.0), (estimate_share, 0.0), (estimate_difference, 0.0)):
        found, exact = interval(np.abs(end - noise)), interval(np.full(prompts, end))
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-12)
        assert found.high - found.low > 0.5 / prompts
