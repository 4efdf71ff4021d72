"""What a policy wins by a judge that is not the reward, and the transformation that wins most by it.

With A(u) the judge's chance that a response of reward rank u beats what the base serves, W = ∫ A dh(F): section 4 of
docs/theory.md with another right-hand side, Φ'(u) = h'(F(u))·A'(u). In the normal score s of u everything is smooth,
so the equation is solved there.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.integrate import solve_bvp
from scipy.optimize import brentq
from scipy.special import ndtr

from infalign.core.errors import ConfigError, InfalignError
from infalign.method.calibration import Array
from infalign.method.judge import Judge, normal_density
from infalign.method.procedures import RankProcedure, Served, rewinds
from infalign.method.transforms import Tabulated
from infalign.theory.certificate import as_table
from infalign.theory.law import Law, aligned_law, information, judged_win_rate

END = 8.0  # the normal scores of u = 6e-16 and of 1 − u
SCORES = np.linspace(-END, END, 801)
LOWEST = -6.0  # below it Φ is constant: 1 − u has no digits left there
STEPS = np.linspace(0.0, 1.0, 5)  # from one plain draw to the procedure
TOLERANCE, MOST_NODES = 1e-7, 20_000
LARGEST_LOG = 300.0  # of a density, so that a trial solution cannot overflow


@dataclass(frozen=True, slots=True)
class JudgedOptimum:
    """The policy that wins most by a judge at a KL budget; its ``transform`` makes any RLHF solver find it.

    ``self_check`` is the largest difference of KL and win rate from those of an independent quadrature of the table.
    """

    procedure: RankProcedure
    judge: Judge = field(repr=False)
    transform: Tabulated
    beta: float
    kl: float  # nats
    win_rate: float
    self_check: float
    law: Law = field(repr=False)


def optimal_by(judge: Judge, procedure: Served, *, kl: float) -> JudgedOptimum:
    """Return the policy with the largest win rate by ``judge`` at ``kl`` nats, served by ``procedure``.

    The equation is solved for one plain draw, where Φ = A, and continued to the procedure in steps; and from policies
    that favour the top and the bottom of the reward, since several policies may solve it if the judge turns. Raises
    ConfigError for Rewind-and-Repeat and for a budget out of reach.
    """
    if rewinds(procedure):
        raise ConfigError(f"the optimum by a judge is known for rank procedures only, not for {procedure.name}")
    if not (kl > 0 and np.isfinite(kl)):
        raise ConfigError(f"the KL budget must be positive and finite, found {kl}")
    plain = _Path(judge, procedure, kl, share=0.0)
    tilts = [_tilted(tilt, kl) for tilt in (judge.chance(SCORES), SCORES, -SCORES)]
    continued = tilts[0]
    for share in STEPS[1:]:
        following = plain.towards(share).solved(continued)
        if following is None:
            break
        continued = following
    else:
        tilts.append(continued)
    found = [solution for start in tilts if (solution := plain.towards(1.0).solved(start)) is not None]
    if not found:
        raise InfalignError(f"no optimum by the judge was found for {procedure.name} at {kl:g} nats")
    return max((_certified(judge, procedure, kl, solution) for solution in found), key=lambda one: one.win_rate)


@dataclass(frozen=True, slots=True)
class _Solution:
    """log f and F at SCORES, and log β."""

    log_density: Array
    cdf: Array
    log_beta: float


@dataclass(frozen=True, slots=True)
class _Path:
    """The equation for a procedure that serves one plain draw with chance 1 − ``share``."""

    judge: Judge
    procedure: RankProcedure
    kl: float
    share: float

    def towards(self, share: float) -> "_Path":
        return _Path(self.judge, self.procedure, self.kl, share)

    def solved(self, start: _Solution) -> _Solution | None:
        """Return the solution near ``start``, with β free and the KL given; None if there is none."""

        def rises(s: Array, state: Array, log_beta: Array) -> Array:
            density = self.share * self.procedure.density(np.clip(state[1], 0.0, 1.0)) + 1.0 - self.share
            log_f = np.clip(state[0], -LARGEST_LOG, LARGEST_LOG)
            climb = density * self.judge.slope(s) * np.exp(-log_beta[0])
            return np.stack([climb, np.exp(log_f) * normal_density(s), information(log_f) * normal_density(s)])

        def ends(low: Array, high: Array, log_beta: Array) -> Array:
            tails = np.exp(np.clip([low[0], high[0]], -LARGEST_LOG, LARGEST_LOG)) * ndtr(-END)
            return np.array([low[1] - tails[0], high[1] + tails[1] - 1.0, low[2], high[2] - self.kl])

        spent = _integral(information(start.log_density))
        guess = np.stack([start.log_density, start.cdf, spent])
        with np.errstate(all="ignore"):  # of trial steps, which are then refused
            found = solve_bvp(
                rises, ends, SCORES[::4], guess[:, ::4], p=[start.log_beta], tol=TOLERANCE, max_nodes=MOST_NODES
            )
        if not found.success or found.p is None:
            return None
        log_density, cdf = found.sol(SCORES)[:2]
        return _Solution(log_density, np.clip(cdf, 0.0, 1.0), float(found.p[0]))


def _tilted(phi: Array, kl: float) -> _Solution:
    """Return the policy whose log density is linear in ``phi``, at SCORES, and which spends ``kl`` nats."""
    weight = normal_density(SCORES) * (SCORES[1] - SCORES[0])

    def log_density(log_beta: float) -> Array:
        exponent = phi * np.exp(-log_beta)
        exponent -= exponent.max()
        return np.asarray(exponent - np.log(weight @ np.exp(exponent)))

    def excess(log_beta: float) -> float:
        return float(weight @ information(log_density(log_beta))) - kl

    if np.ptp(phi) < 1e-12:
        raise ConfigError("the judge finds all ranks of the reward equal, so there is nothing to win by it")
    lowest = float(np.log(np.ptp(phi))) - 12.0
    if excess(lowest) < 0:
        raise ConfigError(f"a KL of {kl:g} nats is out of reach of the optimum by this judge")
    log_beta = float(brentq(excess, lowest, 40.0))
    found = log_density(log_beta)
    return _Solution(found, np.minimum(_integral(np.exp(found)), 1.0), log_beta)


def _integral(values: Array) -> Array:
    """Return the integral over u from 0 to each of SCORES, by the trapezoidal rule."""
    masses = values * normal_density(SCORES) * (SCORES[1] - SCORES[0])
    return np.asarray(np.cumsum(masses) - masses / 2.0)


def _certified(judge: Judge, procedure: RankProcedure, kl: float, found: _Solution) -> JudgedOptimum:
    """Return the solution as a table, with what a quadrature of that table finds."""
    beta, kept = float(np.exp(found.log_beta)), SCORES >= LOWEST
    s, log_f, cdf = SCORES[kept][::-1], found.log_density[kept][::-1], found.cdf[kept][::-1]
    slope = -procedure.density(cdf) * judge.slope(s) / normal_density(s)
    v = np.concatenate([[0.0], ndtr(-s), [1.0]])
    phi = beta * np.pad(log_f - log_f[0], 1, mode="edge")
    table = as_table(f"judged:{procedure.name}", v, phi, np.pad(slope, 1))
    law = aligned_law(table, beta=beta)
    wins = judged_win_rate(law, procedure, judge)
    served = procedure.density(found.cdf) * np.exp(found.log_density) * normal_density(SCORES)
    direct = float(np.sum(served * judge.chance(SCORES)) * (SCORES[1] - SCORES[0]))
    return JudgedOptimum(procedure, judge, table, beta, law.kl, wins, max(abs(law.kl - kl), abs(direct - wins)), law)
