"""Points of the curves, and rankings for K rollouts, against closed forms and brute force."""

import numpy as np
import pytest
from scipy.stats import binom

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN, parse_procedure
from infalign.method.transforms import Exponential, Identity, Log, parse_transform
from infalign.theory.choose import choose, smoothed
from infalign.theory.curve import curve_point, parse_transform_or_optimum
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import rank_optimum


def test_a_point_has_both_betas_and_the_standard_win_rate() -> None:
    """Best-of-4 beats a plain draw with 4/5; the β of e^{t(u−1)} is e^{−t} times the paper's; log at β = 1 wins 2/3."""
    assert curve_point(BestOfN(4), Log(), kl=1e-9, base=Standard()).win_rate == pytest.approx(0.8, abs=1e-4)
    point = curve_point(BestOfN(4), Exponential(10.0), kl=1.0)
    assert point.normalized_beta == pytest.approx(point.beta * np.exp(-10.0), rel=1e-14)
    assert curve_point(BestOfN(8), Log(), beta=1.0).standard_win_rate == pytest.approx(2 / 3, abs=1e-12)


@pytest.mark.parametrize("name", ["best-of-4", "worst-of-4", "0.5*best-of-2+0.5*standard", "rewind:0.85:8"])
def test_the_optimum_is_above_every_transformation_at_its_kl(name: str) -> None:
    """No transformation wins more than ``optimal`` at the same KL, and the point says how well that was solved."""
    procedure = parse_procedure(name)
    best = curve_point(procedure, "optimal", kl=0.5)
    assert best.transform == "optimal"
    assert best.kl == pytest.approx(0.5, abs=1e-9)
    assert best.error < 1e-8
    assert best.residual is not None
    assert best.residual < 1e-6
    for other in ("identity", "log", "exp:10", "exp:-10"):
        assert curve_point(procedure, parse_transform(other), kl=0.5).win_rate < best.win_rate


def test_rewind_tells_its_draws() -> None:
    """The base draws (1 − φ^N)/(1 − φ) times; a policy that is the base in all but 1e-6 nats draws as often."""
    procedure = RewindAndRepeat(0.85, 32)
    point = curve_point(procedure, parse_transform("identity"), kl=1e-6)
    assert point.base_draws == pytest.approx((1 - 0.85**32) / 0.15, rel=1e-12)
    assert point.draws == pytest.approx(point.base_draws, rel=0.01)
    assert curve_point(procedure, parse_transform("identity"), kl=1.0).draws < 3.0  # type: ignore[operator]
    assert "draws" not in curve_point(BestOfN(2), Log(), kl=1.0).as_dict()


def test_a_point_needs_exactly_one_budget() -> None:
    """Neither, both and impossible budgets are refused."""
    for budget in ({}, {"beta": 1.0, "kl": 1.0}, {"beta": 0.0}, {"kl": -1.0}):
        for aim in ("identity", "optimal"):
            with pytest.raises(ConfigError):
                curve_point(BestOfN(2), parse_transform_or_optimum(aim), **budget)


@pytest.mark.parametrize(
    ("name", "transform", "rollouts", "win_rate"),
    [("best-of-4", "exp:10", 16, 0.867), ("best-of-4", "exp:20", 16, 0.8725), ("best-of-32", "exp:100", 100, 0.977)],
)
def test_a_generalizing_network_wins_what_is_known(name: str, transform: str, rollouts: int, win_rate: float) -> None:
    """At half a nat, computed elsewhere; memorizing the same rollouts wins 3 points less and more."""
    procedure, phi = parse_procedure(name), parse_transform(transform)
    generalizing = law_at_kl(smoothed(phi, rollouts), kl=0.5).win_rate(procedure)
    assert generalizing == pytest.approx(win_rate, abs=5e-4)
    assert finite_rollouts(phi, procedure, simulated_gaps(rollouts), kl=0.5).win_rate < generalizing - 0.03


@pytest.mark.parametrize("t", [10.0, -10.0, 100.0, -40.0])
@pytest.mark.parametrize("rollouts", [1, 16, 1000])
def test_smoothing_an_exponential_has_a_closed_form(t: float, rollouts: int) -> None:
    """E e^{tc/K} over the binomial law of c is (1 − u + u·e^{t/K})^K; between knots it is met to 1e-7 of its size."""
    u = np.linspace(0.0, 0.999, 173)
    table = smoothed(Exponential(t), rollouts)
    exact = np.sign(t) * (np.exp(rollouts * np.log1p(u * np.expm1(t / rollouts))) - np.exp(t))
    assert table.scale * table.drop(1.0 - u) == pytest.approx(exact, rel=3e-7, abs=1e-14 * np.exp(max(t, 0)))


def test_smoothing_is_the_mean_over_all_counts_and_leaves_identity_alone() -> None:
    """For any Φ it is the binomial mean, log's rank 0 taken at 1/(2K); the mean of Ĉ itself is u."""
    u, counts = np.linspace(0.01, 0.99, 31), np.arange(13)
    for transform in (Log(), rank_optimum(BestOfN(4), kl=0.5).transform):
        phi = np.asarray(transform(np.where(counts == 0, 0.5 if transform.name == "log" else 0.0, counts) / 12))
        exact = binom.pmf(counts, 12, u[:, None]) @ phi - phi[-1]
        table = smoothed(transform, 12)
        assert table.drop(1 - u) * table.scale / transform.scale == pytest.approx(exact, rel=1e-6)
    wins, exact = (law_at_kl(phi, kl=0.5).win_rate(BestOfN(4)) for phi in (smoothed(Identity(), 7), Identity()))
    assert wins == pytest.approx(exact, abs=1e-9)


def test_the_recommendation_is_good_under_both_limits() -> None:
    """No candidate is nearer to the best under both limits at once, and each limit alone prefers another one."""
    ranking = choose(BestOfN(4), kl=0.5, rollouts=16)
    wins = {c.transform.name: np.array([c.memorizing, c.generalizing]) for c in ranking.candidates}
    most = np.max(list(wins.values()), axis=0)
    behind = {name: float((most - won).max()) for name, won in wins.items()}
    assert behind == pytest.approx({c.transform.name: c.behind for c in ranking.candidates})
    assert list(behind) == sorted(behind, key=behind.__getitem__)
    assert behind[ranking.recommended.transform.name] < 0.006
    for limit in (0, 1):
        assert behind[max(wins, key=lambda name: wins[name][limit])] > 0.01


@pytest.mark.slow
def test_a_candidate_is_what_the_simulation_says() -> None:
    """Win rate and errors are those of ``finite_rollouts`` on the same prompts, differences pair by pair."""
    ranking = choose(WorstOfN(4), kl=0.5, rollouts=50, seed=3)
    best, other = max(ranking.candidates, key=lambda c: c.memorizing or 0.0), ranking.candidates[-1]
    same = [
        finite_rollouts(c.transform, WorstOfN(4), simulated_gaps(50, prompts=ranking.prompts, seed=3), kl=0.5)
        for c in (best, other)
    ]
    assert other.memorizing == same[1].win_rate
    assert other.limit == same[1].limit
    assert other.standard_error == pytest.approx(same[1].standard_error, rel=1e-12)
    paired = same[0].win_rates - same[1].win_rates
    assert other.behind >= paired.mean() - 1e-12
    assert other.behind_error == pytest.approx(paired.std(ddof=1) / np.sqrt(len(paired)), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best-of-8", "worst-of-8"])
def test_the_best_exponential_is_as_good_as_the_best_of_a_grid(name: str) -> None:
    """Trying every t of a grid finds none better than the one searched, by more than half a thousandth."""
    procedure = parse_procedure(name)
    ranking = choose(procedure, kl=0.7, rollouts=40)
    found = max(c.memorizing or 0.0 for c in ranking.candidates if isinstance(c.transform, Exponential))
    gaps = simulated_gaps(40, prompts=ranking.prompts, seed=0)
    rates = np.geomspace(2.0, 40.0, 12)
    tried = [finite_rollouts(Exponential(t), procedure, gaps, kl=0.7) for t in (*rates, *-rates)]
    assert found > max(one.win_rate for one in tried) - 5e-4


def test_what_ties_gives_way_to_the_simplest() -> None:
    """Of what does the same with two rollouts, the simplest; nothing ties that is behind by more than its error."""
    ranking = choose(BestOfN(4), kl=0.1, rollouts=2)
    ties = {candidate.transform.name: candidate.behind for candidate in ranking.candidates if candidate.ties}
    assert {"exp:10", "power:7", "optimal:best-of-4"} <= ties.keys()
    assert ranking.recommended.transform.name == "exp:10"
    assert max(ties.values()) - min(ties.values()) < 4e-4
    behind = {candidate.transform.name: round(candidate.behind, 4) for candidate in ranking.candidates}
    assert (behind["identity"], behind["exp:5"]) == (0.0206, 0.0024)


@pytest.mark.slow
def test_nearly_certain_wins_still_differ() -> None:
    """Worst-of-32 at half a nat: exp:-10 loses 20 times as often as the best, so it does not tie with it."""
    ranking = choose(WorstOfN(32), kl=0.5, rollouts=100)
    wins = {c.transform.name: c for c in ranking.candidates}
    assert 1 - wins["exp:-10"].limit == pytest.approx(9.9e-7, rel=0.01)
    assert 1 - wins["optimal:worst-of-32"].limit == pytest.approx(4.4e-8, rel=0.01)
    assert not wins["exp:-10"].ties
    assert 1 - ranking.recommended.limit < 5e-8
    assert "at 2 nats is beyond what can be computed" in choose(WorstOfN(32), kl=2.0, rollouts=100).left_out["optimal"]


@pytest.mark.slow
def test_rewind_is_ranked_by_what_generalizes() -> None:
    """What memorizing costs Rewind-and-Repeat is not made up: nothing is simulated, and the optimum is first."""
    ranking = choose(RewindAndRepeat(0.85, 8), kl=0.5, rollouts=100)
    assert ranking.prompts == 0
    assert all(c.memorizing is None and c.standard_error == c.behind_error == 0 for c in ranking.candidates)
    best = ranking.recommended
    assert best.transform.name == "optimal:rewind:0.85:8"
    assert best.generalizing < best.limit - 0.005
    assert best.generalizing == law_at_kl(smoothed(best.transform, 100), kl=0.5).win_rate(RewindAndRepeat(0.85, 8))


def test_a_budget_that_rollouts_cannot_spend_is_refused() -> None:
    """K rollouts tell the best response from K others, which bounds the KL."""
    with pytest.raises(ConfigError, match="cannot spend a KL of 6"):
        choose(BestOfN(4), kl=6.0, rollouts=100)
    for rollouts in (0, 1, 10**9):
        with pytest.raises(ConfigError, match=f"2 to 100,000 rollouts per prompt, found {rollouts}"):
            choose(RewindAndRepeat(0.85, 8), kl=0.5, rollouts=rollouts)
    for kl in (1e-300, 1e-21):
        with pytest.raises(ConfigError, match=f"a KL of {kl:g} leaves the base policy unchanged; give at least 1e-20"):
            choose(BestOfN(4), kl=kl, rollouts=8)
    with pytest.raises(ConfigError, match=r"8 rollouts cannot spend a KL of 1e-20 nats; .* not so small that it is"):
        choose(BestOfN(4), kl=1e-20, rollouts=8)
