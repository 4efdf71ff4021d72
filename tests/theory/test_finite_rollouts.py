"""The cost of ranking among K rollouts, against closed forms, other rules and policies that are simulated."""

import numpy as np
import pytest

from infalign.core.errors import ConfigError
from infalign.method.calibration import win
from infalign.method.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN
from infalign.method.transforms import Exponential, Identity, Log, Power, Transformation
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps


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
        finite_rollouts(Identity(), Standard(), simulated_gaps(4), base=RewindAndRepeat(0.85, 32), kl=1.0)
    with pytest.raises(ConfigError, match="at least 1 rollout"):
        finite_rollouts(Identity(), Standard(), simulated_gaps(0), kl=1.0)
