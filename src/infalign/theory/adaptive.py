"""Adaptive N: draw on as long as another draw is worth its price.

Draws are independent, cost ``price`` each in units of the win rate, and the best so far can be served, so the best rule
of all is a threshold: stop at the first draw whose rank u has A(u) of at least the reservation value, N draws at most
(Weitzman 1979). This is Rewind-and-Repeat that serves the best, with the quantile that the price chooses. For the base
policy against one plain draw it is 1 − √(2·price), which ``adaptive:PRICE:N`` spells.
"""

import numpy as np
from scipy.optimize import brentq

from infalign.core.errors import ConfigError, InfalignError
from infalign.method.procedures import RankProcedure, RewindAndRepeat
from infalign.method.quadrature import graded
from infalign.theory.certificate import Optimum
from infalign.theory.law import Law
from infalign.theory.optimum import optimal

FIRST, LAST = 1e-9, 1.0 - 1e-9  # the thresholds that are tried
ROUNDS, SETTLED = 60, 1e-7


def reservation(law: Law | None, base: RankProcedure, *, price: float) -> float:
    """Return the base quantile from which on a response is kept: there, another draw gains what it costs.

    The gain of a draw over a response of rank q is ∫_q^1 (1 − F(u))·h₀′(u) du, with F that of ``law``, None for the
    base policy itself, and h₀ of the procedure that serves the base. Raises ConfigError for a price that is not
    positive, and for one that is above the gain over the worst response.
    """
    if not price > 0:
        raise ConfigError(f"without a price, drawing never ends; give a positive one, found {price:g}")

    def excess(q: float) -> float:
        panels = graded(edges=np.array([1.0 - q]))
        u = panels.u
        beyond = panels.v if law is None else 1.0 - law.cdf_at(u)
        gain = np.sum(panels.weight * np.where(u >= q, beyond * base.density(u), 0.0))
        return float(gain) - price

    if excess(FIRST) <= 0:
        raise ConfigError(f"a price of {price:g} a draw is more than any second draw can gain")
    return float(brentq(excess, FIRST, LAST, xtol=1e-12)) if excess(LAST) < 0 else LAST


def adaptive_optimum(n: int, base: RankProcedure, *, beta: float, price: float) -> tuple[RewindAndRepeat, Optimum]:
    """Return the threshold, as a procedure, and the policy that maximise W − β·KL − ``price``·E[draws].

    At most ``n`` are drawn. The optimum for a threshold and the reservation of its law take turns; either raises the
    same objective. Raises as `reservation`.
    """
    q = reservation(None, base, price=price)
    for _ in range(ROUNDS):
        procedure = RewindAndRepeat(q, n, "best")
        best = optimal(procedure, base=base, beta=beta, price=price)
        q = reservation(best.law, base, price=price)
        if abs(q - procedure.quantile) < SETTLED:
            return procedure, best
    raise InfalignError(f"policy and threshold did not settle at beta = {beta:g} and a price of {price:g}")
