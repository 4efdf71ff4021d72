"""Estimators against enumeration over all subsets, and intervals against simulation."""

from fractions import Fraction
from itertools import combinations, permutations, product

import numpy as np
import pytest

from infalign.errors import ConfigError, DataError
from infalign.evaluation import Samples, estimate, matched, rewind_draws, uniformity, win_rates
from infalign.procedures import BestOfN, Procedure, RewindAndRepeat, Standard, WorstOfN, parse_procedure
from infalign.theory import law_at_kl
from infalign.transforms import Exponential, parse_transform


def served_by_enumeration(rewards: list[int], procedure: Procedure, threshold: float) -> list[Fraction]:
    """Return the exact probability that each sample is served when the procedure draws without replacement."""
    weights = [Fraction(0)] * len(rewards)
    if isinstance(procedure, RewindAndRepeat):
        orders = list(permutations(range(len(rewards)), procedure.n))
        for order in orders:
            served = next((i for i in order if rewards[i] >= threshold), order[-1])
            weights[served] += Fraction(1, len(orders))
        return weights
    n = getattr(procedure, "n", 1)
    pick = min if isinstance(procedure, WorstOfN) else max
    subsets = list(combinations(range(len(rewards)), n))
    for subset in subsets:
        chosen = [i for i in subset if rewards[i] == pick(rewards[j] for j in subset)]
        for i in chosen:
            weights[i] += Fraction(1, len(subsets) * len(chosen))
    return weights


@pytest.mark.parametrize(
    "procedure",
    [Standard(), BestOfN(1), BestOfN(2), BestOfN(4), BestOfN(6), WorstOfN(3), WorstOfN(6), RewindAndRepeat(0.5, 3)],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_enumeration_over_all_draws(procedure: Procedure, seed: int) -> None:
    """Each sample's weight is the share of all draws without replacement that serve it, with ties shared evenly."""
    rewards = np.random.default_rng(seed).integers(0, 4, size=6).tolist()  # many ties
    exact = served_by_enumeration(rewards, procedure, threshold=2.0)
    assert procedure.weights([rewards], [2.0])[0] == pytest.approx([float(w) for w in exact], abs=1e-12)


@pytest.mark.parametrize("procedure", [Standard(), BestOfN(2), WorstOfN(3)], ids=lambda p: p.name)
@pytest.mark.parametrize("seed", range(4))
def test_win_rate_equals_brute_force_with_another_judge(procedure: Procedure, seed: int) -> None:
    """Selecting by one reward and judging by another gives the mean over all pairs of draws, ties in either at 1/2."""
    rng = np.random.default_rng(seed)
    policy, base = (Samples(*rng.integers(0, 3, size=(2, 1, size)).astype(float)) for size in (5, 4))
    a = served_by_enumeration(policy.selected[0].tolist(), procedure, 0)
    b = served_by_enumeration(base.selected[0].tolist(), procedure, 0)
    exact = sum(
        a[i] * b[j] * (Fraction(int(2 * (y > z) + (y == z)), 2))
        for (i, y), (j, z) in product(enumerate(policy.judged[0]), enumerate(base.judged[0]))
    )
    assert win_rates(policy, base, procedure) == pytest.approx([float(exact)], abs=1e-12)


@pytest.mark.parametrize("procedure", [Standard(), BestOfN(4), WorstOfN(4), BestOfN(16)], ids=lambda p: p.name)
def test_samples_of_a_known_law_reach_its_analytic_win_rate(procedure: Standard | BestOfN | WorstOfN) -> None:
    """For a policy with a known density the estimate is within three standard errors of the theory's win rate."""
    rng = np.random.default_rng(0)
    law = law_at_kl(Exponential(5), kl=0.7)
    policy = np.interp(rng.random((2000, 24)), law.cdf.ravel(), law.u.ravel())
    base = rng.random((2000, 20))
    wins = win_rates(Samples(policy, policy), Samples(base, base), procedure)
    assert wins.mean() == pytest.approx(law.win_rate(procedure), abs=3 * wins.std() / np.sqrt(wins.size))


def test_rewind_serves_and_counts_as_the_closed_form_says() -> None:
    """With uniform rewards W and the draws of Rewind-and-Repeat equal their closed forms within three errors."""
    rng = np.random.default_rng(1)
    procedure = RewindAndRepeat(0.75, 4)
    base = rng.random((4000, 512))
    policy = rng.random((4000, 8)) ** 0.5  # CDF u²
    p = 0.75**2
    wins = win_rates(Samples(policy, policy), Samples(base, base), procedure)
    draws = rewind_draws(Samples(policy, policy), Samples(base, base), procedure)
    u = (np.arange(200_000) + 0.5) / 200_000
    served = np.where(u < 0.75, p**3 * u**2, p**4 + (1 - p**4) * (u**2 - p) / (1 - p))
    base_density = np.where(u < 0.75, 0.75**3, (1 - 0.75**4) / 0.25)
    # The threshold is estimated from 256 samples, so its own noise is allowed for.
    assert wins.mean() == pytest.approx(1 - np.mean(served * base_density), abs=0.01)
    assert draws.mean() == pytest.approx((1 - p**4) / (1 - p), abs=0.02)


def test_base_against_base_is_one_half() -> None:
    """Fresh base samples win half of the time under every procedure, within three standard errors."""
    rng = np.random.default_rng(2)
    one, two = rng.normal(size=(2, 1500, 40))
    for procedure in (Standard(), BestOfN(8), WorstOfN(8), RewindAndRepeat(0.85, 16)):
        wins = win_rates(Samples(one, one), Samples(two, two), procedure)
        assert wins.mean() == pytest.approx(0.5, abs=3 * wins.std() / np.sqrt(wins.size)), procedure.name


def test_more_draws_than_samples_is_an_error() -> None:
    """Best-of-8 from four samples does not exist."""
    four = Samples(np.zeros((2, 4)), np.zeros((2, 4)))
    with pytest.raises(DataError, match=r"best-of-8 cannot be estimated from 4 samples"):
        win_rates(four, four, BestOfN(8))
    with pytest.raises(DataError, match=r"rewind:0.5:4 needs 8 base samples"):
        win_rates(four, four, RewindAndRepeat(0.5, 4))


def test_a_nan_reward_is_refused_with_its_place() -> None:
    """A reward that is not finite is named by prompt and sample."""
    rewards = np.zeros((3, 4))
    rewards[1, 2] = np.nan
    with pytest.raises(DataError, match="prompt 1, sample 2 is nan"):
        BestOfN(2).weights(rewards)


def test_intervals_cover() -> None:
    """95 % intervals over 60 prompts cover the true mean in 91–98 % of 400 simulations."""
    rng = np.random.default_rng(3)
    covered = []
    for seed in range(400):
        interval = estimate(rng.beta(2, 1, size=60), seed=seed)
        covered.append(interval.low <= 2 / 3 <= interval.high)
    assert 0.91 <= np.mean(covered) <= 0.98


def test_an_interval_needs_two_prompts() -> None:
    """One prompt gives no interval."""
    with pytest.raises(DataError, match="at least 2 prompts, found 1"):
        estimate([0.5])


def test_matched_interpolates_the_share_of_theorys_gain() -> None:
    """A policy's own KL gives its own win rates; elsewhere its share of the curve is linear; beyond, it is refused."""

    def gain(kl: float) -> float:
        return 0.4 * np.sqrt(kl)

    budgets = [(np.full(3, 4.0), np.full(3, 0.9)), (np.full(3, 1.0), np.full(3, 0.8))]  # shares 1/2 and 3/4
    assert matched(budgets, 1.0, gain) == pytest.approx(0.8)
    assert matched(budgets, 0.25, gain) == pytest.approx(0.5 + 0.75 * 0.2)
    assert matched(budgets, 2.5, gain) == pytest.approx(0.5 + 0.625 * gain(2.5))
    with pytest.raises(DataError, match=r"no policy reaches a KL of 4\.5"):
        matched(budgets, 4.5, gain)


@pytest.mark.parametrize("transform", ["identity", "exp:10"])
@pytest.mark.parametrize("kl", [0.1, 0.4, 0.7, 0.9])
def test_matched_is_exact_for_a_policy_on_theorys_curve(transform: str, kl: float) -> None:
    """For policies that reach what theory gives, the win rate at any KL between is theory's."""

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform(transform), kl=kl).win_rate(BestOfN(4)) - 0.5

    budgets = [(np.array([x]), np.array([0.5 + gain(x)])) for x in (0.5, 1.0)]
    assert matched(budgets, kl, gain)[0] == pytest.approx(0.5 + gain(kl), abs=1e-9)


def test_uniformity_is_the_kolmogorov_distance() -> None:
    """The distance from Unif[0, 1] equals scipy's statistic without ties and 1/2 for a constant 1/2."""
    from scipy.stats import kstest

    u = np.random.default_rng(4).random(500)
    assert uniformity(u) == pytest.approx(kstest(u, "uniform").statistic)
    assert uniformity(np.full(10, 0.5)) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["standard", "best-of-4", "worst-of-32", "rewind:0.85:32"])
def test_procedures_round_trip_through_their_names(name: str) -> None:
    """A procedure's name spells it."""
    assert parse_procedure(name).name == name


@pytest.mark.parametrize("name", ["best-of-0", "best-of-x", "median", "rewind:1.5:3", "rewind:0.5", ""])
def test_an_unknown_procedure_is_refused(name: str) -> None:
    """A spelling that is none of ours is an error that says why."""
    with pytest.raises(ConfigError):
        parse_procedure(name)
