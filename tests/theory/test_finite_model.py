"""Finite models against definitions, brute force, a recursion that finds every stationary point, and the limit."""

import numpy as np
import pytest
from finite_model import FiniteModel
from finite_optima import best_law, stationary_laws

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array, win
from infalign.method.procedures import BestOfN, RewindAndRepeat, Served, WorstOfN, parse_procedure
from infalign.theory.optimum import rank_optimum

RANKED = ["standard", "best-of-4", "worst-of-3", "2nd-best-of-5", "0.3*best-of-8+0.7*standard"]
RANKED += ["0.5*best-of-2+0.5*worst-of-4"]
REWIND = ["rewind:0.6:4", "rewind:0.6:4:best", "rewind:0.85:32", "rewind:0.01:3", "rewind:0.6:1", "rewind:0.6:2:best"]
PAIRS = [(name, None) for name in RANKED + REWIND] + [("best-of-4", "standard"), ("rewind:0.6:4", "best-of-2")]


def tied(responses: int = 12) -> FiniteModel:
    """Return a model with unequal probabilities and ties."""
    rng = np.random.default_rng(0)
    return FiniteModel(rng.dirichlet(np.ones(responses)), rng.integers(0, responses // 2, responses))


def uniform(responses: int) -> FiniteModel:
    """Return a model with equally likely responses and no ties."""
    return FiniteModel(np.full(responses, 1.0 / responses), np.arange(responses))


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
    policy = np.random.default_rng(1).dirichlet(np.ones(7))
    served = model.served(policy, procedure)
    np.testing.assert_allclose(served, enumerated(model, policy, procedure), atol=1e-14)
    base = enumerated(model, model.reference, procedure)
    double_sum = served @ win(model.rewards[:, None], model.rewards) @ base
    assert model.win_rate(policy, procedure) == pytest.approx(double_sum, abs=1e-14)


@pytest.mark.parametrize(("name", "base"), PAIRS)
@pytest.mark.parametrize("kl", [0.03, 0.4])
def test_optimum_solves_the_fixed_point_and_beats_other_policies(name: str, base: str | None, kl: float) -> None:
    """The optimum spends the budget and fulfils log π/π_ref = R/β − log Z, and no policy has a larger W − β·KL."""
    model, procedure = tied(), parse_procedure(name)
    served_by = parse_procedure(base) if base else None
    optimum = model.optimum(procedure, kl=kl, base=served_by)
    assert optimum.residual < 1e-10
    assert optimum.value == pytest.approx(model.win_rate(optimum.policy, procedure, served_by), abs=1e-13)
    assert optimum.kl == pytest.approx(model.kl(optimum.policy), abs=1e-12)
    for other in np.random.default_rng(2).dirichlet(np.ones(12), 50):
        for part in (1.0, 0.1, 0.001):
            policy = (1 - part) * optimum.policy + part * other
            value = model.win_rate(policy, procedure, served_by) - optimum.beta * model.kl(policy)
            assert value < optimum.value - optimum.beta * optimum.kl + 1e-14


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("kl", [0.05, 1.0])
@pytest.mark.parametrize("model", [tied(), uniform(300)], ids=["ties", "no ties"])
def test_the_best_of_all_stationary_points_is_found(model: FiniteModel, kl: float, name: str) -> None:
    """At its β, a recursion from one end that misses no stationary point finds the same policy the best."""
    procedure = parse_procedure(name)
    kl = min(kl, -0.6 * float(np.log(model.masses(model.reference)[-1])))
    optimum = model.optimum(procedure, kl=kl)
    law = best_law(model, procedure, optimum.beta)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.exp(law), optimum.policy, atol=1e-9)


def test_every_stationary_point_is_found() -> None:
    """Worst-of-8 against a base served by Best-of-8 has one fixed point at β = .5 and three at .3 and .2."""
    found = [stationary_laws(uniform(400), WorstOfN(8), beta, BestOfN(8)) for beta in (0.5, 0.3, 0.2)]
    assert list(map(len, found)) == [1, 3, 3]


@pytest.mark.parametrize(
    ("name", "base", "kl", "tolerance"),
    [
        *(("best-of-4", None, 0.9, 5e-6), ("worst-of-4", None, 0.7, 1e-6), ("rewind:0.85:32", None, 0.137, 2e-4)),
        *((name, None, 0.3, 2e-6) for name in ("2nd-best-of-8", "top-2-of-8", "0.5*best-of-4+0.5*standard")),
        *(("0.5*best-of-8+0.5*worst-of-8", None, 0.3, 2e-6), ("best-of-8", "standard", 0.3, 2e-6)),
        *(("worst-of-8", "best-of-8", 0.3, 1e-6), ("rewind:0.85:32:best", None, 0.3, 1e-4)),
        *(("best-of-4", "rewind:0.75:8", 0.3, 2e-4), ("rewind:0.75:8", "standard", 0.3, 1e-4)),
    ],
)
def test_many_equal_atoms_approach_the_continuous_optimum(
    name: str, base: str | None, kl: float, tolerance: float
) -> None:
    """With 4000 equally likely responses, of which none beats the optimum, win rate and β are the continuous ones."""
    procedure, served_by = parse_procedure(name), parse_procedure(base) if base else None
    found, known = (solve(procedure, kl=kl, base=served_by) for solve in (uniform(4000).optimum, rank_optimum))
    assert found.value == pytest.approx(known.win_rate, abs=tolerance)
    assert found.beta == pytest.approx(known.beta, rel=2e-3)


def test_a_budget_out_of_reach_names_the_largest() -> None:
    """No policy can be better than all mass on the best responses; where all responses tie nothing is to be won."""
    with pytest.raises(ConfigError, match=r"a KL of 1\.7 nats is out of reach; the maximum is 1\.609"):
        FiniteModel([0.5, 0.2, 0.3], [0, 1, 0]).optimum(BestOfN(4), kl=1.7)
    with pytest.raises(ConfigError, match=r"all ranks are worth the same"):
        FiniteModel([0.4, 0.6], [1.0, 1.0]).optimum(BestOfN(4), kl=0.1)
    with pytest.raises(ConfigError, match=r"must be positive and finite, found nan"):
        uniform(3).optimum(BestOfN(4), kl=np.nan)
