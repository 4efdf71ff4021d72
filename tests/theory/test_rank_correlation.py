"""What a policy wins that knows ranks through noise, against closed forms, Monte Carlo and a model with cells."""

from typing import Any

import numpy as np
import pytest
from rank_correlation import fitted_rank_correlations, law_at_rank_correlation, supported_correlation
from scipy.special import ndtr, ndtri

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN
from infalign.method.transforms import Exponential, Function, Identity, parse_transform
from infalign.theory.law import law_at_kl


@pytest.mark.parametrize("rho", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("kl", [0.1, 1.0])
def test_a_linear_reward_of_the_score_has_a_closed_form(rho: float, kl: float) -> None:
    """Φ(u) = z tilts s to N(√(2·KL), 1), so z is N(ρ√(2·KL), 1) and one plain draw wins N(ρ√KL)."""
    found = law_at_rank_correlation(Function("score", lambda u: ndtri(np.clip(u, 1e-15, 1 - 1e-15))), rho=rho, kl=kl)
    assert found.law.win_rate(Standard()) == pytest.approx(ndtr(rho * np.sqrt(kl)), abs=1e-5)
    assert found.law.kl == pytest.approx(rho**2 * kl, rel=1e-4)
    assert found.beta == pytest.approx(rho / np.sqrt(2 * kl), rel=1e-3)


@pytest.mark.parametrize("procedure", [BestOfN(4), WorstOfN(2), RewindAndRepeat(0.85, 8)])
def test_knowing_more_wins_more_up_to_the_law_of_exact_ranks(procedure: Any) -> None:
    """At one KL the win rate rises with ρ, from the base's one half to theory's."""
    transform = parse_transform("exp:-5" if procedure == WorstOfN(2) else "exp:5")
    wins = [
        law_at_rank_correlation(transform, rho=rho, kl=0.5).law.win_rate(procedure)
        for rho in (0.02, 0.3, 0.6, 0.9, 0.99, 1.0)
    ]
    assert wins[0] == pytest.approx(0.5, abs=0.015)
    assert (np.diff(wins) > 0).all()
    assert wins[-1] == pytest.approx(law_at_kl(transform, kl=0.5).win_rate(procedure), abs=1e-12)
    assert wins[-1] - wins[-2] < 0.01


def test_what_a_policy_knows_is_found_again() -> None:
    """ρ comes back from KL and win rate, also from pairs near the first; more than theory's is 1, and nothing is 0."""
    known = [
        law_at_rank_correlation(Exponential(10), rho=rho, kl=kl).law.win_rate(BestOfN(4))
        for rho, kl in ((0.66, 0.5), (0.66, 0.55))
    ]
    found = fitted_rank_correlations(Exponential(10), BestOfN(4), [0.5, 0.55, 0.5, 0.5], [*known, 0.95, 0.4])
    assert found == pytest.approx([0.66, 0.66, 1.0, 0.0], abs=0.005)
    assert [supported_correlation(rho) for rho in (0.0, 0.66, 0.992, 0.999)] == [0.02, 0.66, 0.99, 1.0]


def test_what_is_no_correlation_is_refused() -> None:
    """1 is exact knowledge; above it there is none."""
    with pytest.raises(ConfigError, match=r"between 0\.02 and 0\.99, found 1\.2"):
        law_at_rank_correlation(Identity(), rho=1.2, kl=0.1)
