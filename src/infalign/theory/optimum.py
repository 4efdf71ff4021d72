"""The optimal transformation: the Φ of the policy that maximises W − β·KL for a given inference-time procedure.

For a rank procedure with density g the optimum satisfies Φ'(u) = g(F(u))·g₀(u), f ∝ e^{Φ/β}, where g₀ belongs to the
procedure that serves the base policy (docs/theory.md, optimum of a rank procedure). For Best- and Worst-of-N one
differential equation for each N serves every β (optimum of Best-of-N). For any other rank procedure, shooting from the
lower end finds all stationary points. Rewind-and-Repeat has a closed form given the probability of falling below the
threshold (optimum of Rewind-and-Repeat).
"""

import numpy as np

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RankProcedure, Served, Standard, WorstOfN, is_extreme, rewinds
from infalign.method.transforms import Tabulated
from infalign.theory.certificate import Optimum, certified
from infalign.theory.extremes import extreme_optimum
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.rewinding import rewind_optimum
from infalign.theory.shooting import shooting_optimum

PLAIN = (Standard(), BestOfN(1), WorstOfN(1))


def optimal(
    procedure: Served,
    *,
    beta: float | None = None,
    kl: float | None = None,
    base: Served | None = None,
    price: float = 0.0,
) -> Optimum:
    """Return the policy with the largest W − β·KL, or with the largest W at a KL budget, in nats.

    ``base`` serves the base policy, by default ``procedure``. ``price`` is what a draw of Rewind-and-Repeat costs in
    units of the win rate. Raises ConfigError for a budget out of reach, or a price where the number of draws is fixed.
    """
    if (beta is None) == (kl is None):
        raise ConfigError("an optimum needs either beta or a KL budget")
    for name, value in (("beta", beta), ("the KL budget", kl)):
        if value is not None and not (value > 0 and np.isfinite(value)):
            raise ConfigError(f"{name} must be positive and finite, found {value}")
    if price and not rewinds(procedure):
        raise ConfigError(f"a price of {price:g} a draw has no effect: {procedure.name} draws a fixed number of times")
    if not (price >= 0 and np.isfinite(price)):
        raise ConfigError(f"the price of a draw must be finite and at least 0, found {price}")
    theirs = procedure if base is None else base
    if rewinds(procedure):
        return rewind_optimum(procedure, theirs, beta, kl, price)
    if procedure in PLAIN and theirs in PLAIN:
        return _plain(procedure, beta, kl)
    if is_extreme(procedure) and theirs == procedure:
        return extreme_optimum(procedure, beta, kl)
    return shooting_optimum(procedure, theirs, beta, kl)


def _plain(procedure: RankProcedure, beta: float | None, kl: float | None) -> Optimum:
    """Return the optimum for one plain draw, which is the identity."""
    table = Tabulated(f"optimal:{procedure.name}", np.array([0.0, 1.0]), np.array([0.0, -1.0]), np.array([-1.0, -1.0]))
    law = aligned_law(table, beta=beta) if beta is not None else law_at_kl(table, kl=kl or 0.0)
    return certified(procedure, procedure, table, law.beta, law.kl, law.win_rate(Standard()))
