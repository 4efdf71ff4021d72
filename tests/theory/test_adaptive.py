"""Adaptive N against dynamic programming over all stopping rules, closed forms, and its neighbours."""

import numpy as np
import pytest

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RankProcedure, RewindAndRepeat, Standard, parse_procedure
from infalign.method.transforms import Exponential
from infalign.theory.adaptive import adaptive_optimum, reservation
from infalign.theory.law import Law, law_at_kl
from infalign.theory.optimum import optimal


@pytest.mark.parametrize("price", [0.001, 0.02, 0.3])
def test_the_base_stops_where_another_draw_gains_its_price(price: float) -> None:
    """Against one plain draw the reservation is 1 − √(2c), and `adaptive:c:N` is the procedure with it."""
    assert reservation(None, Standard(), price=price) == pytest.approx(1 - np.sqrt(2 * price), abs=1e-9)
    procedure = parse_procedure(f"adaptive:{price}:8")
    assert isinstance(procedure, RewindAndRepeat)
    assert (procedure.quantile, procedure.n) == (pytest.approx(1 - np.sqrt(2 * price)), 8)
    assert procedure.serve == "best"


def worth(law: Law | None, base: RankProcedure, procedure: RewindAndRepeat, price: float) -> float:
    """Return W − price·E[draws] of a policy served by ``procedure``, or of the base policy itself."""
    policy = law or law_at_kl(Exponential(1), kl=1e-12)
    return policy.win_rate(procedure, base) - price * policy.draws(procedure)


@pytest.mark.parametrize("base", [Standard(), BestOfN(3)])
@pytest.mark.parametrize("kl", [None, 0.4])
def test_no_stopping_rule_is_worth_more(base: RankProcedure, kl: float | None) -> None:
    """Dynamic programming over what is best so far and how many draws are left, on 4,000 ranks, finds no more."""
    price, n = 0.03, 5
    law = None if kl is None else law_at_kl(Exponential(5), kl=kl)
    edges = np.linspace(0.0, 1.0, 4001)
    chance = np.diff(edges if law is None else law.cdf_at(edges))
    value = base.distortion((edges[1:] + edges[:-1]) / 2)  # of serving each rank
    best = value
    for _ in range(n - 1):  # draws that are left: stop, or pay and keep the better of both
        above = np.append(np.cumsum((chance * best)[::-1])[::-1][1:], 0.0)
        best = np.maximum(value, np.cumsum(chance) * best + above - price)
    found = RewindAndRepeat(reservation(law, base, price=price), n, "best")
    assert worth(law, base, found, price) == pytest.approx(chance @ best - price, abs=1e-5)


def test_policy_and_threshold_are_the_best_together() -> None:
    """At the joint optimum no nearby threshold, with the best policy for it, is worth more, nor the base's."""
    beta, price, base = 0.5, 0.05, Standard()
    procedure, found = adaptive_optimum(4, base, beta=beta, price=price)

    def objective(q: float) -> float:
        served = RewindAndRepeat(q, 4, "best")
        best = optimal(served, base=base, beta=beta, price=price)
        return best.win_rate - beta * best.kl - price * best.law.draws(served)

    own = objective(procedure.quantile)
    assert found.win_rate - beta * found.kl - price * found.law.draws(procedure) == pytest.approx(own, abs=1e-9)
    for q in (procedure.quantile - 0.02, procedure.quantile + 0.02, reservation(None, base, price=price)):
        assert objective(q) < own - 1e-6


def test_prices_that_make_no_sense_are_refused() -> None:
    """A price of 0 never ends, and one above any gain never starts."""
    for call in (lambda: reservation(None, Standard(), price=0.0), lambda: reservation(None, Standard(), price=0.6)):
        with pytest.raises(ConfigError, match="price"):
            call()
    for name in ("adaptive:0:4", "adaptive:0.5:4", "adaptive:-1:4"):
        with pytest.raises(ConfigError, match=r"between 0 and 0\.5 win rates"):
            parse_procedure(name)
