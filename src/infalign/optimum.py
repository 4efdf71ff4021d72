"""The optimal transformation: the Φ of the policy that maximises W − β·KL for a given inference-time procedure.

For a rank procedure with density g the optimum satisfies Φ'(u) = g(F(u))·g₀(u), f ∝ e^{Φ/β} (method, B1; g₀ belongs
to the procedure that serves the base policy). Best- and Worst-of-N: one differential equation a N (B3). Any other rank
procedure: shooting from the lower end, which finds all stationary points. Rewind-and-Repeat: its closed form given the
probability of falling below the threshold.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import brentq
from scipy.special import expit, logsumexp

from infalign.calibration import Array
from infalign.errors import ConfigError, InfalignError
from infalign.procedures import BestOfN, Distortion, RankProcedure, RewindAndRepeat, Standard, WorstOfN
from infalign.quadrature import Panels, graded
from infalign.theory import Law, Served, aligned_law, distortion, information, law_at_kl
from infalign.transforms import Tabulated

KNOT_STEP = 0.012  # of log β between the knots of a table
REACH = (40.0, 640.0)  # log 1/β to which Best- and Worst-of-N are solved, and solved again when a budget asks for more
SMALLEST_KL = 1e-20  # nats; below it rounding is what would be solved for
STARTS = 96  # values of log f(0) that the search for stationary points tries
SMALLEST_BETA = 1e-9  # to which a budget of Rewind-and-Repeat is looked for
LOWEST_Z = float(np.log(1e-7))
REFINED = 17  # between two of them where a stationary point lies, three times over
INSIDE = 1e-15  # densities are asked for from here to 1 − here: a user's may be infinite at an end
NEWTON_STEPS = 12
NUDGE = 1e-6
SEEDS = 8
ITERATIONS = 2000
PLAIN = (Standard(), BestOfN(1), WorstOfN(1))


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best policy for a procedure at one β, and the transformation that makes any RLHF solver find it.

    ``residual`` is the largest |log f − (Φ[F]/β − log Z)| where f ≥ 1, in nats (smaller f weigh it by f), with Φ[F]
    computed anew from the law of ``transform`` by quadrature; ``self_check`` is the largest difference of KL and win
    rate from that law and, for Best- and Worst-of-N, from the exact identities of B3. ``stationary`` counts the
    stationary points found, of which this is the best.
    """

    procedure: Served
    base: Served
    transform: Tabulated
    beta: float
    kl: float  # nats
    win_rate: float
    residual: float
    self_check: float
    stationary: int

    @property
    def law(self) -> Law:
        """The law of the calibrated reward under the optimal policy."""
        return aligned_law(self.transform, beta=self.beta)


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
    if price and not isinstance(procedure, RewindAndRepeat):
        raise ConfigError(f"a price of {price:g} a draw has no effect: {procedure.name} draws a fixed number of times")
    if not (price >= 0 and np.isfinite(price)):
        raise ConfigError(f"the price of a draw must be finite and at least 0, found {price}")
    theirs = procedure if base is None else base
    if isinstance(procedure, RewindAndRepeat):
        return _rewind(procedure, theirs, beta, kl, price)
    if procedure in PLAIN and theirs in PLAIN:
        return _plain(procedure, beta, kl)
    if isinstance(procedure, BestOfN | WorstOfN) and theirs == procedure:
        return _order_statistic(procedure, beta, kl)
    return _shooting(procedure, theirs, beta, kl)


def _plain(procedure: RankProcedure, beta: float | None, kl: float | None) -> Optimum:
    """Return the optimum for one plain draw, which is the identity."""
    table = Tabulated(f"optimal:{procedure.name}", np.array([0.0, 1.0]), np.array([0.0, -1.0]), np.array([-1.0, -1.0]))
    law = aligned_law(table, beta=beta) if beta is not None else law_at_kl(table, kl=kl or 0.0)
    return _certified(procedure, procedure, table, law.beta, law.kl, law.win_rate(Standard()))


# Best- and Worst-of-N


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
    states: Any  # of scipy: ℓ to the states, for one ℓ or many

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


def _order_statistic(procedure: BestOfN | WorstOfN, beta: float | None, kl: float | None) -> Optimum:
    n, sign = procedure.n, 1.0 if isinstance(procedure, BestOfN) else -1.0
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
    gain, part = beta / n * np.expm1(c + d), beta / n * (c - k)  # W, 1 − W: each from the better conditioned identity
    spent, wins = float(d + k), float(1.0 - part if sign > 0 else 1.0 + gain)
    identity = wins - (gain if sign > 0 else -part)
    table = _order_statistic_table(path, ell, f"optimal:{procedure.name}")
    return _certified(procedure, procedure, table, beta, spent, wins, identity=abs(float(identity)))


def _order_statistic_table(path: _Trajectory, ell: float, name: str) -> Tabulated:
    n, beta = path.n, np.exp(-ell)

    def density(
        at: float,
    ) -> float:  # of knots, integrated: Φ is smaller by e^ℓ further from the end, and its error too
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
    return _table(name, v, phi, slope)


def _table(name: str, v: Array, phi: Array, slope: Array) -> Tabulated:
    """Return the table without the knots that rounding has moved onto their neighbours."""
    kept = np.concatenate([[True], np.diff(v) > 0])
    kept[np.flatnonzero(kept)[-1]] = False
    kept[-1] = True
    return Tabulated(name, v[kept], phi[kept], slope[kept])


# Any rank procedure


@dataclass(frozen=True, slots=True, eq=False)
class _Shooting:
    """f' = f·g(F)·g₀/β from a starting log f(0): a stationary point where the curve (u, F(u)) ends in (1, 1).

    The curve is followed in σ = u + F, which neither a steep nor a flat F stops.
    """

    procedure: RankProcedure
    base: Distortion

    def follow(self, z: Array, log_beta: Array, *, rtol: float = 1e-11, dense: bool = False) -> Any:
        """Return scipy's solution with the states u, log f, KL, 1 − W for every start log f(0) = −e^z."""
        beta, count = np.exp(log_beta), len(z)

        def slopes(sigma: float, state: Array) -> Array:
            u, y = state.reshape(4, count)[:2]
            p = np.clip(sigma - u, INSIDE, 1.0 - INSIDE)
            u = np.clip(u, INSIDE, 1.0 - INSIDE)
            share = expit(y)  # of F in dσ
            lost = self.base.density(u) * (1.0 - share)
            rises = [
                1.0 - share,
                self.procedure.density(p) * lost / beta,
                y * share,
                self.procedure.distortion(p) * lost,
            ]
            return np.concatenate(rises)

        start = np.concatenate([np.zeros(count), -np.exp(z), np.zeros(2 * count)])
        return solve_ivp(slopes, (0.0, 2.0), start, "DOP853", dense_output=dense, rtol=rtol, atol=1e-3 * rtol)

    def steepest(self) -> float:
        """Return the log of the largest g, which bounds Φ(1) − Φ(0)."""
        return float(np.log(self.procedure.density(np.linspace(INSIDE, 1.0 - INSIDE, 1001)).max()))

    def scan(self, log_betas: Array) -> Array:
        """Return rows (z, log β, KL) near every stationary point at the given β."""
        steepest = self.steepest()
        z = np.stack([np.linspace(LOWEST_Z, steepest - log_beta + 0.1, STARTS) for log_beta in log_betas])
        for refinement in range(4):
            rtol = 1e-4 if refinement == 0 else 1e-6  # a policy that spares the bottom has log f(0) = −N/β
            final = self.follow(z.ravel(), np.repeat(log_betas, z.shape[1]), rtol=rtol).y[:, -1].reshape(4, *z.shape)
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
            end = self.follow(scaled - log_beta, log_beta).y[:, -1].reshape(4, free + 1, -1)
            miss = np.stack([end[0] - 1.0, np.log(np.maximum(end[2], 1e-300) / (kl or 1.0))][:free])
            jacobian = np.moveaxis((miss[:, 1:] - miss[:, :1]) / NUDGE, 2, 0)
            step = -(np.linalg.pinv(jacobian) @ miss[:, 0].T[:, :, None])[:, :, 0]
            points[:, :free] += np.clip(step, -0.5, 0.5)
        rounding = np.array([0.0, 1e-14 / (kl or 1.0)])[:free, None]  # an absolute error of the KL
        settled = (np.abs(miss[:, 0]) < 1e-9 + rounding).all(axis=0)
        rows: Array = np.concatenate([nudged[0], end[2:, 0].T], axis=1)[settled]
        rows[:, 0] -= rows[:, 1]
        return rows[np.unique(np.round(rows[:, :2], 6), axis=0, return_index=True)[1]]


def _shooting(procedure: RankProcedure, base: Served, beta: float | None, kl: float | None) -> Optimum:
    theirs = base.given(base.quantile) if isinstance(base, RewindAndRepeat) else base
    problem = _Shooting(procedure, theirs)
    points = problem.polish(problem.scan(np.log([beta]))[:, :2] if beta else _seeds(problem, kl), kl)
    if kl is not None and not len(points):
        points = _at_budget(problem, kl)
    if not len(points):
        raise InfalignError(f"no stationary point was found for {procedure.name} against {base.name}")
    prices = np.exp(points[:, 1]) if beta else 0.0  # at a KL budget all have the same KL
    z, log_beta, spent, loss = points[np.argmin(points[:, 3] + prices * points[:, 2])]
    solution = problem.follow(np.array([z]), np.array([log_beta]), dense=True)
    sigma = np.concatenate([solution.t[:-1] + share * np.diff(solution.t) for share in np.arange(8) / 8])
    sigma = np.append(np.sort(sigma), 2.0)
    u, y = solution.sol(sigma)[:2]
    u[-1] = 1.0
    p = np.clip(sigma - u, INSIDE, 1.0 - INSIDE)
    slope = -procedure.density(p) * theirs.density(np.clip(u, INSIDE, 1.0 - INSIDE))
    used = float(np.exp(log_beta))
    table = _table(f"optimal:{procedure.name}", (1.0 - u)[::-1], used * (y - y[-1])[::-1], slope[::-1])
    return _certified(procedure, base, table, used, float(spent), float(1.0 - loss), stationary=len(points))


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


# Rewind-and-Repeat


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


def _rewind(procedure: RewindAndRepeat, base: Served, beta: float | None, kl: float | None, price: float) -> Optimum:
    theirs = base.given(base.quantile) if isinstance(base, RewindAndRepeat) else base
    q = procedure.quantile
    panels = graded(edges=np.array([1.0 - q]))
    steepest = procedure.n * float(theirs.density(panels.u).max()) / (beta or SMALLEST_BETA)  # of log f
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
    table = _table(f"optimal:{procedure.name}", v, beta * (log_f - log_f[0]), slope)
    return _certified(procedure, base, table, beta, spent, wins, stationary=count, price=price)


def _certified(
    procedure: Served,
    base: Served,
    table: Tabulated,
    beta: float,
    kl: float,
    wins: float,
    *,
    identity: float = 0.0,
    stationary: int = 1,
    price: float = 0.0,
) -> Optimum:
    """Return the optimum with what an independent quadrature of its own table says of it."""
    law = aligned_law(table, beta=beta)
    mine, theirs = distortion(procedure, law), distortion(base, None)
    shape = law.panels.weight.shape
    cdf = np.clip(law.cdf, INSIDE, 1.0 - INSIDE)
    phi = -law.panels.remaining((mine.density(cdf) * theirs.density(law.u)).reshape(shape)).ravel()  # Φ(1) = 0
    if isinstance(procedure, RewindAndRepeat):
        problem, below = _Rewinding(procedure, theirs, price, law.panels), float(law.cdf_at(procedure.quantile))
        phi -= np.where(law.v <= 1.0 - procedure.quantile, 0.0, problem.pull(law.cdf.reshape(shape), below))
    misfit = law.log_density - phi / beta
    misfit -= np.sum(law.weight * law.density * misfit)
    residual = float(np.max(np.minimum(law.density, 1.0) * np.abs(misfit)))
    found = abs(law.kl - kl), abs(law.win_rate(procedure, base) - wins), identity
    return Optimum(procedure, base, table, beta, kl, wins, residual, max(found), stationary)
