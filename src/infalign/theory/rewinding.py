"""The optima of Rewind-and-Repeat: a closed form given the probability of failing, and a root scan over it.

The formulas are in docs/theory.md, optimum of Rewind-and-Repeat.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logsumexp

from infalign.core.errors import ConfigError, InfalignError
from infalign.method.calibration import Array
from infalign.method.procedures import Distortion, RewindAndRepeat, Served, distortion
from infalign.method.quadrature import Panels, graded
from infalign.theory.certificate import Optimum, as_table, certified
from infalign.theory.law import Law, at_base, information

SMALLEST_BETA = 1e-9  # the smallest β that is tried for a budget
ITERATIONS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class _Rewinding:
    """The best policy among those that fall below the threshold with probability s.

    On either side of the quantile q its log f climbs by h'(F; s)·g₀/β; the jump at q follows from s.
    """

    procedure: RewindAndRepeat
    base: Distortion
    price: float
    panels: Panels  # with an edge at q

    def climb(self, s: float, beta: float) -> tuple[Array, Array, Array, float]:
        """Return (log f)', log f and F at the nodes, and the jump of log f at q, for a probability ``s`` of failing."""
        fails = self.panels.u < self.procedure.quantile
        served, theirs = self.procedure.given(s), self.base.density(self.panels.u)
        cdf = np.where(fails, 0.0, s)  # where the last draw is served the climb does not depend on F
        share, moved = 1.0, np.inf
        for _ in range(ITERATIONS):
            inside = np.where(fails, np.minimum(cdf, s * (1.0 - 1e-15)), 1.0)
            steps = served.density(inside) * theirs / beta
            climbed = self.panels.cumulative(steps)
            total = [float(logsumexp(climbed, b=self.panels.weight * side)) for side in (fails, ~fails)]
            log_f = climbed + np.where(fails, np.log(s) - total[0], np.log1p(-s) - total[1])
            change = self.panels.cumulative(np.exp(log_f)) - cdf
            moving = float(np.max(np.abs(change)))
            if self.procedure.serve == "last" or moving < 1e-13:
                return steps, log_f, cdf + change, float(np.log1p(-s) - np.log(s) + total[0] - total[1])
            if moving > 0.95 * moved:  # undamped, the iteration may cycle
                share /= 2
            cdf, moved = cdf + share * change, moving
        raise InfalignError(f"the optimum of {self.procedure.name} at beta = {beta:g} did not settle")

    def pull(self, cdf: Array, s: float) -> float:
        """Return ∫ ∂h/∂s(F; s)·g₀ du + price·∂E[draws]/∂s: β times the jump of log f at q that is optimal."""
        n, last = self.procedure.n, self.procedure.serve == "last"
        powers = s ** np.arange(n)
        tries, more = float(powers.sum()), float(np.sum(np.arange(1, n) * powers[:-1]))
        failing = (n - 1) * s ** (n - 2) * cdf if last and n > 1 else 0.0
        passing = n * powers[-1] - tries + (cdf - s) * more
        by_s = np.where(self.panels.u < self.procedure.quantile, failing, passing)
        return float(np.sum(self.panels.weight * by_s * self.base.density(self.panels.u))) + self.price * more

    def outcome(self, s: float, beta: float) -> tuple[float, float]:
        """Return KL and win rate."""
        _, log_f, cdf, _ = self.climb(s, beta)
        served = self.procedure.given(s).distortion(cdf)
        wins = 1.0 - float(np.sum(self.panels.weight * served * self.base.density(self.panels.u)))
        return float(np.sum(self.panels.weight * information(log_f))), wins

    def stationary(self, beta: float) -> list[float]:
        """Return every s that is optimal to first order."""
        q = self.procedure.quantile
        away = np.geomspace(1e-4, 690.0, 40)
        odds = np.log(q / (1.0 - q)) + np.concatenate([-away[::-1], away[away < 30.0]])

        def excess(log_odds: float) -> float:
            s = float(expit(log_odds))
            _, _, cdf, jump = self.climb(s, beta)
            return beta * jump - self.pull(cdf, s)

        values = np.array([excess(float(x)) for x in odds])
        at = np.flatnonzero(np.sign(values[1:]) != np.sign(values[:-1]))
        return [float(expit(brentq(excess, odds[i], odds[i + 1], xtol=1e-14))) for i in at]

    def best(self, beta: float) -> tuple[float, float, float, int]:
        """Return s, KL, win rate and the number of stationary points at ``beta``."""
        found = [(s, *self.outcome(s, beta)) for s in self.stationary(beta)]
        if not found:
            raise InfalignError(f"no stationary point was found for {self.procedure.name} at beta = {beta:g}")
        best = max(
            found, key=lambda point: point[2] - beta * point[1] - self.price * self.procedure.expected_draws(point[0])
        )
        return *best, len(found)


def rewind_optimum(
    procedure: RewindAndRepeat, base: Served, beta: float | None, kl: float | None, price: float
) -> Optimum:
    """Return the optimum for ``procedure`` at ``beta`` or ``kl`` nats, a draw costing ``price`` win rates."""
    theirs = distortion(base, at_base)
    q = procedure.quantile
    panels = graded(edges=np.array([1.0 - q]))
    steepest = procedure.n * float(theirs.density(panels.u).max()) / (beta or SMALLEST_BETA)  # slope of log f
    panels = graded(max(12, int(np.log2(steepest)) + 4), edges=np.array([1.0 - q]))
    problem = _Rewinding(procedure, theirs, price, panels)
    if kl is not None:
        high = 0.0
        while problem.best(np.exp(high))[1] > kl:
            high += 2.0
        low = high - 2.0
        while problem.best(np.exp(low))[1] < kl:
            low -= 1.0
            if low < np.log(SMALLEST_BETA):
                reached = problem.best(np.exp(low + 1.0))[1]
                raise ConfigError(
                    f"the optimum for {procedure.name} is known up to a KL of {reached:.4g} nats, found {kl:g}"
                )
        beta = float(np.exp(brentq(lambda at: np.log(problem.best(np.exp(at))[1] / kl), low, high, xtol=1e-12)))
    assert beta is not None
    s, spent, wins, count = problem.best(beta)
    steps, log_density, _, jump = problem.climb(s, beta)
    panels, served = problem.panels, procedure.given(s)
    v = np.concatenate([[0.0], panels.v.ravel()[::-1], [1.0 - q, np.nextafter(1.0 - q, 1.0), 1.0]])
    v.sort()
    fails = v > 1.0 - q
    u = np.where(fails, np.minimum(1.0 - v, np.nextafter(q, 0.0)), np.maximum(1.0 - v, q))
    log_f = panels.integral_to(steps, u) + np.where(fails, 0.0, jump)
    ranks = np.where(fails, np.minimum(panels.integral_to(np.exp(log_density), u), s * (1.0 - 1e-15)), 1.0)
    slope = -served.density(ranks) * theirs.density(u)
    table = as_table(f"optimal:{procedure.name}", v, beta * (log_f - log_f[0]), slope)
    extra = threshold_pull(procedure, base, price)
    return certified(procedure, base, table, beta, spent, wins, stationary=count, extra=extra)


def threshold_pull(procedure: RewindAndRepeat, base: Served, price: float = 0.0) -> Callable[[Law], Array]:
    """Return what Φ[F] has besides ∫ h′(F; s)·h₀′: below the quantile F also moves s, the probability of failing."""
    theirs, q = distortion(base, at_base), procedure.quantile

    def pull(law: Law) -> Array:
        below, problem = law.chance_below(q), _Rewinding(procedure, theirs, price, law.panels)
        return -np.where(law.v <= 1.0 - q, 0.0, problem.pull(law.cdf.reshape(law.panels.weight.shape), below))

    return pull
