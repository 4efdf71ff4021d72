"""Finite models against definitions, brute force and the continuous limit; finite rollouts against closed forms."""

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import xlogy

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array, win
from infalign.method.procedures import BestOfN, RewindAndRepeat, Served, Standard, WorstOfN, parse_procedure
from infalign.method.transforms import Exponential, Identity, Log, Power, Transformation
from infalign.theory.finite_model import FiniteModel
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps
from infalign.theory.optimum import optimal

RANKED = ["standard", "best-of-4", "worst-of-3", "2nd-best-of-5", "0.3*best-of-8+0.7*standard"]
RANKED += ["0.5*best-of-2+0.5*worst-of-4"]
REWIND = ["rewind:0.6:4", "rewind:0.6:4:best", "rewind:0.85:32", "rewind:0.01:3", "rewind:0.6:1", "rewind:0.6:2:best"]
PAIRS = [(name, None) for name in RANKED + REWIND] + [("best-of-4", "standard"), ("rewind:0.6:4", "best-of-2")]


def tied(responses: int = 12, seed: int = 0) -> FiniteModel:
    """Return a model with unequal probabilities and ties."""
    rng = np.random.default_rng(seed)
    return FiniteModel(rng.dirichlet(np.ones(responses)), rng.integers(0, responses // 2, responses))


def uniform(responses: int) -> FiniteModel:
    """Return a model with equally likely responses and no ties."""
    return FiniteModel(np.full(responses, 1.0 / responses), np.arange(responses))


def some_policy(model: FiniteModel, seed: int = 1) -> Array:
    """Return a policy that has nothing to do with the reference."""
    return np.random.default_rng(seed).dirichlet(np.ones(model.reference.size))


def test_ranks_and_kl_are_those_of_the_definitions() -> None:
    """C(y) = E_{z~π_ref} w(y, z), ties counted 1/2; a policy on one response pays −log of its reference probability."""
    model = tied()
    expected = win(model.rewards[:, None], model.rewards) @ model.reference
    np.testing.assert_allclose(model.calibrated(), expected, atol=1e-15)
    assert model.kl(np.eye(12)[5]) == pytest.approx(-np.log(model.reference[5]), abs=1e-14)
    assert model.kl(model.reference) == 0.0


def enumerated(model: FiniteModel, policy: Array, procedure: Served) -> Array:
    """Return T_π by enumerating all draws; ties go to each of the tied draws alike."""
    served = np.zeros(policy.size)
    n = procedure.n  # type: ignore[union-attr]
    order = np.argsort(model.rewards, kind="stable")
    reached = np.cumsum(model.reference[order]) >= getattr(procedure, "quantile", 0.0) - 1e-9
    threshold = model.rewards[order][np.argmax(reached)]
    for draws in np.ndindex(*(policy.size,) * n):
        rewards = model.rewards[list(draws)]
        if isinstance(procedure, RewindAndRepeat):
            passing = np.flatnonzero(rewards >= threshold)
            if passing.size:
                chosen = passing[:1]
            elif procedure.serve == "best":
                chosen = np.flatnonzero(rewards == rewards.max())
            else:
                chosen = np.array([n - 1])
        else:
            best = rewards.max() if isinstance(procedure, BestOfN) else rewards.min()
            chosen = np.flatnonzero(rewards == best)
        for draw in chosen:
            served[draws[draw]] += np.prod(policy[list(draws)]) / chosen.size
    return served


@pytest.mark.parametrize("name", ["best-of-3", "worst-of-3", "rewind:0.6:3", "rewind:0.6:3:best", "rewind:0.9:3"])
def test_served_law_is_that_of_all_possible_draws(name: str) -> None:
    """T_π is what picking among n draws gives when every outcome of the draws is enumerated."""
    model, procedure = tied(7), parse_procedure(name)
    policy = some_policy(model)
    served = model.served(policy, procedure)
    np.testing.assert_allclose(served, enumerated(model, policy, procedure), atol=1e-14)
    base = enumerated(model, model.reference, procedure)
    double_sum = served @ win(model.rewards[:, None], model.rewards) @ base
    assert model.win_rate(policy, procedure) == pytest.approx(double_sum, abs=1e-14)


@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_gradient_agrees_with_finite_differences(name: str, base: str | None) -> None:
    """R is the derivative of W along every direction that keeps the sum of the probabilities."""
    model, procedure = tied(), parse_procedure(name)
    served_by = parse_procedure(base) if base else None
    policy = 0.5 * some_policy(model) + 0.5 * model.reference
    gradient = model.gradient(policy, procedure, served_by)
    step = 1e-5 * policy.min()
    for direction in np.eye(12) - policy:
        ahead, behind = (model.win_rate(policy + sign * step * direction, procedure, served_by) for sign in (1.0, -1.0))
        assert gradient @ direction == pytest.approx((ahead - behind) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("name", RANKED + REWIND)
def test_gradient_is_that_towards_other_responses_where_the_policy_has_only_one(name: str) -> None:
    """At a policy on a single response, passing or failing, R is the derivative towards each of the others."""
    model, procedure = tied(), parse_procedure(name)
    assert model.win_rate(model.reference, procedure) == pytest.approx(0.5, abs=1e-14)
    for only in np.eye(12):
        np.testing.assert_allclose(model.served(only, procedure), only, atol=1e-15)
        gradient, wins = model.gradient(only, procedure), model.win_rate(only, procedure)
        for other in np.eye(12)[::3]:
            rise = (model.win_rate((1 - 1e-7) * only + 1e-7 * other, procedure) - wins) / 1e-7
            assert gradient @ (other - only) == pytest.approx(rise, abs=1e-4)


@pytest.mark.parametrize(("name", "base"), PAIRS)
@pytest.mark.parametrize("beta", [1.0, 0.01])
def test_optimum_solves_the_fixed_point_and_beats_other_policies(name: str, base: str | None, beta: float) -> None:
    """The optimum fulfils log π/π_ref = R/β − log Z to 1e-10, and no other policy is better."""
    model, procedure = tied(), parse_procedure(name)
    served_by = parse_procedure(base) if base else None
    optimum = model.optimum(procedure, beta=beta, base=served_by)
    assert optimum.residual < 1e-10
    assert optimum.policy.sum() == pytest.approx(1.0, abs=1e-12)
    assert optimum.win_rate == pytest.approx(model.win_rate(optimum.policy, procedure, served_by), abs=1e-13)
    assert optimum.kl == pytest.approx(model.kl(optimum.policy), abs=1e-12)
    for other in np.random.default_rng(2).dirichlet(np.ones(12), 50):
        for part in (1.0, 0.1, 0.001):
            policy = (1 - part) * optimum.policy + part * other
            value = model.win_rate(policy, procedure, served_by) - beta * model.kl(policy)
            assert value < optimum.win_rate - beta * optimum.kl + 1e-14


@pytest.mark.parametrize("name", ["best-of-4", "worst-of-3", "2nd-best-of-5", "rewind:0.6:4"])
def test_mirror_ascent_ends_at_the_optimum(name: str) -> None:
    """Small steps of mirror ascent from the reference policy lead to the optimum and not above it."""
    model, procedure, beta = tied(), parse_procedure(name), 0.2
    log_ratio = np.zeros(12)
    for _ in range(1000):
        policy = model.reference * np.exp(log_ratio)
        policy /= policy.sum()
        log_ratio += 0.1 * (model.gradient(policy, procedure) / beta - np.log(policy / model.reference))
    optimum = model.optimum(procedure, beta=beta)
    reached = model.win_rate(policy, procedure) - beta * model.kl(policy)
    assert optimum.win_rate - beta * optimum.kl >= reached - 1e-14
    np.testing.assert_allclose(policy, optimum.policy, atol=1e-8)


@pytest.mark.parametrize("name", ["best-of-4", "worst-of-4", "rewind:0.5:4", "rewind:0.9:4", "standard"])
def test_binary_rewards_agree_with_a_grid_search(name: str) -> None:
    """With rewards 0 and 1 a policy is its success rate x, and no x on a fine grid beats the optimum."""
    model, procedure, beta = FiniteModel([0.5, 0.2, 0.3], [0, 1, 0]), parse_procedure(name), 0.3
    x = np.linspace(0.0, 1.0, 20_001)
    # W = Σ T(y)·T⁰(z)·w = (1 + T(success) − T⁰(success))/2
    draws = 1 if name == "standard" or name == "rewind:0.5:4" else 4  # 0.5 is below the failures' mass: all pass
    success = x**4 if name == "worst-of-4" else 1 - (1 - x) ** draws
    base = 0.2**4 if name == "worst-of-4" else 1 - 0.8**draws
    values = 0.5 * (1 + success - base) - beta * (xlogy(x, x / 0.2) + xlogy(1 - x, (1 - x) / 0.8))
    optimum = model.optimum(procedure, beta=beta)
    assert optimum.win_rate - beta * optimum.kl == pytest.approx(values.max(), abs=1e-8)
    assert optimum.policy[1] == pytest.approx(x[np.argmax(values)], abs=1e-4)
    assert optimum.policy[0] / optimum.policy[2] == pytest.approx(5 / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("procedure", "beta", "tolerance"),
    [(BestOfN(4), 0.1, 5e-5), (WorstOfN(4), 0.1, 1e-6), (RewindAndRepeat(0.85, 32), 1.0, 5e-4)],
    ids=["best", "worst", "rewind"],
)
def test_many_equal_atoms_approach_the_continuous_optimum(procedure: Served, beta: float, tolerance: float) -> None:
    """With 4000 equally likely responses KL and win rate are those of the continuous problem."""
    found, known = uniform(4000).optimum(procedure, beta=beta), optimal(procedure, beta=beta)
    assert (found.kl, found.win_rate) == pytest.approx((known.kl, known.win_rate), abs=tolerance)
    assert found.residual < 1e-10
    assert found.stationary_points == 1


def test_every_stationary_point_is_found() -> None:
    """Worst-of-8 against a base served by Best-of-8 has one fixed point at β = .5 and three at .3 and .2."""
    model = uniform(400)
    found = [model.optimum(WorstOfN(8), beta=beta, base=BestOfN(8)) for beta in (0.5, 0.3, 0.2)]
    assert [optimum.stationary_points for optimum in found] == [1, 3, 3]
    assert found[1].win_rate - 0.3 * found[1].kl == pytest.approx(0.00008, abs=1e-5)
    assert found[2].win_rate - 0.2 * found[2].kl == pytest.approx(0.1213, abs=5e-4)


@pytest.mark.parametrize("name", ["best-of-4", "worst-of-3", "rewind:0.6:4"])
def test_a_budget_is_spent(name: str) -> None:
    """With kl= the optimum has that KL, and it is the optimum at its β."""
    model, procedure = tied(), parse_procedure(name)
    optimum = model.optimum(procedure, kl=0.4)
    assert optimum.kl == pytest.approx(0.4, abs=1e-10)
    assert optimum.win_rate == pytest.approx(model.optimum(procedure, beta=optimum.beta).win_rate, abs=1e-12)


@pytest.mark.parametrize("beta", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("name", ["best-of-4", "worst-of-4", "worst-of-32", "2nd-best-of-4"])
def test_the_optimum_stays_one_at_small_beta(name: str, beta: float) -> None:
    """Where log π/π_ref spans many hundreds, the recursion still meets the stationarity condition."""
    rng = np.random.default_rng(0)
    model = FiniteModel(rng.dirichlet(np.ones(57)), rng.normal(size=57))
    assert model.optimum(parse_procedure(name), beta=beta).residual < 1e-7


def test_a_budget_out_of_reach_names_the_largest() -> None:
    """No policy can be better than all mass on the best responses, whose KL is −log of their probability."""
    model = FiniteModel([0.5, 0.2, 0.3], [0, 1, 0])
    with pytest.raises(ConfigError, match=r"below 1\.60944"):
        model.optimum(BestOfN(4), kl=1.7)
    with pytest.raises(ConfigError, match=r"a KL of 2\.0 nats is out of reach: .* only 0\.30[0-9]* are spent"):
        uniform(50).optimum(WorstOfN(128), kl=2.0)
    with pytest.raises(ConfigError, match="optimum jumps across it"):
        uniform(100).optimum(WorstOfN(8), kl=0.5, base=BestOfN(8))


def test_a_single_reward_leaves_the_reference_policy() -> None:
    """Where all responses tie nothing can be gained."""
    optimum = FiniteModel([0.4, 0.6], [1.0, 1.0]).optimum(BestOfN(4), beta=0.1)
    np.testing.assert_allclose(optimum.policy, [0.4, 0.6], atol=1e-15)
    assert (optimum.win_rate, optimum.kl, optimum.residual) == (0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("reference", "rewards", "message"),
    [
        ([0.5, 0.0, 0.5], [1, 2, 3], r"reference probability 1 is 0\.0"),
        ([0.5, 0.5], [1, np.nan], "reward 1 is nan"),
        ([0.5, 0.4], [1, 2], r"sum to 0\.9"),
        ([0.5, 0.5], [1, 2, 3], "one probability and one reward"),
    ],
)
def test_bad_models_are_refused(reference: list[float], rewards: list[float], message: str) -> None:
    """A model that is no distribution over finite rewards is an error that names the entry."""
    with pytest.raises(DataError, match=message):
        FiniteModel(np.array(reference), np.array(rewards))


def test_bad_arguments_are_refused() -> None:
    """Policies that are no distributions, and both or neither of beta and kl, are errors."""
    model = FiniteModel([0.5, 0.5], [0, 1])
    for policy, message in (([0.5, 0.4], "sum to 0.9"), ([1.5, -0.5], "probability 1 is -0.5"), ([1.0], "shape")):
        with pytest.raises(ConfigError, match=message):
            model.win_rate(policy, BestOfN(2))
    for settings in ({}, {"beta": 1.0, "kl": 1.0}, {"beta": 0.0}):
        with pytest.raises(ConfigError, match="beta"):
            model.optimum(BestOfN(2), **settings)


@pytest.mark.parametrize(("rollouts", "win_rate"), [(8, 0.807), (16, 0.831), (32, 0.848), (100, 0.863), (256, 0.868)])
def test_win_rate_of_finite_rollouts_has_the_known_values(rollouts: int, win_rate: float) -> None:
    """Best-of-4, exp:10 at KL .5 loses .003 at K = 256 and .06 at K = 8; exact calibration gives .872."""
    found = finite_rollouts(Exponential(10.0), BestOfN(4), simulated_gaps(rollouts), kl=0.5)
    assert found.win_rate == pytest.approx(win_rate, abs=5e-4 + 4 * found.standard_error)
    assert found.limit == pytest.approx(0.872, abs=1e-3)
    assert found.kl == pytest.approx(0.5, abs=1e-10)


@pytest.mark.parametrize(
    ("transform", "procedure"), [(Exponential(200.0), BestOfN(128)), (Exponential(-50.0), WorstOfN(128))]
)
def test_win_rates_are_exact_at_large_n_and_small_k(transform: Transformation, procedure: BestOfN | WorstOfN) -> None:
    """At N = 128 and K = 16 the win rate is that of a rule exact for polynomials of degree 255, to 1e-9."""
    found = finite_rollouts(transform, procedure, simulated_gaps(16, prompts=50, seed=3), kl=0.5)
    x, weight = np.polynomial.legendre.leggauss(128)
    win_rates = []
    for lengths in simulated_gaps(16, prompts=50, seed=3):
        masses = lengths * np.exp(transform(np.arange(17) / 16) * transform.scale / found.beta)
        masses /= masses.sum()
        ends, cdf = np.append(0, np.cumsum(lengths)), np.append(0, np.cumsum(masses))
        lost = 0.0
        for c in range(17):
            u, f = ends[c] + lengths[c] * (x + 1) / 2, cdf[c] + masses[c] * (x + 1) / 2
            lost += lengths[c] / 2 * weight @ (procedure.distortion(f) * procedure.density(u))
        win_rates.append(1 - lost)
    assert found.win_rate == pytest.approx(np.mean(win_rates), abs=1e-9)


def test_one_rollout_agrees_with_the_integral_over_its_rank() -> None:
    """With K = 1 the only unknown is the rank of the one reference, which is uniform."""
    found = finite_rollouts(Identity(), Standard(), simulated_gaps(1, prompts=5000), kl=0.1)
    x, weight = np.polynomial.legendre.leggauss(100)
    rank, weight = (x + 1) / 2, weight / 2

    def exact(log_odds: float) -> tuple[float, float]:
        failing = rank / (rank + (1 - rank) * np.exp(log_odds))
        kls = xlogy(failing, failing / rank) + xlogy(1 - failing, (1 - failing) / (1 - rank))
        return float(weight @ kls), float(weight @ (1 - (rank * failing + (1 - rank) * (failing + 1)) / 2))

    log_odds = brentq(lambda x: exact(x)[0] - 0.1, 0.1, 10.0)
    assert found.beta == pytest.approx(1 / log_odds, rel=0.02)
    assert found.win_rate == pytest.approx(exact(log_odds)[1], abs=4 * found.standard_error)
    assert found.standard_error < 1e-3


def test_simulated_policies_win_what_is_computed() -> None:
    """Policies that pick among 1000 responses by their rank among 4 references, served by Best-of-2, agree."""
    found = finite_rollouts(Exponential(3.0), BestOfN(2), simulated_gaps(4, prompts=5000), kl=0.3)
    weight_of_rank = np.exp(Exponential(3.0)(np.arange(5) / 4) * Exponential(3.0).scale / found.beta)
    rng = np.random.default_rng(5)
    win_rates, kls = [], []
    for _ in range(2000):
        responses = rng.random(1000)
        weights = weight_of_rank[np.searchsorted(np.sort(rng.random(4)), responses)]
        policy = weights / weights.sum()
        kls.append(policy @ np.log(1000 * policy))
        served = rng.choice(responses, size=(20, 2), p=policy).max(axis=1)
        win_rates.append(win(served, rng.random((20, 2)).max(axis=1)).mean())
    error = 4 * np.std(win_rates) / np.sqrt(2000)
    assert np.mean(win_rates) == pytest.approx(found.win_rate, abs=error)
    assert np.mean(kls) == pytest.approx(0.3, abs=0.01)
    assert 0.6 < found.win_rate < found.limit


def test_standard_error_is_the_spread_over_seeds() -> None:
    """The standard error is the standard deviation over independent simulations; pairing prompts lowers it by half."""
    first, second = (
        [finite_rollouts(phi, BestOfN(4), simulated_gaps(16, prompts=50, seed=s), kl=0.5) for s in range(150)]
        for phi in (Exponential(10.0), Power(7.0))
    )
    error = np.mean([run.standard_error for run in first])
    assert np.std([run.win_rate for run in first], ddof=1) == pytest.approx(error, rel=0.25)
    paired = [(one.win_rates - other.win_rates).std() / np.sqrt(50) for one, other in zip(first, second, strict=True)]
    assert np.mean(paired) < 0.5 * error


@pytest.mark.parametrize("transform", [Log(), Exponential(-10.0), Power(-7.0)])
def test_many_rollouts_approach_exact_calibration(transform: Transformation) -> None:
    """The loss is positive at K = 16, also where Φ(0) is −∞, and all but gone at K = 2000."""
    few, many = (finite_rollouts(transform, WorstOfN(4), simulated_gaps(k, prompts=50), kl=0.3) for k in (16, 2000))
    assert few.lost > 4 * few.standard_error
    assert abs(many.lost) < 0.1 * few.lost + 4 * many.standard_error


def test_budgets_and_procedures_out_of_reach_are_refused() -> None:
    """K = 4 rollouts cannot spend more than about 1 + 1/2 + 1/3 + 1/4 nats; Rewind-and-Repeat is no rank procedure."""
    with pytest.raises(ConfigError, match=r"4 rollouts cannot spend a KL of 3\.0 nats.* below 2\.[01]"):
        finite_rollouts(Identity(), Standard(), simulated_gaps(4), kl=3.0)
    with pytest.raises(ConfigError, match=r"rewind:0\.85:32"):
        finite_rollouts(Identity(), Standard(), simulated_gaps(4), against=RewindAndRepeat(0.85, 32), kl=1.0)
    with pytest.raises(ConfigError, match="at least 1 rollout"):
        finite_rollouts(Identity(), Standard(), simulated_gaps(0), kl=1.0)
