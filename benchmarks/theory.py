"""Print the time of the theory engine beside what one would write without it, each with the error it really has.

    python benchmarks/theory.py

Three jobs: one point of a curve (best-of-4, e^{10u}, 1 nat); the optimum for best-of-4 at 1 nat; the analytic figure,
5 procedures × 6 transformations and 4 optima, × 40 budgets. Three ways: infalign; the paper's equations on a uniform
grid of u, with the optimum by its fixed-point iteration, damped so that it converges; SciPy's adaptive routines, `quad`
with `brentq` on β for the curves and `solve_bvp` for the optimum.

A grid is doubled until its win rates are within 1e-6 and 1e-9 of the truth, or as far as is feasible. It gets the best
damping and a bracket of β for nothing. The truth of a curve is its closed form in 25 digits, that of an optimum the
iteration by Simpson's rule on 131,072 intervals, good to some 1e-12. The ways take turns; medians of CPU time. Grids do
4 of the figure's 40 budgets, times 10. Exits with 1 if an optimum takes 10 ms or more after the first for its N, or if
the trapezoidal rule takes less than 100 times as long for 1e-9. One thread, two minutes.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from mpmath import mp
from scipy.integrate import quad, quad_vec, solve_bvp
from scipy.optimize import brentq

from infalign import BestOfN, Exponential, WorstOfN, law_at_kl, optimal
from infalign.method.calibration import Array
from infalign.method.procedures import RankProcedure, Standard
from infalign.method.transforms import Identity, Log, Transformation

PROCEDURES = Standard(), BestOfN(2), BestOfN(4), WorstOfN(2), WorstOfN(4)
TRANSFORMS = Identity(), Log(), Exponential(5), Exponential(10), Exponential(-5), Exponential(-10)
KLS = [float(kl) for kl in np.geomspace(0.05, 3, 40)]
EVERY = 13
SAMPLE = KLS[::EVERY]  # where the figure's errors are measured
SOLVED = PROCEDURES[1:]  # with an optimum of their own: for one plain draw it is the identity
ACCURACIES = 1e-6, 1e-9
FINEST, FINEST_FIGURE, TRUTH = 2**20, 2**16, 2**17  # intervals of a grid; the truth's has Simpson's rule
ROUNDS, SLOW, IN_A_ROW = 5, 2.0, 0.05  # what takes more than SLOW seconds is done once
SLOWEST_OPTIMUM, LEAST_RATIO = 0.010, 100.0
BETAS = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
SLOPES = {  # of the undamped iteration at its fixed point, at BETAS; Worst-of-N's is below 0.36 and needs no damping
    "best-of-2": [5.26, 4.70, 3.90, 2.97, 1.79, 0.816, 0.244, 0.075, 0.022],
    "best-of-4": [13.5, 11.2, 8.57, 6.18, 3.73, 1.90, 0.659, 0.209, 0.059],
}

Rule = Callable[[Array], Array]  # values on the grid to their integrals from 0
Answer = float | Sequence[float] | Array
WinRates = Callable[[Transformation, float, Sequence[RankProcedure]], Sequence[float] | Array]


# The uniform grid


def trapezoid(y: Array) -> Array:
    """Return the integral from 0 to every point."""
    total = np.zeros_like(y)
    np.cumsum((y[1:] + y[:-1]) / (2 * (len(y) - 1)), out=total[1:])
    return total


def simpson(y: Array) -> Array:
    """Return the integral from 0 to every point, a parabola for every two intervals."""
    a, b, c = y[:-2:2], y[1:-1:2], y[2::2]
    pieces = np.empty(len(y) - 1)
    pieces[0::2] = 5 * a + 8 * b - c
    pieces[1::2] = 5 * c + 8 * b - a
    total = np.zeros_like(y)
    np.cumsum(pieces / (12 * (len(y) - 1)), out=total[1:])
    return total


@dataclass(frozen=True)
class Grid:
    """The paper's equations at ``intervals`` + 1 points."""

    intervals: int
    rule: Rule
    tolerance: float  # of the log density, for the iteration

    @property
    def u(self) -> Array:
        """The points."""
        return np.linspace(0.0, 1.0, self.intervals + 1)

    def curve(self, transform: Transformation, kl: float, procedures: Sequence[RankProcedure]) -> list[float]:
        """Return the win rates of the policy that spends ``kl`` nats."""
        phi = transform(self.u)
        phi -= phi.max()

        def log_density(log_beta: float) -> Array:
            exponent = phi / math.exp(log_beta)
            return exponent - math.log(self.rule(np.exp(exponent))[-1])

        log_beta = root(lambda at: self.kl(log_density(at)) - kl)
        return [self.win_rate(log_density(log_beta), procedure) for procedure in procedures]

    def optimum(self, procedure: RankProcedure, kl: float, near: float) -> float:
        """Return the largest win rate at ``kl`` nats, whose β is within a factor of 2 of ``near``."""
        log_f = np.zeros(self.intervals + 1)

        def excess(log_beta: float) -> float:
            nonlocal log_f  # the next β starts from here
            log_f = self.iterated(procedure, math.exp(log_beta), log_f=log_f)
            return self.kl(log_f) - kl

        middle = math.log(near)
        brentq(excess, middle - math.log(2), middle + math.log(2), xtol=self.tolerance)
        return self.win_rate(log_f, procedure)

    def iterated(
        self,
        procedure: RankProcedure,
        beta: float,
        *,
        log_f: Array | None = None,
        damped: bool = True,
        steps: int = 10_000,
    ) -> Array:
        """Return the log density after log f ← (1 − η)·log f + η·Φ[F]/β until it moves by less than ``tolerance``."""
        log_f = np.zeros(self.intervals + 1) if log_f is None else log_f
        slope = np.interp(math.log(beta), np.log(BETAS), SLOPES[procedure.name]) if procedure.name in SLOPES else 0.0
        share = 2.0 / (2.0 + slope) if damped else 1.0
        theirs = procedure.density(self.u)
        for _ in range(steps):
            cdf = self.rule(np.exp(log_f))
            step = self.rule(procedure.density(cdf / cdf[-1]) * theirs) / beta
            step -= step[-1]
            step -= math.log(self.rule(np.exp(step))[-1])
            moved = np.abs(step - log_f).max()
            log_f = log_f + share * (step - log_f)
            if moved < self.tolerance:
                break
        return log_f

    def kl(self, log_f: Array) -> float:
        """Return ∫ f log f."""
        return float(self.rule(np.exp(log_f) * np.maximum(log_f, -700.0))[-1])

    def win_rate(self, log_f: Array, procedure: RankProcedure) -> float:
        """Return W = 1 − ∫ h(F)·h'(u) du."""
        cdf = self.rule(np.exp(log_f))
        return 1.0 - float(self.rule(procedure.distortion(cdf / cdf[-1]) * procedure.density(self.u))[-1])


def root(function: Callable[[float], float]) -> float:
    """Return the zero of a decreasing function of log β, from a bracket that grows around 0."""
    low = high = 0.0
    while function(high) > 0:
        high += 2.0
    while function(low) < 0:
        low -= 2.0
    return float(brentq(function, low, high, xtol=1e-13))


# SciPy's adaptive routines


def scalar(transform: Transformation) -> Callable[[float], float]:
    """Return Φ − Φ(1) as Python's own arithmetic, which `quad` calls faster than NumPy's."""
    match transform:
        case Exponential(t):
            sign, top = math.copysign(1.0, t), max(t, 0.0)
            return lambda u: sign * (math.exp(t * u - top) - math.exp(t - top))
        case Log():
            return math.log
    return lambda u: u - 1.0


def scipy_curve(transform: Transformation, kl: float, procedures: Sequence[RankProcedure], accuracy: float) -> Array:
    """Return the win rates by nested adaptive quadrature."""
    phi, asked = scalar(transform), {"epsabs": accuracy, "epsrel": accuracy, "limit": 200}

    def moments(log_beta: float) -> tuple[float, float]:
        beta = math.exp(log_beta)
        total = quad(lambda u: math.exp(phi(u) / beta), 0, 1, **asked)[0]
        mean = quad(lambda u: phi(u) / beta * math.exp(phi(u) / beta), 0, 1, **asked)[0] / total
        return total, mean - math.log(total)

    log_beta = root(lambda at: moments(at)[1] - kl)
    beta, total = math.exp(log_beta), moments(log_beta)[0]

    def lost(u: float) -> Array:
        cdf = quad(lambda x: math.exp(phi(x) / beta), 0, u, **asked)[0] / total
        return np.array([procedure.distortion(cdf) * procedure.density(u) for procedure in procedures])

    return np.asarray(1.0 - quad_vec(lost, 0, 1, epsabs=accuracy, epsrel=accuracy, norm="max")[0])


def scipy_optima(procedure: RankProcedure, kls: Sequence[float], accuracy: float) -> list[float]:
    """Return the largest win rates at ascending ``kls`` by collocation, each from the solution before; NaN if it fails.

    F' = f and (log f)' = h'(F)·h'(u)/β, with KL and 1 − W as two more states and log β as the unknown parameter.
    """

    def slopes(u: Array, y: Array, p: Array) -> Array:
        cdf, f = np.clip(y[0], 0.0, 1.0), np.exp(y[1])
        theirs = procedure.density(u)
        rise = procedure.density(cdf) * theirs / np.exp(max(p[0], -30.0))
        return np.stack([f, rise, f * y[1], procedure.distortion(cdf) * theirs])

    def ends(start: Array, end: Array, p: Array, *, kl: float) -> Array:
        return np.array([start[0], end[0] - 1.0, start[2], end[2] - kl, start[3]])

    def surplus(t: float) -> float:  # of the KL of e^{tu}
        return t / -math.expm1(-t) - 1.0 - math.log(math.expm1(t) / t) - kls[0]

    u, tilt = np.linspace(0.0, 1.0, 201), float(brentq(surplus, 1e-3, 100.0))
    cdf, log_f = np.expm1(tilt * u) / math.expm1(tilt), tilt * u + math.log(tilt / math.expm1(tilt))
    y, p = np.stack([cdf, log_f, kls[0] * cdf, cdf * u]), [-math.log(tilt)]
    win_rates = []
    for kl in kls:
        with np.errstate(over="ignore", invalid="ignore"):
            solved = solve_bvp(slopes, partial(ends, kl=kl), u, y, p=p, tol=accuracy, max_nodes=30_000)
        if solved.success:
            u, y, p = solved.x, solved.y, solved.p
        win_rates.append(1.0 - float(solved.y[3, -1]) if solved.success else math.nan)
    return win_rates


# The truth


def true_curve(transform: Transformation, kl: float, procedures: Sequence[RankProcedure]) -> list[float]:
    """Return the win rates from the closed forms of F and KL."""

    def forms(beta: mp.mpf) -> tuple[Callable[[mp.mpf], mp.mpf], mp.mpf, mp.mpf]:
        """Return ∫_0^u e^{Φ/β}, ∫_0^1 Φ/β·e^{Φ/β} and the offset of Φ/β in both, which keeps them in range."""
        match transform:
            case Exponential(t) if t > 0:
                low, high, scale = 1 / beta, mp.exp(t) / beta, mp.exp(-mp.exp(t) / beta)
                mean = scale * (mp.exp(high) - mp.exp(low)) / t
                return lambda u: scale * (mp.ei(mp.exp(t * u) / beta) - mp.ei(low)) / t, mean, high
            case Exponential(t):
                low, high = 1 / beta, mp.exp(t) / beta
                mean = (mp.exp(-high) - mp.exp(-low)) / t
                return lambda u: (mp.e1(low) - mp.e1(mp.exp(t * u) / beta)) / t, mean, mp.mpf(0)
            case Log():
                a = 1 + 1 / beta
                return lambda u: u**a / a, -1 / (beta * a**2), mp.mpf(0)
        return (
            lambda u: beta * (mp.exp((u - 1) / beta) - mp.exp(-1 / beta)),
            (1 - beta) + beta * mp.exp(-1 / beta),
            1 / beta,
        )

    def spent(log_beta: mp.mpf) -> mp.mpf:
        integral, mean, offset = forms(mp.exp(log_beta))
        total = integral(mp.mpf(1))
        return mean / total - offset - mp.log(total)

    start = mp.log(law_at_kl(transform, kl=kl).beta)
    log_beta = mp.findroot(lambda at: spent(at) - kl, (start - 1e-3, start + 1e-3), solver="anderson", tol=1e-20)
    integral = forms(mp.exp(log_beta))[0]
    total = integral(mp.mpf(1))

    def win_rate(procedure: RankProcedure) -> float:
        def lost(u: mp.mpf) -> mp.mpf:
            cdf = integral(u) / total
            match procedure:
                case BestOfN(n):
                    return cdf**n * n * u ** (n - 1)
                case WorstOfN(n):
                    return (1 - (1 - cdf) ** n) * n * (1 - u) ** (n - 1)
            return cdf

        return float(1 - mp.quad(lost, [0, 0.5, 0.9, 0.99, 0.999, 1]))

    return [win_rate(procedure) for procedure in procedures]


def true_optimum(procedure: RankProcedure, kl: float) -> float:
    """Return the largest win rate at ``kl`` nats: the iteration at one β, moved to the budget by dW/dKL = β."""
    beta = optimal(procedure, kl=kl).beta
    grid = Grid(TRUTH, simpson, 1e-12)
    log_f = grid.iterated(procedure, beta)
    return grid.win_rate(log_f, procedure) + beta * (kl - grid.kl(log_f))


# Measuring


@dataclass
class Way:
    """One way to do a job."""

    name: str
    work: Callable[[], Answer]
    share: float = 1.0  # of the job that ``work`` does
    every: int = 1  # of the answers is compared with the truth
    seconds: list[float] = field(default_factory=list)
    error: float = math.nan
    failed: int = 0

    def run(self, truth: Array) -> None:
        """Do it once more, unless it is slow; what is fast, several times in a row."""
        if self.seconds and self.seconds[0] * self.share > SLOW:
            return
        start, times = time.process_time(), 0
        while times == 0 or time.process_time() - start < IN_A_ROW:
            answer = self.work()
            times += 1
        self.seconds.append((time.process_time() - start) / (times * self.share))
        errors = np.abs(np.atleast_1d(answer)[..., :: self.every] - truth)
        self.error, self.failed = float(np.nanmax(errors)), int(np.isnan(answer).sum())

    @property
    def median(self) -> float:
        """The median time of the whole job, seconds."""
        return statistics.median(self.seconds)


def compare(title: str, ways: list[Way], truth: Array) -> list[float]:
    """Time the ways in turn, print a table, and return each median over that of the first."""
    for _ in range(ROUNDS):
        for way in ways:
            way.run(truth)
    print(f"\n{title}\n{'':41}{'CPU, ms':>10}{'error of W':>12}{'times as long':>15}")
    ratios = [way.median / ways[0].median for way in ways]
    for way, ratio in zip(ways, ratios, strict=True):
        failed = f"   {way.failed} not found" if way.failed else ""
        print(f"{way.name:41}{1e3 * way.median:10.4g}{way.error:12.0e}{ratio:15.3g}{failed}", flush=True)
    return ratios


def grids(work: Callable[[Grid], Answer], truth: Array, *, finest: int = FINEST, share: float = 1.0) -> list[Way]:
    """Return the coarsest grids of 2^m intervals that are within each accuracy, or the finest feasible ones."""
    ways = []
    for rule in trapezoid, simpson:
        intervals = 256
        for accuracy in ACCURACIES:
            while intervals <= finest:
                grid = Grid(intervals, rule, accuracy / 10)
                if np.max(np.abs(np.asarray(work(grid)) - truth)) <= accuracy:
                    break
                intervals *= 2
            name = f"{rule.__name__} for {accuracy:g}, {grid.intervals:,} intervals"
            ways.append(Way(name, partial(work, grid), share))
            if intervals > finest:
                break
    return ways


# The jobs


def one_point() -> None:
    """Compare the ways to a point of a curve."""
    procedure, transform, kl = BestOfN(4), Exponential(10), 1.0
    truth = np.array(true_curve(transform, kl, [procedure]))
    ways = [Way("infalign", lambda: law_at_kl(transform, kl=kl).win_rate(procedure))]
    ways += grids(lambda grid: grid.curve(transform, kl, [procedure]), truth)
    ways += [
        Way(f"quad and brentq for {accuracy:g}", partial(scipy_curve, transform, kl, [procedure], accuracy))
        for accuracy in ACCURACIES
    ]
    compare(f"One point: {procedure.name}, {transform.name}, {kl:g} nat", ways, truth)


def one_optimum() -> bool:
    """Compare the ways to an optimum, and return whether infalign keeps its promise."""
    procedure, kl = BestOfN(4), 1.0
    beta = optimal(procedure, kl=kl).beta
    truth = np.array(true_optimum(procedure, kl))

    ways = [Way("infalign", lambda: optimal(procedure, kl=kl).win_rate)]
    ways += grids(lambda grid: grid.optimum(procedure, kl, beta), truth)
    ways += [
        Way(f"solve_bvp for {accuracy:g}", partial(scipy_optima, procedure, [kl], accuracy)) for accuracy in ACCURACIES
    ]
    ratios = compare(f"The optimum for {procedure.name} at {kl:g} nat", ways, truth)
    grid = Grid(4096, simpson, 0.0)
    cycle = [
        grid.win_rate(grid.iterated(procedure, beta, damped=False, steps=steps), procedure) for steps in (200, 201)
    ]
    print("The undamped iteration at the same β jumps between W = {:.4f} and {:.4f}.".format(*sorted(cycle)))
    kept = ways[0].median < SLOWEST_OPTIMUM and ratios[3] >= LEAST_RATIO  # ways[3]: the finer trapezoidal grid
    print(f"Promised: under {1e3 * SLOWEST_OPTIMUM:g} ms, and {LEAST_RATIO:g} times as long for 1e-9 by trapezoids.")
    return kept


def figure() -> None:
    """Compare the ways to the analytic figure; the grids do 4 of its 40 budgets."""

    def rows(curve: WinRates, optima: Callable[[RankProcedure, list[float]], list[float]], kls: list[float]) -> Array:
        """Return the win rates, (curves, budgets)."""
        curves = np.array([[curve(transform, kl, PROCEDURES) for kl in kls] for transform in TRANSFORMS])
        return np.concatenate([*np.moveaxis(curves, 1, 2), [optima(procedure, kls) for procedure in SOLVED]])

    def law_rates(transform: Transformation, kl: float, procedures: Sequence[RankProcedure]) -> list[float]:
        law = law_at_kl(transform, kl=kl)
        return [law.win_rate(procedure) for procedure in procedures]

    betas = {(procedure, kl): optimal(procedure, kl=kl).beta for procedure in SOLVED for kl in SAMPLE}
    truth = rows(true_curve, lambda procedure, kls: [true_optimum(procedure, kl) for kl in kls], SAMPLE)

    def ours() -> Array:
        return rows(law_rates, lambda procedure, kls: [optimal(procedure, kl=kl).win_rate for kl in kls], KLS)

    def on_grid(grid: Grid) -> Array:
        return rows(
            grid.curve, lambda procedure, kls: [grid.optimum(procedure, kl, betas[procedure, kl]) for kl in kls], SAMPLE
        )

    def by_scipy(accuracy: float) -> Array:
        return rows(
            partial(scipy_curve, accuracy=accuracy), lambda procedure, kls: scipy_optima(procedure, kls, accuracy), KLS
        )

    ways = [Way("infalign", ours, every=EVERY)]
    ways += grids(on_grid, truth, finest=FINEST_FIGURE, share=len(SAMPLE) / len(KLS))
    ways += [
        Way(f"quad and solve_bvp for {accuracy:g}", partial(by_scipy, accuracy), every=EVERY) for accuracy in ACCURACIES
    ]
    compare(f"The analytic figure: {len(truth)} curves of {len(KLS)} budgets", ways, truth)


def main() -> int:
    """Measure, print and judge."""
    mp.dps = 25
    one_point()
    kept = one_optimum()
    figure()
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
