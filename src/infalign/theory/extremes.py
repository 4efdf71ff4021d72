"""The optima of Best- and Worst-of-N: one trajectory holds all of one N (docs/theory.md, optimum of Best-of-N)."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

from infalign.core.errors import ConfigError, InfalignError
from infalign.method.calibration import Array
from infalign.method.procedures import Extreme
from infalign.method.transforms import Tabulated
from infalign.theory.certificate import Optimum, as_table, certified

KNOT_STEP = 0.012  # the step of log β between the knots of a table
REACH = (40.0, 640.0)  # log 1/β up to which a trajectory is solved: the second where a budget needs it
SMALLEST_KL = 1e-20  # nats; below it the solution would be rounding error


@dataclass(frozen=True, slots=True, eq=False)
class _Trajectory:
    """All optima of one N: G'' = ±N²(xG)^{N−1}G' scaled so that F(u) = G(λu)/G(λ), against ℓ = log 1/β.

    States: c = log G'(λ), d = log λ/G(λ), k with KL = d + k, so that e^{c+d} is the density at the end where the
    policy departs most: f(1) for Best-of-N (in u), f(0) for Worst-of-N (in 1 − u).
    """

    n: int
    sign: float
    steps: Array
    kl: Array
    states: Any  # scipy's dense solution: it maps one ℓ, or many, to the states

    def rate(self, ell: Array, c: Array, d: Array) -> tuple[Array, Array]:
        """Return d log λ/dℓ and its derivative."""
        end = np.exp(c + d)
        rate = 1.0 / (self.n + (self.n - 1) * end)
        change = (self.sign * self.n**2 * np.exp(ell) - np.expm1(c + d)) * rate
        return rate, -(self.n - 1) * end * change * rate**2


@cache
def _trajectory(n: int, sign: float, reach: float) -> _Trajectory:
    def slopes(ell: float, state: Array) -> list[float]:
        c, d, k = state
        end = np.exp(c + d)
        rate = 1.0 / (n + (n - 1) * end)
        return [sign * n**2 * np.exp(ell) * rate, -np.expm1(c + d) * rate, end * (c - k) * rate]

    first = -36.0
    c = sign * n**2 / (2 * n - 1) * np.exp(first)  # the series at small λ
    start = [c, -c / (2 * n), c / (2 * n)]
    solved = solve_ivp(slopes, (first, reach), start, "DOP853", rtol=3e-14, atol=1e-24, dense_output=True)
    if not solved.success:
        raise InfalignError(f"the equation of the optimum for N = {n} was not solved: {solved.message}")
    return _Trajectory(n, sign, solved.t, solved.y[1] + solved.y[2], solved.sol)


def extreme_optimum(procedure: Extreme, beta: float | None, kl: float | None) -> Optimum:
    """Return the optimum of Best- or Worst-of-N against itself at ``beta`` or ``kl`` nats."""
    n, sign = procedure.n, procedure.sign
    for reach in REACH:
        path = _trajectory(n, sign, reach)
        if (beta is not None and np.exp(-reach) <= beta) or (kl is not None and path.kl[-1] >= kl):
            break
    else:
        raise ConfigError(
            f"the optimum for {procedure.name} is known up to a KL of {path.kl[-1]:.4g} nats (β = {np.exp(-reach):.3g})"
        )
    if kl is not None:
        if kl < SMALLEST_KL:
            raise ConfigError(f"a KL of {kl:g} leaves the base policy as it is; give at least {SMALLEST_KL:g} nats")
        above = max(int(np.searchsorted(path.kl, kl)), 1)
        low, high = float(path.steps[above - 1]), float(path.steps[above])
        ell = float(brentq(lambda at: np.log(path.states(at)[1:].sum() / kl), low, high, xtol=1e-13))
    if beta is not None:
        ell = -float(np.log(beta))
        if ell < path.steps[0]:
            raise ConfigError(f"beta = {beta:g} leaves the base policy as it is; give one below {np.exp(36.0):.2g}")
    beta = float(np.exp(-ell))
    c, d, k = path.states(ell)
    gain, part = beta / n * np.expm1(c + d), beta / n * (c - k)  # W, 1 − W, each from the better conditioned identity
    spent, wins = float(d + k), float(1.0 - part if sign > 0 else 1.0 + gain)
    identity = wins - (gain if sign > 0 else -part)
    table = _order_statistic_table(path, ell, f"optimal:{procedure.name}")
    return certified(procedure, procedure, table, beta, spent, wins, identity=abs(float(identity)))


def _order_statistic_table(path: _Trajectory, ell: float, name: str) -> Tabulated:
    n, beta = path.n, np.exp(-ell)

    def density(
        at: float,
    ) -> float:  # the integral of the knots' density: far from the end Φ is smaller by e^ℓ, and so is its error
        return 4.0 * np.exp(at / 4.0) if at < 0 else 4.0 + at

    count = int((density(ell) - density(path.steps[0])) / KNOT_STEP) + 2
    place = np.linspace(density(path.steps[0]), density(ell), count)
    ells = np.where(place < 4.0, 4.0 * np.log(np.minimum(place, 4.0) / 4.0), place - 4.0)
    ells[0], ells[-1] = path.steps[0], ell
    c, d, _ = path.states(ells)
    rate, change = path.rate(ells, c, d)
    step = np.diff(ells)
    pieces = step * (rate[1:] + rate[:-1]) / 2 + step**2 * (change[:-1] - change[1:]) / 12  # Hermite's rule
    log_position = -np.concatenate([np.cumsum(pieces[::-1])[::-1], [0.0]])  # log of λ'/λ, relative to the end
    slope = n**2 * beta * np.exp(ells - log_position)
    if path.sign > 0:
        v, phi, slope = -np.expm1(log_position)[::-1], beta * (c - c[-1])[::-1], -slope[::-1]
        v, phi, slope = np.append(v, 1.0), np.append(phi, -beta * c[-1]), np.append(slope, 0.0)
    else:
        v, phi = np.exp(log_position), beta * c
        v, phi, slope = np.insert(v, 0, 0.0), np.insert(phi, 0, 0.0), np.insert(-slope, 0, 0.0)
    return as_table(name, v, phi, slope)
