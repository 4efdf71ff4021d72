"""The optima of any rank procedure: shooting finds all stationary points.

The formulas are in docs/theory.md, optimum of a rank procedure.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import brentq
from scipy.special import expit

from infalign.core.errors import ConfigError, InfalignError
from infalign.method.calibration import Array
from infalign.method.procedures import Distortion, RankProcedure, Served, distortion, rewinds
from infalign.theory.certificate import INSIDE, Optimum, as_table, certified
from infalign.theory.law import at_base

STARTS = 96  # values of log f(0) that the search for stationary points tries
LOWEST_Z = float(np.log(1e-7))
REFINED = 17  # values tried between two that enclose a stationary point, in each of three refinements
NEWTON_STEPS = 12
NUDGE = 1e-6
PAST = 2.5  # the largest σ at a jump
FLATTEST = 1.0 - 1e-9  # the largest share of dF in dσ where u is followed
SEEDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Shooting:
    """f' = f·g(F)·g₀/β from a starting log f(0): a stationary point where the curve (u, F(u)) ends in (1, 1).

    The curve is followed in σ = u + F, which neither a steep nor a flat F stops, but for the part below a jump of g₀.
    """

    procedure: RankProcedure
    base: Distortion
    jump: float | None = None  # where g₀ jumps

    def follow(self, z: Array, log_beta: Array, *, rtol: float = 1e-11, dense: bool = False) -> list[Any]:
        """Return scipy's solutions, one after the other, with the states u, log f, KL, 1 − W, and σ for each start.

        A start is log f(0) = −e^z. Where g₀ jumps, at another σ for each, the first solution ends: up to there it
        follows u itself, in which all jump at once.
        """
        beta, count = np.exp(log_beta), len(z)

        def rises(u: Array, p: Array, y: Array) -> tuple[Array, Array, Array, Array]:
            """Return the derivatives by σ, and the share of dF in dσ."""
            share, p = expit(y), np.clip(p, INSIDE, 1.0 - INSIDE)
            lost = self.base.density(np.clip(u, INSIDE, 1.0 - INSIDE)) * (1.0 - share)
            return self.procedure.density(p) * lost / beta, y * share, self.procedure.distortion(p) * lost, share

        def by_u(u: float, state: Array) -> Array:
            y, _, _, sigma = state.reshape(4, count)
            climb, spent, lost, share = rises(np.full(count, u), sigma - u, y)
            return np.concatenate([climb, spent, lost, np.ones(count)]) / np.tile(1.0 - np.minimum(share, FLATTEST), 4)

        def by_part(part: float, state: Array, first: Array) -> Array:
            u, y = state.reshape(4, count)[:2]
            climb, spent, lost, share = rises(u, first + part * (2.0 - first) - u, y)
            return np.concatenate([1.0 - share, climb, spent, lost]) * np.tile(2.0 - first, 4)

        how: dict[str, Any] = {"method": "DOP853", "dense_output": dense, "rtol": rtol, "atol": 1e-3 * rtol}
        zero = np.zeros(count)
        first, start, found = zero, np.concatenate([zero, -np.exp(z), zero, zero]), []
        if self.jump is not None:
            below = np.nextafter(self.jump, 0.0)
            found.append(solve_ivp(by_u, (0.0, below), np.concatenate([-np.exp(z), zero, zero, zero]), **how))
            y, spent, lost, first = found[0].y[:, -1].reshape(4, count)
            first = np.minimum(first, PAST)  # F is beyond 1 already, which is all that the end has to say
            start = np.concatenate([np.full(count, self.jump), y, spent, lost])
        found.append(solve_ivp(partial(by_part, first=first), (0.0, 1.0), start, **how))
        return found

    def end(self, z: Array, log_beta: Array, *, rtol: float = 1e-11) -> Array:
        """Return the states u, log f, KL, 1 − W at σ = 2 for every start, (4, starts)."""
        states: Array = self.follow(z, log_beta, rtol=rtol)[-1].y[:, -1].reshape(4, len(z))
        return states

    def steepest(self) -> float:
        """Return the log of the largest g, which bounds Φ(1) − Φ(0)."""
        return float(np.log(self.procedure.density(np.linspace(INSIDE, 1.0 - INSIDE, 1001)).max()))

    def scan(self, log_betas: Array) -> Array:
        """Return rows (z, log β, KL) near every stationary point at the given β."""
        steepest = self.steepest()
        z = np.stack([np.linspace(LOWEST_Z, steepest - log_beta + 0.1, STARTS) for log_beta in log_betas])
        for refinement in range(4):
            rtol = 1e-4 if refinement == 0 else 1e-6  # a policy that spares the bottom has log f(0) = −N/β
            final = self.end(z.ravel(), np.repeat(log_betas, z.shape[1]), rtol=rtol).reshape(4, *z.shape)
            gap = final[0] - 1.0
            row, at = np.nonzero(np.sign(gap[:, 1:]) != np.sign(gap[:, :-1]))
            if refinement == 3 or not len(row):
                break
            low, high = z[row, at], z[row, at + 1]
            log_betas, z = log_betas[row], np.linspace(2 * low - high, 2 * high - low, REFINED, axis=1)
        share = gap[row, at] / (gap[row, at] - gap[row, at + 1])
        here, kl = ((1.0 - share) * values[row, at] + share * values[row, at + 1] for values in (z, final[2]))
        return np.stack([here, log_betas[row], kl], axis=1)

    def polish(self, seeds: Array, kl: float | None) -> Array:
        """Return rows (z, log β, KL, 1 − W): the stationary points near ``seeds`` (z, log β), each once.

        Newton's method on u = 1 at the end and, where a KL budget is given, KL = budget; all seeds at a time. It
        moves log(−β·log f(0)) = z + log β, which keeps its value where log β moves and log f(0) is large.
        """
        free = 2 if kl else 1
        points = seeds + np.stack([seeds[:, 1], np.zeros(len(seeds))], axis=1)
        for _ in range(NEWTON_STEPS):
            nudged = np.repeat(points[None], free + 1, axis=0)
            for i in range(free):
                nudged[i + 1, :, i] += NUDGE
            scaled, log_beta = nudged.reshape(-1, 2).T
            end = self.end(scaled - log_beta, log_beta).reshape(4, free + 1, -1)
            miss = np.stack([end[0] - 1.0, np.log(np.maximum(end[2], 1e-300) / (kl or 1.0))][:free])
            jacobian = np.moveaxis((miss[:, 1:] - miss[:, :1]) / NUDGE, 2, 0)
            step = -(np.linalg.pinv(jacobian) @ miss[:, 0].T[:, :, None])[:, :, 0]
            points[:, :free] += np.clip(step, -0.5, 0.5)
        rounding = np.array([0.0, 1e-14 / (kl or 1.0)])[:free, None]  # an absolute error of the KL
        settled = (np.abs(miss[:, 0]) < 1e-9 + rounding).all(axis=0)
        rows: Array = np.concatenate([nudged[0], end[2:, 0].T], axis=1)[settled]
        rows[:, 0] -= rows[:, 1]
        return rows[np.unique(np.round(rows[:, :2], 6), axis=0, return_index=True)[1]]


def shooting_optimum(procedure: RankProcedure, base: Served, beta: float | None, kl: float | None) -> Optimum:
    """Return the optimum for ``procedure`` at ``beta`` or ``kl`` nats: the best stationary point."""
    theirs = distortion(base, at_base)
    problem = _Shooting(procedure, theirs, base.quantile if rewinds(base) else None)
    points = problem.polish(problem.scan(np.log([beta]))[:, :2] if beta else _seeds(problem, kl), kl)
    if kl is not None and not len(points):
        points = _at_budget(problem, kl)
    if not len(points):
        raise InfalignError(f"no stationary point was found for {procedure.name} against {base.name}")
    prices = np.exp(points[:, 1]) if beta else 0.0  # at a KL budget all points have the same KL
    z, log_beta, spent, loss = points[np.argmin(points[:, 3] + prices * points[:, 2])]
    *before, last = problem.follow(np.array([z]), np.array([log_beta]), dense=True)
    part = _between(last.t)
    u, y = last.sol(part)[:2]
    u[-1] = 1.0
    p = (before[0].y[3, -1] if before else 0.0) * (1.0 - part) + 2.0 * part - u
    for solution in before:
        at = _between(solution.t)
        y_before, _, _, sigma = solution.sol(at)
        u, y, p = np.append(at, u), np.append(y_before, y), np.append(sigma - at, p)
    slope = -procedure.density(np.clip(p, INSIDE, 1.0 - INSIDE)) * theirs.density(np.clip(u, INSIDE, 1.0 - INSIDE))
    used = float(np.exp(log_beta))
    table = as_table(f"optimal:{procedure.name}", (1.0 - u)[::-1], used * (y - y[-1])[::-1], slope[::-1])
    return certified(procedure, base, table, used, float(spent), float(1.0 - loss), stationary=len(points))


def _between(steps: Array) -> Array:
    """Return each step and seven points to the next."""
    return np.append(
        np.sort(np.concatenate([steps[:-1] + share * np.diff(steps) for share in np.arange(8) / 8])), steps[-1]
    )


def _seeds(problem: _Shooting, kl: float | None) -> Array:
    """Return (z, log β) near the points, over a descending grid of β, whose KL is next to the budget."""
    assert kl is not None
    first = problem.steepest() - np.log(kl)  # KL ≤ (Φ(1) − Φ(0))/β for every stationary point
    found = np.empty((0, 3))
    for start in range(0, 96, 4):
        found = np.concatenate([found, problem.scan(first - 0.25 * np.arange(start, start + 4))])
        distance = np.abs(np.log(np.maximum(found[:, 2], 1e-300) / kl))
        if found[:, 2].max(initial=0.0) > 2.0 * kl and distance.min() < np.log(2.0):
            return found[np.argsort(distance)[:SEEDS], :2]
    raise ConfigError(f"no optimum for {problem.procedure.name} spends {kl:g} nats")


def _at_budget(problem: _Shooting, kl: float) -> Array:
    """Return the row of `polish` for the β whose best policy spends ``kl``: slower than Newton's method, but sure."""

    @cache
    def best(log_beta: float) -> Array:
        points = problem.polish(problem.scan(np.array([log_beta]))[:, :2], None)
        if not len(points):
            raise ConfigError(
                f"the optimum for {problem.procedure.name} at beta = {np.exp(log_beta):.3g} was not found; "
                "choose a smaller KL budget"
            )
        row: Array = points[np.argmin(points[:, 3] + np.exp(log_beta) * points[:, 2])]
        return row

    high = problem.steepest() - np.log(kl)
    while best(low := high - 1.0)[2] < kl:
        high = low
    root = brentq(lambda at: np.log(best(at)[2] / kl), low, high, xtol=1e-11)
    if abs(best(root)[2] / kl - 1.0) > 1e-6:
        raise ConfigError(
            f"no beta spends {kl:g} nats: the optimum for {problem.procedure.name} jumps over that KL; choose another"
        )
    return best(root)[None]
