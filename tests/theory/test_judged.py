"""What is won by a judge who is not the reward: against grids, other optimisers, Monte Carlo and the reward itself."""

from typing import Any

import numpy as np
import pytest
from judges import GaussianJudge, RewardAsJudge, TurningJudge
from scipy.special import logsumexp, ndtr, ndtri

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.judge import EstimatedJudge, Judge, ProbitSpline, normal_scores
from infalign.method.procedures import BestOfN, RankProcedure, RewindAndRepeat, Standard, parse_procedure
from infalign.method.transforms import Exponential, Identity, Log
from infalign.theory.choose import choose
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps
from infalign.theory.law import SCORES, judged_win_rate, law_at_kl, resampled_win_rates
from infalign.theory.optimum import Optimum, optimal, optimal_by

EDGES = np.concatenate([[-np.inf], np.linspace(-6.0, 6.0, 401), [np.inf]])
CHANCES = np.diff(ndtr(EDGES))
CENTRES = np.clip((EDGES[1:] + EDGES[:-1]) / 2, -6.0, 6.0)


def on_a_grid(judge: Judge, procedure: RankProcedure, optimum: Optimum) -> tuple[float, float]:
    """Return W − β·KL of the best policy that is constant on the cells of a grid, and of the optimum's own cells.

    The best is found by mirror ascent from four starts: log f moves towards R/β as far as the objective rises.
    """
    chances, beta = judge.chance(CENTRES), optimum.beta

    def normalised(log_f: Array) -> Array:
        return np.asarray(log_f - logsumexp(log_f, b=CHANCES))

    def objective(log_f: Array) -> float:
        policy = CHANCES * np.exp(log_f)
        cdf = np.minimum(np.cumsum(policy), 1.0)
        return float(np.diff(procedure.distortion(cdf), prepend=0.0) @ chances - beta * policy @ log_f)

    def pull(log_f: Array) -> Array:
        cdf = np.minimum(np.cumsum(CHANCES * np.exp(log_f)), 1.0)
        rises = procedure.density(cdf[:-1]) * np.diff(chances)
        return normalised(np.append(0.0, np.cumsum(rises)) / beta)

    found = []
    for log_f in (0.0 * CENTRES, chances / beta, CENTRES, -CENTRES):
        log_f, step = normalised(log_f), 1.0
        for _ in range(400):
            trial = normalised((1.0 - step) * log_f + step * pull(log_f))
            better = objective(trial) >= objective(log_f)
            log_f, step = (trial, min(1.0, 1.5 * step)) if better else (log_f, step / 2)
        found.append(objective(log_f))
    own = np.maximum(np.diff(optimum.law.cdf_at(ndtr(EDGES))), 1e-300) / CHANCES
    return max(found), objective(np.log(own))


@pytest.mark.parametrize("name", ["standard", "best-of-4", "worst-of-4", "2nd-best-of-8"])
@pytest.mark.parametrize("kl", [0.1, 0.5, 1.5])
def test_by_the_reward_itself_the_optimum_is_the_known_one(name: str, kl: float) -> None:
    """With A = h₀ the judge's optimum has the win rate and the β of the optimum for the procedure."""
    procedure = parse_procedure(name)
    assert not isinstance(procedure, RewindAndRepeat)
    found, known = optimal_by(RewardAsJudge(procedure), procedure, kl=kl), optimal(procedure, kl=kl)
    assert found.win_rate == pytest.approx(known.win_rate, abs=1e-6)
    assert found.beta == pytest.approx(known.beta, rel=1e-4)
    assert found.kl == pytest.approx(kl, abs=1e-6)
    assert found.self_check < 1e-5


@pytest.mark.parametrize("procedure", [BestOfN(4), RewindAndRepeat(0.85, 8)])
def test_a_law_wins_by_the_reward_itself_what_it_wins(procedure: Any) -> None:
    """∫ A dh(F) with A = h₀ is 1 − ∫ h(F)·h₀′."""
    law = law_at_kl(Exponential(10), kl=0.7)
    base = BestOfN(4)
    assert judged_win_rate(law, procedure, RewardAsJudge(base)) == pytest.approx(
        law.win_rate(procedure, base), abs=1e-9
    )


def test_the_gaussian_judge_has_its_known_answers() -> None:
    """ρ = 0.7, Best-of-4 on both sides, half a nat: exp:10 73.3 %, the reward's optimum 74.1 %, the judge's 75.4 %."""
    procedure = BestOfN(4)
    judge = GaussianJudge(0.7, procedure)
    laws = [law_at_kl(transform, kl=0.5) for transform in (Exponential(10), optimal(procedure, kl=0.5).transform)]
    assert [judged_win_rate(law, procedure, judge) for law in laws] == pytest.approx([0.7332, 0.7414], abs=5e-5)
    assert optimal_by(judge, procedure, kl=0.5).win_rate == pytest.approx(0.7535, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judge", "name"),
    [
        (GaussianJudge(0.7, BestOfN(4)), "best-of-4"),
        (GaussianJudge(0.7, Standard()), "worst-of-4"),
        (TurningJudge(1.2), "best-of-4"),
        (TurningJudge(0.0), "standard"),
    ],
)
def test_no_optimizer_on_a_grid_finds_a_better_policy(judge: Judge, name: str) -> None:
    """Mirror ascent over 402 cells reaches the W − β·KL of the optimum's own cells and not more."""
    procedure = parse_procedure(name)
    assert not isinstance(procedure, RewindAndRepeat)
    best, own = on_a_grid(judge, procedure, optimal_by(judge, procedure, kl=0.5))
    assert own == pytest.approx(best, abs=2e-6)


@pytest.mark.parametrize("kl", [0.003, 0.02, 0.09])
def test_a_judge_with_kinks_has_an_optimum_at_a_small_budget(kl: float) -> None:
    """Panels are refined at the knots of a spline, and the policy on the last of them spends the budget."""
    judge = ProbitSpline(np.array([-0.84, 0.0, 0.84]), np.array([0.27, 0.02, -0.11]))
    assert optimal_by(judge, BestOfN(4), kl=kl).law.kl == pytest.approx(kl, abs=1e-9)


@pytest.mark.parametrize("kl", [0.1, 0.3753])
def test_a_judge_who_is_surest_at_the_lowest_ranks_has_an_optimum(kl: float) -> None:
    """A is surest at ranks that a table cannot hold; without them the policy wins what other policies are known to."""
    judge = ProbitSpline(np.array([-1.22, 0.0, 1.22]), np.array([-0.061, -0.057, 0.005]))
    found = optimal_by(judge, parse_procedure("worst-of-4"), kl=kl)
    assert found.law.kl == pytest.approx(kl, abs=1e-6)
    assert found.win_rate >= {0.1: 0.51221, 0.3753: 0.52463}[kl]


def test_where_the_judge_turns_the_transformation_falls() -> None:
    """For a judge who likes normal score 1.2 best, the optimum's Φ rises up to there and falls above."""
    found = optimal_by(TurningJudge(1.2), BestOfN(4), kl=0.5)
    below, above = found.transform(ndtr([[-1.0, 0.0, 0.6, 1.1], [1.3, 1.6, 2.0, 3.0]]))
    assert (np.diff(below) > 0).all()
    assert (np.diff(above) < 0).all()
    reward_optimal = optimal(BestOfN(4), kl=0.5).law
    assert found.win_rate > judged_win_rate(reward_optimal, BestOfN(4), TurningJudge(1.2)) + 0.2


def test_a_memorised_rank_wins_by_the_judge_what_simulation_says() -> None:
    """By A = h₀ the simulated win rates are those by the reward, prompt by prompt, to the exactness of a judge's."""
    for transform in (Identity(), Exponential(10)):
        known = finite_rollouts(transform, BestOfN(4), simulated_gaps(20, prompts=200), kl=0.5)
        judge = RewardAsJudge(BestOfN(4))
        found = finite_rollouts(transform, BestOfN(4), simulated_gaps(20, prompts=200), kl=0.5, judge=judge)
        assert np.abs(found.win_rates - known.win_rates).max() < 2e-3
        assert found.win_rate == pytest.approx(known.win_rate, abs=1e-4)
        assert found.limit == pytest.approx(known.limit, abs=1e-6)


def test_what_cannot_be_solved_is_said() -> None:
    """Rewind-and-Repeat, a judge without preference and a budget out of reach are refused by name."""
    flat = ProbitSpline(np.array([-1.0, 1.0]), np.array([0.0, 0.0]))
    with pytest.raises(ConfigError, match="known for procedures by rank, not for rewind"):
        optimal_by(flat, RewindAndRepeat(0.85, 8), kl=0.5)
    with pytest.raises(ConfigError, match="all reward ranks are equal"):
        optimal_by(flat, BestOfN(4), kl=0.5)
    with pytest.raises(ConfigError, match="must be positive and finite"):
        optimal_by(RewardAsJudge(BestOfN(4)), BestOfN(4), kl=0.0)


@pytest.mark.slow
def test_a_ranking_by_the_judge_puts_his_optimum_first() -> None:
    """Known exactly, the turning judge's optimum wins most, by both limits, and its gain has no error."""
    knots, scores = np.linspace(-2.5, 2.5, 7), np.linspace(-3.0, 3.0, 61)
    basis = ProbitSpline(knots, np.zeros(7)).basis(scores)
    line = ProbitSpline(knots, np.linalg.lstsq(basis.T, ndtri(TurningJudge(1.2).chance(scores)))[0])
    judge = EstimatedJudge(line, ProbitSpline(knots, line.coefficients[None]), (line, line), 100, 64, 0.0, 0.01)
    found = choose(BestOfN(4), kl=0.5, rollouts=400, judge=judge)
    assert found.candidates[0].transform.name == found.recommended.transform.name == "judged:best-of-4"
    by_name = {one.transform.name: one for one in found.candidates}
    best, plain = by_name["judged:best-of-4"], by_name["optimal:best-of-4"]
    assert best.limit == pytest.approx(optimal_by(line, BestOfN(4), kl=0.5).win_rate, abs=1e-6)
    assert found.judge is not None
    assert found.judge.gain == pytest.approx(best.limit - plain.limit, abs=1e-6)
    assert best.interval == pytest.approx((best.limit, best.limit), abs=1e-4)
    law = law_at_kl(Log(), kl=0.5)
    u = law.u
    mean = np.sum(law.weight * law.density * BestOfN(4).density(law.cdf) * line.chance(normal_scores(u, 1 - u)))
    assert by_name["log"].limit == pytest.approx(mean, abs=1e-6)


def test_a_spline_is_a_line_outside_its_knots_and_its_slope_is_its_derivative() -> None:
    """η bends only between the knots; dA/ds agrees with differences of A."""
    spline = ProbitSpline(np.array([-1.5, 0.0, 1.5]), np.array([0.1, 0.4, -0.3]))
    for far in (np.array([1.5, 2.0, 2.5]), np.array([-2.5, -2.0, -1.5])):
        assert np.diff(ndtri(spline.chance(far)), 2) == pytest.approx(0.0, abs=1e-12)
    s = np.linspace(-3, 3, 41)
    numeric = (spline.chance(s + 1e-5) - spline.chance(s - 1e-5)) / 2e-5
    assert spline.slope(s) == pytest.approx(numeric, abs=1e-8)


def test_many_judges_give_what_each_gives_alone() -> None:
    """Also by the law of a table, whose many nodes share normal scores: to 1e-6."""
    coefficients = np.array([0.0, 0.7, 0.05, -0.02, 0.01]) + np.random.default_rng(0).normal(size=(6, 5)) * 0.05
    knots, procedure = np.array([-2.5, -1.0, 0.0, 1.0, 2.5]), BestOfN(4)
    tabulated = optimal(procedure, kl=1.0).law
    assert tabulated.u.size > SCORES
    for law in (tabulated, law_at_kl(Exponential(10), kl=1.0)):
        alone = [judged_win_rate(law, procedure, ProbitSpline(knots, one)) for one in coefficients]
        assert resampled_win_rates(law, procedure, ProbitSpline(knots, coefficients)) == pytest.approx(alone, abs=1e-6)
