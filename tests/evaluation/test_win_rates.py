"""Estimators against enumeration over all subsets, and intervals against simulation."""

from fractions import Fraction
from itertools import combinations, permutations, product

import numpy as np
import pytest
from scipy.integrate import quad, simpson
from scipy.optimize import brentq, minimize
from scipy.special import expit, softmax
from scipy.stats import beta, binom, norm, spearmanr

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.best_of_n import best_of_n_kl, best_of_n_kl_bound, best_of_n_kl_given
from infalign.evaluation.diagnostics import agreement, rank_error, saturation, uniformity
from infalign.evaluation.intervals import Estimate, estimate, estimate_share
from infalign.evaluation.length import length_controlled
from infalign.evaluation.matched import matched, widened
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws, threshold_weights, tie_rate, win_rates, win_rates_of
from infalign.method.procedures import (
    BestOfN,
    Mixture,
    OrderStatistics,
    Procedure,
    RewindAndRepeat,
    Standard,
    WorstOfN,
    parse_procedure,
)
from infalign.method.transforms import parse_transform
from infalign.theory.finite_model import FiniteModel
from infalign.theory.law import law_at_kl


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


PROCEDURES = [
    *(kind(n) for kind in (BestOfN, WorstOfN) for n in range(1, 6)),
    *map(parse_procedure, ("standard", "2nd-best-of-3", "top-2-of-4", "0.25*best-of-5+0.75*standard")),
]


def probabilities(procedure: Procedure) -> list[tuple[Fraction, list[float]]]:
    """Return (weight, probability of each rank that is served) for every part of a rank procedure."""
    if isinstance(procedure, Mixture):
        return [(Fraction(w), q) for w, part in procedure.parts for _, q in probabilities(part)]
    if isinstance(procedure, OrderStatistics):
        return [(Fraction(1), list(procedure.probabilities))]
    n = getattr(procedure, "n", 1)
    served = 0 if isinstance(procedure, WorstOfN) else n - 1
    return [(Fraction(1), [float(i == served) for i in range(n)])]


def served_over_subsets(rewards: list[int], procedure: Procedure) -> list[Fraction]:
    """Return the exact probability that each sample is served, by enumeration of all subsets, ties shared evenly."""
    weights = [Fraction(0)] * len(rewards)
    for part, ranks in probabilities(procedure):
        subsets = list(combinations(range(len(rewards)), len(ranks)))
        for subset, (rank, probability) in product(subsets, enumerate(ranks)):
            value = sorted(rewards[i] for i in subset)[rank]
            ties = [i for i in subset if rewards[i] == value]
            for i in ties:
                weights[i] += part * Fraction(probability) / (len(subsets) * len(ties))
    return weights


@pytest.mark.parametrize("seed", range(4))
def test_all_procedures_at_once_equal_brute_force_over_all_subsets(seed: int) -> None:
    """Every prompt's win rate is the exact mean over all pairs of subsets, under other procedures on the two sides."""
    rng = np.random.default_rng(seed)
    policy, base = (Samples(*rng.integers(0, 4, size=(2, 3, size))) for size in (7, 5))  # many ties in both rewards
    served = PROCEDURES[::-1]
    exact = np.empty((len(PROCEDURES), 3))
    for (r, (ours, theirs)), p in product(enumerate(zip(PROCEDURES, served, strict=True)), range(3)):
        a, b = (
            served_over_subsets(policy.selected[p].tolist(), ours),
            served_over_subsets(base.selected[p].tolist(), theirs),
        )
        exact[r, p] = sum(
            a[i] * b[j] * Fraction(int(2 * (y > z) + (y == z)), 2)
            for (i, y), (j, z) in product(enumerate(policy.judged[p]), enumerate(base.judged[p]))
        )
    assert win_rates_of(policy, base, PROCEDURES, served) == pytest.approx(exact, abs=1e-12)


def test_neither_the_order_of_samples_nor_the_scale_of_rewards_matters() -> None:
    """Shuffled samples and any strictly increasing maps of the two rewards give the same win rates, with ties."""
    rng = np.random.default_rng(5)
    policy, base = (rng.integers(0, 5, size=(2, 20, size)) for size in (9, 12))
    expected = win_rates_of(Samples(*policy), Samples(*base), PROCEDURES)
    assert len(np.unique(expected)) > 100
    shuffled = [Samples(*np.exp(rng.permutation(side, axis=2))) for side in (policy, base)]
    assert win_rates_of(*shuffled, PROCEDURES) == pytest.approx(expected, abs=1e-12)


def test_many_prompts_give_what_each_gives_alone() -> None:
    """The prompts of an array too large for one piece of work have the win rates that they have alone."""
    rng = np.random.default_rng(6)
    policy, base = rng.normal(size=(2, 2, 3000, 12))
    together = win_rates_of(Samples(*policy), Samples(*base), PROCEDURES)
    for p in (0, 1, 777, 2999):
        alone = [Samples(*side[:, p : p + 1]) for side in (policy, base)]
        assert win_rates_of(*alone, PROCEDURES)[:, 0] == pytest.approx(together[:, p], abs=1e-12)
        assert win_rates(*alone, BestOfN(4)) == pytest.approx(together[3, p], abs=1e-12)


class Softmax:
    """Serve a sample with a probability proportional to e^reward: a procedure that looks at more than ranks."""

    name = "softmax"

    def weights(self, rewards_PM: np.ndarray, thresholds_P: np.ndarray | None = None) -> np.ndarray:
        """Return the probabilities."""
        odds = np.exp(rewards_PM)
        return odds / odds.sum(axis=1, keepdims=True)


def test_a_procedure_of_ones_own_may_look_at_more_than_ranks() -> None:
    """A procedure that weighs reward values is asked for every prompt's weights."""
    rng = np.random.default_rng(17)
    policy, base = (Samples(*rng.normal(size=(2, 3, size))) for size in (6, 4))
    wins = win_rates_of(policy, base, [BestOfN(2), Softmax()], [Softmax(), BestOfN(2)])
    pairs = policy.judged[:, :, None] > base.judged[:, None, :]
    for found, (ours, theirs) in zip(wins, [(BestOfN(2), Softmax()), (Softmax(), BestOfN(2))], strict=True):
        a, b = ours.weights(policy.selected), theirs.weights(base.selected)
        assert found == pytest.approx(np.einsum("pm,pmb,pb->p", a, pairs, b))


def test_samples_of_known_laws_reach_their_analytic_win_rates() -> None:
    """In 50 random settings of law, procedures and numbers of samples the estimate is the theory's within 3 errors."""
    rng = np.random.default_rng(7)
    names = ["identity", "log", "exp:5", "exp:-5", "power:3", "power:-3"]
    for _ in range(50):
        law = law_at_kl(parse_transform(rng.choice(names)), kl=rng.uniform(0.05, 1.2))
        ours, theirs = (PROCEDURES[i] for i in rng.integers(len(PROCEDURES), size=2))
        samples, base_samples = rng.integers(5, 30, size=2)
        u = np.interp(rng.random((1000, samples)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
        v = rng.random((1000, base_samples))
        wins = win_rates(Samples(u, u), Samples(v, v), ours, theirs)
        error = wins.std(ddof=1) / np.sqrt(wins.size)
        assert abs(wins.mean() - law.win_rate(ours, theirs)) < 3 * error, (law.transform.name, ours.name, theirs.name)


@pytest.mark.parametrize("name", ["rewind:0.8:4", "rewind:0.8:4:best"])
@pytest.mark.parametrize("base", [None, "best-of-2", "rewind:0.8:2"])
def test_rewind_is_theory_at_the_quantile_itself(name: str, base: str | None) -> None:
    """From 19 references, whose 0.8 quantile has a Beta(16, 4) rank, win rate and draws are theory's, nearly."""
    rng = np.random.default_rng(8)
    procedure, served = parse_procedure(name), base and parse_procedure(base)
    law = law_at_kl(parse_transform("exp:3"), kl=0.3)
    u = np.interp(rng.random((6000, 8)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
    v = rng.random((6000, 38))
    wins = win_rates(Samples(u, u), Samples(v, v), procedure, served)
    slack = 0.005 if base == "rewind:0.8:2" else 0.0025  # the covariance of two thresholds stays
    assert abs(wins.mean() - law.win_rate(procedure, served)) < 3 * wins.std() / np.sqrt(wins.size) + slack
    draws = rewind_draws(Samples(u, u), Samples(v, v), procedure)
    off = abs(draws.mean() - law.draws(procedure))
    assert off < 3 * draws.std() / np.sqrt(6000) + 0.01 * law.draws(procedure)
    naive = procedure.draws(u, np.quantile(v[:, :19], 0.8, axis=1, method="weibull"))
    assert naive.mean() - law.draws(procedure) > 2 * off


def test_the_bases_draws_are_those_of_the_exact_law() -> None:
    """rewind:0.85:32 at 64 samples: 6.63 draws within 3 errors, which one sample quantile misses by 15 of them."""
    procedure, rng = RewindAndRepeat(0.85, 32), np.random.default_rng(12)
    rewards = rng.random((4000, 64))
    base = Samples(rewards, rewards)
    exact, draws = float(procedure.expected_draws(0.85)), rewind_draws(base, base, procedure)
    error = draws.std() / np.sqrt(4000)
    assert exact == pytest.approx(6.6299, abs=1e-4)
    assert error < 0.08
    assert abs(draws.mean() - exact) < 3 * error
    half, rest = rewards[:, :32], rewards[:, 32:]
    naive = procedure.draws(rest, np.quantile(half, 0.85, axis=1, method="weibull"))
    assert naive.mean() - exact > 10 * naive.std() / np.sqrt(4000)


@pytest.mark.parametrize(("transform", "kl"), [("identity", 0.5), ("exp:5", 0.5), ("exp:10", 1.0)])
def test_rewind_from_24_samples_is_theory(transform: str, kl: float) -> None:
    """rewind:0.85:8 with 12 references: win rate within 3 errors or half a point, where one sample quantile gives 2."""
    procedure, rng, law = (
        RewindAndRepeat(0.85, 8),
        np.random.default_rng(13),
        law_at_kl(parse_transform(transform), kl=kl),
    )
    u = np.interp(rng.random((12000, 24)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
    v = rng.random((12000, 24))
    wins = win_rates(Samples(u, u), Samples(v, v), procedure)
    error = wins.std() / np.sqrt(wins.size)
    assert abs(wins.mean() - law.win_rate(procedure)) < max(3 * error, 0.005)
    thresholds = np.quantile(v[:, :12], 0.85, axis=1, method="weibull")
    served = procedure.weights(u, thresholds), procedure.weights(v[:, 12:], thresholds)
    naive = np.einsum("pm,pb,pmb->p", *served, u[:, :, None] > v[:, None, 12:])
    assert naive.mean() - law.win_rate(procedure) > 0.015


@pytest.mark.parametrize(("references", "kinds"), [(3, 3), (8, 5), (12, 8), (32, 8), (200, 8)])
def test_weights_of_thresholds_act_like_the_quantile(references: int, kinds: int) -> None:
    """Integrals over each order statistic's Beta law, weighed, are φ(q) for every φ that is promised; ranks nearby."""
    q, n = 0.7, 9
    weights = threshold_weights(references, RewindAndRepeat(q, n))
    assert weights.sum() == pytest.approx(1.0, abs=1e-9)
    x = np.linspace(0, 1, 4001)
    for k, factor in [(k, f) for k in range(4) for f in (np.ones_like(x), sum(x**j for j in range(n)))][:kinds]:
        phi = (x - q) ** k * factor
        laws = beta(np.arange(1, references + 1)[:, None], references + 1 - np.arange(1, references + 1)[:, None])
        means = np.array([simpson(phi * density, x=x) for density in laws.pdf(x[None, :])])
        assert weights @ means == pytest.approx(np.interp(q, x, phi), abs=2e-5 * np.abs(weights).sum())
    used = np.flatnonzero(weights) / references
    assert np.abs(used - q).max() < 10 / np.sqrt(references)


def test_a_threshold_that_ties_is_passed() -> None:
    """Of rewards 0 and 1 the 0.8 quantile is 1, where all ones pass: draws follow P(1), if the quantile is not near."""
    rng = np.random.default_rng(14)
    rewards = (rng.random((3000, 400)) < 0.4).astype(float)
    draws = rewind_draws(Samples(rewards, rewards), Samples(rewards, rewards), RewindAndRepeat(0.8, 3))
    exact = 1 + 0.6 + 0.36
    assert draws.mean() == pytest.approx(exact, abs=3 * draws.std() / np.sqrt(3000))


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


def test_a_quantile_beyond_the_base_samples_is_an_error() -> None:
    """Nineteen samples cannot show the 0.99 quantile, whatever serves the base."""
    samples = Samples(*np.random.default_rng(0).random((2, 2, 38)))
    with pytest.raises(DataError, match=r"rewind:0.99:2 needs 198 base samples a prompt, found 38"):
        win_rates(samples, samples, RewindAndRepeat(0.99, 2), Standard())
    assert win_rates(samples, samples, RewindAndRepeat(0.95, 2), Standard()).shape == (2,)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    """A reward that is not finite, the judge's too, is named by prompt and sample; it would sort as the best."""
    rewards = np.zeros((3, 4))
    rewards[1, 2] = bad
    with pytest.raises(DataError, match="prompt 1, sample 2 is"):
        BestOfN(2).weights(rewards)
    with pytest.raises(DataError, match="the selection reward of prompt 1, sample 2 is"):
        Samples(rewards, np.zeros((3, 4)))
    with pytest.raises(DataError, match="the judge reward of prompt 1, sample 2 is"):
        Samples(np.zeros((3, 4)), rewards)
    with pytest.raises(DataError, match="the length of prompt 1, sample 2 is"):
        Samples(np.zeros((3, 4)), np.zeros((3, 4)), rewards)


def test_rewards_of_any_number_type_are_compared_and_text_is_refused() -> None:
    """Integers, booleans and both precisions compare; a reward stored as float32 ties with its float64 original."""
    exact = np.array([[0.1, 0.2, 0.3]])
    rounded = exact.astype(np.float32)
    assert rounded[0, 0] > exact[0, 0]  # as float64 it would win
    twins = Samples(rounded, rounded), Samples(exact, exact)
    assert win_rates(*twins, Standard()) == pytest.approx([0.5])
    assert tie_rate(*twins) == pytest.approx([1 / 3])
    near = np.array([[0.1, 0.1 + 1e-12, 0.4]])  # one value as float32
    mixed = Samples(near, near), Samples(rounded, rounded)
    assert win_rates(*mixed, Standard()) == pytest.approx([(0.5 + 0.5 + 3) / 9])
    won, lost = np.array([[True, True]]), np.array([[0, 0, 1]])
    assert win_rates(Samples(won, won), Samples(lost, lost), Standard()) == pytest.approx([5 / 6])
    text = np.array([["0.1", "0.2"]])
    with pytest.raises(DataError, match="not numbers"):
        Samples(text, text)


def test_all_ties_are_one_half() -> None:
    """Where the judge finds everything equal the win rate is 1/2 under every procedure and the tie rate says why."""
    equal = Samples(np.arange(12.0).reshape(2, 6), np.ones((2, 6)))
    assert win_rates_of(equal, equal, PROCEDURES) == pytest.approx(np.full((len(PROCEDURES), 2), 0.5))
    assert tie_rate(equal, equal).tolist() == [1.0, 1.0]


def test_one_sample_has_a_standard_win_rate_only() -> None:
    """One sample on each side is enough for plain serving, and Best-of-2 of it does not exist."""
    one, two = Samples(np.array([[1.0]]), np.array([[1.0]])), Samples(np.array([[2.0]]), np.array([[2.0]]))
    assert win_rates(two, one, Standard()).tolist() == [1.0]
    with pytest.raises(DataError, match="best-of-2 cannot be estimated from 1 samples"):
        win_rates(two, one, BestOfN(2))


@pytest.mark.parametrize("prompts", [20, 50, 200])
def test_intervals_cover(prompts: int) -> None:
    """95 % intervals of Best-of-4 win rates, a skewed law, cover the mean in 93–97 % of 600 simulations."""
    rng = np.random.default_rng(9)
    u, v = rng.random((20000, 12)) ** (1 / rng.gamma(4, 0.6, size=(20000, 1))), rng.random((20000, 12))
    population = win_rates(Samples(u, u), Samples(v, v), BestOfN(4))
    covered = []
    for seed in range(600):
        interval = estimate(rng.choice(population, prompts), seed=seed)
        covered.append(interval.low <= population.mean() <= interval.high)
    assert 0.93 <= np.mean(covered) <= 0.97


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


def test_intervals_of_a_procedure_that_nearly_always_wins_cover() -> None:
    """Worst-of-4 with mean 98.6 %: 95 % intervals from 50 prompts cover it in over 94 % of 400 simulations."""
    rng = np.random.default_rng(11)
    strength = 15 * np.exp(0.9 * rng.normal(size=(20000, 1)))
    u, v = rng.random((20000, 12)) ** (1 / strength), rng.random((20000, 12))
    population = win_rates(Samples(u, u), Samples(v, v), WorstOfN(4))
    found = [estimate_share(rng.choice(population, 50), seed=seed) for seed in range(400)]
    assert np.mean([e.low <= population.mean() <= e.high for e in found]) > 0.94


@pytest.mark.parametrize("prompts", [2, 20, 300])
def test_all_won_is_not_certain(prompts: int) -> None:
    """Of P prompts all won the interval ends at Clopper and Pearson's (α/2)^(1/P), all lost at its mirror image."""
    least = 0.025 ** (1 / prompts)
    assert estimate_share(np.ones(prompts)) == Estimate(1.0, pytest.approx(least, abs=0.02 * (1 - least) + 5e-3), 1.0)
    lost = estimate_share(np.zeros(prompts), confidence=0.8)
    assert lost == Estimate(0.0, 0.0, pytest.approx(1 - 0.1 ** (1 / prompts), rel=0.06))


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


def test_a_paired_interval_is_narrower_than_the_difference_of_two() -> None:
    """Two policies that find the same prompts hard differ by a paired interval that leaves the prompts out."""
    rng = np.random.default_rng(2)
    hard = rng.random(100)
    one, two = 0.8 * hard + 0.1 * rng.random(100), 0.8 * hard + 0.1 * rng.random(100) + 0.05
    paired, alone = estimate(two - one), estimate(one)
    assert paired.low < 0.05 < paired.high
    assert paired.high - paired.low < 0.4 * (alone.high - alone.low)


def test_equal_values_have_an_interval_without_width() -> None:
    """Where no prompt differs the interval is the value itself."""
    assert estimate([0.75, 0.75, 0.75]) == Estimate(0.75, 0.75, 0.75)


def test_an_interval_needs_two_prompts() -> None:
    """One prompt gives no interval."""
    with pytest.raises(DataError, match="at least 2 prompts, found 1"):
        estimate([0.5])
    assert estimate([0.4, 0.6]).low == pytest.approx(0.4)
    with pytest.raises(DataError, match="prompt 1 is not finite"):
        estimate([0.5, np.nan])
    with pytest.raises(ConfigError, match="found 95"):
        estimate([0.5, 0.6], confidence=95)


def test_matched_interpolates_the_share_of_theorys_gain() -> None:
    """A policy's own KL gives its own win rates; elsewhere its share of the curve is linear; beyond, it is refused."""

    def gain(kl: float) -> float:
        return 0.4 * np.sqrt(kl)

    budgets = [(np.full(3, 4.0), np.full(3, 0.9)), (np.full(3, 1.0), np.full(3, 0.8))]  # shares 1/2 and 3/4
    assert matched(budgets, 1.0, gain).values == pytest.approx(0.8)
    assert matched(budgets, 0.81, gain).values == pytest.approx(0.5 + 0.75 * gain(0.81))
    assert matched(budgets, 2.5, gain).values == pytest.approx(0.5 + 0.625 * gain(2.5))
    assert [matched(budgets, kl, gain).shift for kl in (1.0, 0.81, 2.5)] == pytest.approx([0.0, 0.0, 0.0])
    with pytest.raises(DataError, match=r"no policy reaches a KL of 4\.5"):
        matched(budgets, 4.5, gain)
    with pytest.raises(DataError, match=r"the smallest KL of a policy is 1\.000 nats, more than 1\.25 times 0\.790"):
        matched(budgets, 0.79, gain)
    idle = (np.zeros(3), np.full(3, 0.48))  # a policy that learnt nothing has no share of any gain
    assert matched([*budgets, idle], 0.81, gain).values == pytest.approx(0.5 + 0.75 * gain(0.81))
    with pytest.raises(DataError, match="train one with a smaller budget"):
        matched([*budgets, idle], 0.5, gain)


@pytest.mark.parametrize("transform", ["identity", "exp:10"])
@pytest.mark.parametrize("kl", [0.4, 0.7, 0.9])
def test_matched_is_exact_for_a_policy_on_theorys_curve(transform: str, kl: float) -> None:
    """For policies that reach what theory gives, the win rate at any KL between is theory's."""

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform(transform), kl=kl).win_rate(BestOfN(4)) - 0.5

    budgets = [(np.array([x]), np.array([0.5 + gain(x)])) for x in (0.5, 1.0)]
    assert matched(budgets, kl, gain).values[0] == pytest.approx(0.5 + gain(kl), abs=1e-9)


def noisy_win_rate(rho: float, transform: str, kl: float, procedure: Procedure, cells: int = 300) -> float:
    """Return what the policy wins that sees the normal score of a rank with correlation ``rho``, on a grid."""
    ranks = (np.arange(cells) + 0.5) / cells
    model, score = FiniteModel(np.full(cells, 1 / cells), ranks), norm.ppf(ranks)
    given = norm.pdf(score, rho * score[:, None], np.sqrt(1 - rho**2)) / norm.pdf(score)
    given /= given.sum(axis=1, keepdims=True)
    expected = given @ parse_transform(transform)(ranks)
    root = brentq(lambda x: model.kl(softmax(expected * np.exp(x))) - kl, -8.0, 12.0)
    return float(model.win_rate(softmax(expected * np.exp(root)) @ given, procedure))


@pytest.mark.parametrize("rho", [0.9, 0.7, 0.5])
@pytest.mark.parametrize(
    ("transform", "name"), [("identity", "best-of-4"), ("exp:10", "best-of-4"), ("exp:-10", "worst-of-4")]
)
def test_the_interval_at_one_kl_contains_the_error_of_interpolation(rho: float, transform: str, name: str) -> None:
    """A policy that knows ranks with correlation ρ wins what the widened estimate allows, exact numbers given."""
    procedure = parse_procedure(name)

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform(transform), kl=kl).win_rate(procedure) - 0.5

    def won(kl: float) -> float:
        return noisy_win_rate(rho, transform, kl, procedure)

    for budgets, kl in (((0.25, 1.25), 0.5), ((0.5, 1.0), 0.7), ((0.4,), 0.33)):
        found = matched([(np.full(2, own), np.full(2, won(own))) for own in budgets], kl, gain)
        mean = float(found.values.mean())
        e = widened({"mean": mean, "low": mean, "high": mean}, found.shift)
        assert e["low"] - 5e-4 <= won(kl) <= e["high"] + 5e-4
        assert abs(found.shift) < 0.02  # so that the width means something


def test_no_share_at_one_kl_is_above_one() -> None:
    """Not its interval either, where theory's curve has left the square root's far below, nor a difference's."""

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform("exp:10"), kl=kl).win_rate(BestOfN(4)) - 0.5

    wins = [np.full(4, 0.5 + gain(kl)) for kl in (1.0, 4.0)]
    found = matched([(np.full(4, kl), own) for kl, own in zip((1.0, 4.0), wins, strict=True)], 2.0, gain)
    mean = float(found.values.mean())
    assert 0.9 < mean <= mean + found.shift <= 1.0
    at_the_top = widened({"mean": mean, "low": mean, "high": 0.999}, found.shift, least=0.0)
    assert (at_the_top["low"], at_the_top["high"]) == (mean, 1.0)
    assert widened({"mean": -0.9, "low": -0.95, "high": -0.8}, -0.2)["low"] == -1.0


def test_overspending_is_not_flattered() -> None:
    """Identity at 1.25 nats cannot be compared with exp:10 at 0.33; from two budgets the lead is right."""
    rho, served = 0.5, BestOfN(4)

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform("identity"), kl=kl).win_rate(served) - 0.5

    lead = noisy_win_rate(rho, "exp:10", 0.33, served) - noisy_win_rate(rho, "identity", 0.33, served)
    assert lead == pytest.approx(0.010, abs=2e-3)
    budgets = [(np.full(2, kl), np.full(2, noisy_win_rate(rho, "identity", kl, served))) for kl in (0.25, 1.25)]
    with pytest.raises(DataError, match="train one with a smaller budget"):
        matched(budgets[1:], 0.33, gain)
    found = matched(budgets, 0.33, gain)
    assert noisy_win_rate(rho, "exp:10", 0.33, served) - found.values.mean() == pytest.approx(lead, abs=2e-3)


def swayed(prompts: int, samples: int, rng: np.random.Generator, *, sway: float = 1.0) -> tuple[Samples, Samples]:
    """Return a policy, longer and better by 1/2, and a base; P(win) = σ(1/2 + sway·Δ), Δ in {−1, 0, 1}."""
    longer = [(rng.random((prompts, samples)) < share).astype(float) for share in (0.7, 0.4)]
    noise = rng.gumbel(size=(2, prompts, samples))  # a difference of two Gumbel variables is logistic
    scores = 0.5 + sway * longer[0] + noise[0], sway * longer[1] + noise[1]
    policy, base = (Samples(s, s, 50 + 100 * long) for s, long in zip(scores, longer, strict=True))
    return policy, base


def test_length_control_removes_what_length_adds() -> None:
    """Where the model holds the mean at equal length is σ(1/2), within 3 errors; the raw win rate is points higher."""
    policy, base = swayed(1500, 6, np.random.default_rng(10))
    values = length_controlled([(policy, base)], Standard())
    assert abs(values.mean() - expit(0.5)) < 3 * values.std() / np.sqrt(1500)
    assert win_rates(policy, base, Standard()).mean() > expit(0.5) + 0.04


@pytest.mark.parametrize("procedure", [BestOfN(3), RewindAndRepeat(0.5, 2)], ids=lambda p: p.name)
def test_length_control_is_the_most_likely_model_and_its_influence(procedure: Procedure) -> None:
    """The mean is that of a direct fit to all pairs; a prompt's value is its jackknife value up to order 1/P."""
    rng = np.random.default_rng(11)
    lengths = rng.integers(20, 400, size=(2, 60, 8))
    judged = rng.normal(size=(2, 60, 8)) + lengths / 150
    policy, base = (Samples(rng.normal(size=(60, 8)), j, n) for j, n in zip(judged, lengths, strict=True))

    def fitted(keep: np.ndarray) -> float:
        ways: list[tuple[float, np.ndarray | None, slice]] = [(1.0, None, slice(0, 8))]
        if isinstance(procedure, RewindAndRepeat):
            ways = [
                (share / 2, np.sort(base.selected[:, part], axis=1)[:, i], rest)
                for part, rest in ((slice(4), slice(4, 8)), (slice(4, 8), slice(4)))
                for i, share in enumerate(threshold_weights(4, procedure))
            ]
        weight, delta, won = [], [], []
        for share, at, rest in ways:
            a, b = procedure.weights(policy.selected, at), procedure.weights(base.selected[:, rest], at)
            weight.append(share * (a[:, :, None] * b[:, None, :])[keep].ravel())
            delta.append((policy.lengths[:, :, None] - base.lengths[:, None, rest])[keep].ravel())
            won.append((policy.judged[:, :, None] > base.judged[:, None, rest])[keep].ravel())
        w, d, y = (np.concatenate(parts) for parts in (weight, delta, won))
        x = np.tanh(d / np.sqrt(np.average(d**2, weights=w) - np.average(d, weights=w) ** 2))
        loss = minimize(lambda t: w @ np.logaddexp(0, t[0] + t[1] * x) - (w * y) @ (t[0] + t[1] * x), [0, 0], tol=1e-9)
        return float(expit(loss.x[0]))

    values = length_controlled([(policy, base)], procedure)
    every = np.arange(60)
    assert values.mean() == pytest.approx(fitted(every), abs=2e-4)  # tanh is rounded to 1/100
    jackknife = [60 * values.mean() - 59 * fitted(every[every != p]) for p in range(6)]
    assert values[:6] == pytest.approx(jackknife, abs=0.08)
    assert np.std(values) > 0.15


def test_length_control_joins_blocks() -> None:
    """Prompts in two blocks have the values they have in one."""
    policy, base = swayed(40, 6, np.random.default_rng(12))
    whole = length_controlled([(policy, base)], BestOfN(2))

    def part(side: Samples, rows: slice) -> Samples:
        assert side.lengths is not None
        return Samples(side.selected[rows], side.judged[rows], side.lengths[rows])

    rows = slice(0, 13), slice(13, 40)
    assert length_controlled([(part(policy, r), part(base, r)) for r in rows], BestOfN(2)) == pytest.approx(whole)


def test_length_control_without_length_differences_is_the_win_rate() -> None:
    """Where all lengths are equal there is nothing to control."""
    rng = np.random.default_rng(13)
    policy, base = (Samples(r, r, np.full((5, 4), 37)) for r in rng.normal(size=(2, 5, 4)))
    assert length_controlled([(policy, base)], BestOfN(2)).tolist() == win_rates(policy, base, BestOfN(2)).tolist()


def test_length_control_says_where_it_cannot_know() -> None:
    """Without lengths, overlap of lengths, or wins and losses at a length, no number is made up."""
    rng = np.random.default_rng(14)
    one, two = rng.normal(size=(2, 30, 4))
    short, long = rng.integers(10, 50, size=(30, 4)), rng.integers(60, 90, size=(30, 4))
    with pytest.raises(DataError, match="needs the lengths"):
        length_controlled([(Samples(one, one, short), Samples(two, two))], Standard())
    with pytest.raises(DataError, match="of the policy is longer"):
        length_controlled([(Samples(one, one, long), Samples(two, two, short))], Standard())
    with pytest.raises(DataError, match="of the policy is shorter"):
        length_controlled([(Samples(one, one, short), Samples(two, two, long))], Standard())
    mixed = np.where(rng.random((30, 4)) < 0.5, short, long)
    with pytest.raises(DataError, match="every served pair is won"):
        length_controlled([(Samples(one + 99, one + 99, mixed), Samples(two, two, mixed[::-1]))], Standard())
    for constant in (7, 0.003):
        same = np.full((30, 4), 0.002)
        with pytest.raises(DataError, match="of the policy is longer"):
            length_controlled([(Samples(one, one, same + constant), Samples(two, two, same))], Standard())
    judged = mixed + 0.0  # the longer one always wins
    with pytest.raises(DataError, match="length alone tells"):
        length_controlled(
            [(Samples(judged, judged, mixed), Samples(judged[::-1], judged[::-1], mixed[::-1]))], Standard()
        )


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


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(5))
def test_best_of_n_spends_at_most_the_bound(n: int, seed: int) -> None:
    """With finitely many responses, ties or not, the exact KL of Best-of-n is at most log n − (n−1)/n."""
    rng = np.random.default_rng(seed)
    model = FiniteModel(rng.dirichlet(np.ones(12)), rng.integers(0, 8, size=12))
    assert 0.0 <= model.kl(model.served(model.reference, BestOfN(n))) + 1e-12 <= best_of_n_kl_bound(n) + 2e-12


@pytest.mark.parametrize("n", [2, 4, 16, 64])
@pytest.mark.parametrize("epsilon", [0.9, 0.25, 1e-2, 1e-5])
def test_the_kl_estimate_is_exact_with_one_atom_at_the_top(n: int, epsilon: float) -> None:
    """It is the integral of f·log f, f = n·u^{n−1}, up to the atom that is best, and the atom's own share."""

    def spent(u: float) -> float:
        density = n * u ** (n - 1)
        return float(density * np.log(density)) if density > 0 else 0.0

    below, _ = quad(spent, 0.0, 1.0 - epsilon, epsabs=1e-13, epsrel=1e-13, limit=500)
    atom = 1.0 - (1.0 - epsilon) ** n
    exact = below + atom * np.log(atom / epsilon)
    assert best_of_n_kl_given(np.log(epsilon), n) == pytest.approx(exact, abs=1e-10)


def test_the_kl_of_best_of_16_on_four_atoms() -> None:
    """On four equally probable responses Best-of-16 spends 1.330 nats; the bound says 1.835, the estimate 1.338."""
    model = FiniteModel(np.full(4, 0.25), np.arange(4.0))
    assert model.kl(model.served(model.reference, BestOfN(16))) == pytest.approx(1.330, abs=5e-4)
    assert best_of_n_kl_bound(16) == pytest.approx(1.835, abs=5e-4)
    assert best_of_n_kl_given(np.log(0.25), 16) == pytest.approx(1.338, abs=5e-4)


def test_limits_of_the_kl_estimate() -> None:
    """It is 0 for a certain response and for n = 1, and the bound as ε → 0, also where ε underflows."""
    rare = best_of_n_kl_given([np.log(1e-15), np.log(1e-300), -2000.0, -np.inf], 8)
    assert rare == pytest.approx(best_of_n_kl_bound(8), rel=1e-13)
    assert best_of_n_kl_given([[0.0], [-1e-12]], 8) == pytest.approx(np.array([[0.0], [1e-12]]), rel=1e-9)
    assert best_of_n_kl_given([0.0, -1.0, -900.0], 1).tolist() == [0.0, 0.0, 0.0]


def test_the_kl_from_stored_samples_is_unbiased() -> None:
    """Its mean over all possible sets of samples is the estimator's mean over what Best-of-n serves."""
    model = FiniteModel(np.array([0.2, 0.3, 0.1, 0.4]), np.array([1.0, 0.0, 2.0, 1.0]))  # two tie
    drawn = np.array(list(product(range(4), repeat=4)))
    probability = model.reference[drawn].prod(axis=1)
    logprobs = np.log(model.reference)
    expected = model.served(model.reference, BestOfN(3)) @ best_of_n_kl_given(logprobs, 3)
    assert probability @ best_of_n_kl(model.rewards[drawn], logprobs[drawn], 3) == pytest.approx(expected, abs=1e-12)


def test_the_kl_of_best_of_n_refuses_what_is_none() -> None:
    """No log-probability, other shapes, and an n that is no number of draws are errors."""
    for bad in (0.1, np.nan):
        with pytest.raises(DataError, match=f"log_probabilities has {bad:g}"):
            best_of_n_kl_given([-1.0, bad], 4)
    with pytest.raises(DataError, match=r"\(2, 3\) and log-probabilities \(2, 4\)"):
        best_of_n_kl(np.zeros((2, 3)), np.zeros((2, 4)), 2)
    with pytest.raises(DataError, match="draw at least 4"):
        best_of_n_kl(np.zeros((2, 3)), np.zeros((2, 3)), 4)
    with pytest.raises(ConfigError, match="N = 0"):
        best_of_n_kl_bound(0)
