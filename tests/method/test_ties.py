"""The optimum for rewards that tie has its known answers, and no other policy is better."""

import numpy as np
import pytest
from scipy.special import xlogy

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.optimum import Goal, Optimal, optimum
from infalign.method.procedures import BestOfN, Mixture, RankProcedure, WorstOfN
from infalign.method.shapings import log_ratios, shape_rollouts

GRADED = np.repeat([0.0, 0.25, 0.5, 1.0], [4, 3, 2, 1])[None]
COUNTS = (0, 1, 2, 4, 8, 16, 28, 32)
CHECKED = np.array([[0.0] * (32 - c) + [1.0] * c for c in COUNTS])


def masses(probabilities_PK: Array, rewards_PK: Array) -> list[float]:
    """Return the mass of each distinct reward of one prompt."""
    return [float(probabilities_PK[0, rewards_PK[0] == value].sum()) for value in np.unique(rewards_PK)]


@pytest.mark.parametrize(
    ("objective", "q", "value", "kl"),
    [
        ("reward", (0.245642, 0.193562, 0.171150, 0.389646), 0.920397, 0.298696),
        ("win-rate", (0.253846, 0.195435, 0.190749, 0.359970), 0.750950, 0.252846),
    ],
)
def test_four_classes(objective: Goal, q: tuple[float, ...], value: float, kl: float) -> None:
    """Graded rewards, for Best-of-4 at β = .3."""
    found = optimum(GRADED, BestOfN(4), beta=0.3, objective=objective)
    assert masses(found.probabilities_PK, GRADED) == pytest.approx(q, abs=1e-6)
    assert (found.value, found.kl) == (pytest.approx(value, abs=1e-6), pytest.approx(kl, abs=1e-6))


def test_one_beta_spends_the_mean_budget() -> None:
    """Eight prompts, two of which have no signal."""
    found = optimum(CHECKED, BestOfN(4), kl=0.3, smoothed=False)
    assert (found.beta, found.value) == (pytest.approx(0.197554, abs=1e-6), pytest.approx(0.844498, abs=1e-6))
    successes = [float(law[row == 1].sum()) for law, row in zip(found.probabilities_PK, CHECKED, strict=True)]
    known = (0, 0.45610, 0.49090, 0.53208, 0.58536, 0.67175, 0.87888, 1)
    assert successes == pytest.approx(known, abs=1e-5)


def objective_of(q: Array, p: Array, w: Array, procedure: RankProcedure, beta: float) -> Array:
    """Return J − β·KL of policies (…, m)."""
    served = np.diff(procedure.distortion(np.minimum(q.cumsum(axis=-1), 1.0)), axis=-1, prepend=0.0)
    return np.asarray((served * w).sum(-1) - beta * xlogy(q, q / p).sum(-1))


@pytest.mark.parametrize("procedure", [BestOfN(4), WorstOfN(4), Mixture(((0.5, BestOfN(3)), (0.5, WorstOfN(3))))])
def test_no_other_policy_is_better(procedure: RankProcedure) -> None:
    """On 350 small cases with ties and few classes: none of 1,500 policies, nor a neighbor of the optimum."""
    rng = np.random.default_rng(0)
    for _ in range(350):
        rewards = np.sort(rng.choice(rng.normal(size=rng.integers(1, 5)), size=8))
        values, counts = np.unique(rewards, return_counts=True)
        beta = float(np.exp(rng.uniform(-3, 1)))
        found = optimum(rewards[None], procedure, beta=beta, objective="reward", smoothed=False)
        q, p = np.array(masses(found.probabilities_PK, rewards[None])), counts / 8
        best = objective_of(q, p, values, procedure, beta)
        assert best == pytest.approx(found.value - beta * found.kl, abs=1e-9)
        others = rng.dirichlet(np.ones(len(p)) * rng.choice([0.3, 1.0]), size=1500)
        near = np.abs(q + rng.normal(size=(200, len(p))) * 1e-3)
        for policies in (others, near / near.sum(axis=1, keepdims=True)):
            assert (objective_of(policies, p, values, procedure, beta) <= best + 1e-9).all()


@pytest.mark.parametrize("objective", ["reward", "win-rate"])
@pytest.mark.parametrize("procedure", [BestOfN(4), WorstOfN(3)])
def test_ordinary_rlhf_with_the_shaped_reward_has_this_optimum(procedure: RankProcedure, objective: Goal) -> None:
    """π ∝ π_ref·exp(g/β) over the rollouts, by the shaping and by the table of shaped rewards."""
    rewards = np.repeat(np.random.default_rng(1).normal(size=(3, 6)), [1, 2, 3, 1, 2, 3], axis=1)
    found = optimum(rewards, procedure, beta=0.2, objective=objective)
    for shaped in (found.shaped_PK, shape_rollouts(found.shaping, rewards)):
        assert np.exp(log_ratios(shaped, 0.2)) / 12 == pytest.approx(found.probabilities_PK, abs=1e-9)


def test_a_reward_off_the_sample_has_the_derivative_of_a_class_of_its_own() -> None:
    """Between, below and above the stored rewards: the derivative of J when a little mass is moved there."""
    references, beta, step = np.sort(GRADED[0]), 0.3, 1e-6
    found = optimum(references[None], BestOfN(4), beta=beta, objective="reward")
    q, values = np.array(masses(found.probabilities_PK, references[None])), np.unique(references)
    for reward in (-0.5, 0.1, 0.4, 0.9, 1.5):
        every = np.append(values, reward)
        order = np.argsort(every)
        p = np.ones(5)

        def at(mass: float, order: Array = order, every: Array = every, p: Array = p) -> Array:
            moved = np.append(q * (1 - mass), mass)[order]
            return objective_of(moved, p, every[order], BestOfN(4), 0.0)

        slope = (at(step) - at(0.0)) / step
        own = Optimal(BestOfN(4), beta)(np.append(values, reward), references)
        assert own[-1] - q @ own[:-1] == pytest.approx(float(slope), abs=1e-4)


def test_training_takes_a_half_success_more() -> None:
    """(c + ½)/(K + 1), also where no rollout or every one succeeds."""
    found = optimum(CHECKED, BestOfN(8), kl=0.3)
    assert shape_rollouts(found.shaping, CHECKED) == pytest.approx(found.shaped_PK, abs=1e-9)
    never = found.shaping([0.0, 1.0], CHECKED[0])
    gain = never[1] - never[0]
    odds = np.exp(gain / found.beta) * 0.5 / 32.5
    assert gain == pytest.approx(8 * (1 / (1 + odds)) ** 7, abs=1e-9)
    by_wins = optimum(CHECKED, BestOfN(8), beta=0.2, objective="win-rate")
    assert by_wins.kl == pytest.approx(optimum(CHECKED, BestOfN(8), beta=0.4).kl, abs=1e-9)


def test_a_jump_that_leaves_a_budget_unspent_says_what_can_be_spent() -> None:
    """Of .372 nats Worst-of-8 spends next to nothing, at a β just below far more, and of .69 all, without a word."""
    with pytest.warns(UserWarning, match=r"0\.372 nats only 0\.000334 are spent, .* worst-of-8 jumps .* to 0\.663"):
        found = optimum([[0, 1]], "worst-of-8", kl=0.372, smoothed=False)
    assert found.kl == pytest.approx(0.000334, rel=1e-3)
    assert optimum([[0, 1]], "worst-of-8", beta=found.beta * 0.999, smoothed=False).kl == pytest.approx(0.663, abs=1e-3)
    assert optimum([[0, 1]], "worst-of-8", kl=0.69, smoothed=False).kl == pytest.approx(0.69)


@pytest.mark.parametrize(("kl", "n"), [(0.65, 4), (0.66, 8)])
def test_other_local_optima_spend_what_a_jump_leaves(kl: float, n: int) -> None:
    """They are among those of a fine grid; none that is left would fit, and the shaping, or its name, tells all."""
    counts = np.array([1, 2, 3, 4, 4, 5, 6, 24, 28, 30])
    rewards = np.array([[0.0] * (32 - c) + [1.0] * c for c in counts])
    found = optimum(rewards, WorstOfN(n), kl=kl, smoothed=False)
    best = optimum(rewards, WorstOfN(n), beta=found.beta, smoothed=False)
    assert best.kl < found.kl <= kl
    assert best.kl < 0.95 * kl
    assert found.value > best.value
    near = np.geomspace(1e-9, 0.01, 3000)
    success = np.concatenate([near, np.linspace(0.01, 0.99, 100_000)[1:-1], 1.0 - near[::-1]])
    spends, left = np.zeros(len(counts)), np.zeros(len(counts))
    for i, c in enumerate(counts):
        q, p = np.stack([1.0 - success, success], axis=1), np.array([32.0 - c, c]) / 32
        j = objective_of(q, p, np.array([0.0, 1.0]), WorstOfN(n), found.beta)
        peaks = 1 + np.flatnonzero((j[1:-1] > j[:-2]) & (j[1:-1] > j[2:]))
        own = found.probabilities_PK[i, rewards[i] == 1.0].sum()
        assert np.abs(success[peaks] - own).min() < 2e-5
        above = peaks[success[peaks] > own + 1e-3]
        kls = xlogy(q, q / p).sum(axis=1)[[np.abs(success - own).argmin(), *above]]
        spends[i], left[i] = kls[0], kls[-1] - kls[0] if above.size else np.inf
    assert spends.mean() == pytest.approx(found.kl, abs=1e-4)
    assert all(found.kl + left[counts == c].sum() / len(counts) > kl for c in counts)
    for shaping in (found.shaping, Optimal.parse(found.shaping.name)):
        assert shape_rollouts(shaping, rewards) == pytest.approx(found.shaped_PK, abs=1e-12)
    assert log_ratios(found.shaped_PK, found.beta) == pytest.approx(found.log_ratios_PK, abs=1e-9)


@pytest.mark.parametrize("pair", [(-1.0, 1.0), (0.0, 5.0), (0.25, 0.5)])
@pytest.mark.parametrize("smoothed", [False, True])
def test_two_other_rewards_are_a_failure_and_a_success(pair: tuple[float, float], smoothed: bool) -> None:
    """The laws are those of 0 and 1, smoothed or not, and so is the shaping, by which the stored rewards are shaped."""
    low, high = pair
    plain = optimum(CHECKED, "best-of-8", kl=0.3, smoothed=smoothed)
    found = optimum(low + (high - low) * CHECKED, "best-of-8", kl=0.3, smoothed=smoothed)
    assert (found.kl, found.largest_kl) == pytest.approx((plain.kl, plain.largest_kl))
    assert found.value == pytest.approx(low + (high - low) * plain.value)
    shaped = found.shaping(pair, np.full(32, low))
    assert shaped == pytest.approx((high - low) * plain.shaping([0.0, 1.0], np.zeros(32)))
    assert shape_rollouts(plain.shaping, CHECKED) == pytest.approx(plain.shaped_PK, abs=1e-9)


def test_log_ratios_do_not_depend_on_the_type_of_rewards() -> None:
    """Whole numbers and half precision as floats do."""
    for kind in (np.int64, np.uint8, np.float16, bool):
        for law in (
            lambda rewards: optimum(rewards[None], "best-of-2", beta=0.2, objective="reward").log_ratios_PK,
            lambda rewards: log_ratios(rewards[None], 0.5),
        ):
            assert law(np.array([0, 1, 1, 0], kind)).tolist() == law(np.array([0.0, 1.0, 1.0, 0.0])).tolist()


def test_what_cannot_be_asked_is_refused() -> None:
    """A budget with the largest, graded rewards without an objective, both or neither of kl and beta, and NaN."""
    largest = -np.log([c / 32 or 1 for c in COUNTS]).mean()
    with pytest.raises(ConfigError, match=rf"below {largest:.4g}, the mean of −log"):
        optimum(CHECKED, BestOfN(4), kl=5.0, smoothed=False)
    with pytest.raises(ConfigError, match="name the objective, reward or win-rate"):
        optimum(GRADED, BestOfN(4), kl=0.1)
    for given in ({}, {"kl": 0.1, "beta": 0.1}):
        with pytest.raises(ConfigError, match="exactly one of kl and beta"):
            optimum(CHECKED, BestOfN(4), **given)
    with pytest.raises(ConfigError, match="beta must be positive and finite, found 0"):
        optimum(CHECKED, BestOfN(4), beta=0)
    with pytest.raises(DataError, match="rewards must be finite, prompts × 2 rollouts or more"):
        optimum([[0.0, np.nan]], BestOfN(4), kl=0.1)
    with pytest.raises(ConfigError, match=r"unknown objective 'rewad'; known: reward, win-rate"):
        optimum(CHECKED, "best-of-2", beta=0.1, objective="rewad")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="prompts × 2 rollouts or more, found no prompts"):
        optimum(np.empty((0, 4)), "best-of-2", beta=0.1)
    with pytest.raises(ConfigError, match=r"0\.3 nats for best-of-100000 cannot be computed; lower the KL"):
        optimum([[0, 0, 0, 1]], "best-of-100000", kl=0.3, smoothed=False)


def test_prompts_may_have_different_numbers_of_rollouts() -> None:
    """Each has the law that it has beside prompts with as many, at the one β of all."""
    rewards = [[0, 0, 0, 1], [0, 1], [1, 0, 0, 0, 0, 1], [0, 1]]
    best = optimum(rewards, "best-of-4", kl=0.2)
    for row, law, shaped in zip(rewards, best.probabilities_PK, best.shaped_PK, strict=True):
        alone = optimum([row], "best-of-4", beta=best.beta)
        assert law == pytest.approx(alone.probabilities_PK[0])
        assert shaped == pytest.approx(alone.shaped_PK[0])
    assert best.kl == pytest.approx(0.2)
