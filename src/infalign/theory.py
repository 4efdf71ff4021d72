"""Analytic curves: win rate and KL of the aligned policy, which depend on (procedure, Φ, β) alone.

The aligned policy has density f(u) ∝ exp(Φ(u)/β) over the calibrated reward u of the base policy. Mass concentrates
near the ends (within β/Φ' of them), so the grid is graded towards both and u and 1 − u are kept apart.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq

from infalign.calibration import Array
from infalign.errors import ConfigError
from infalign.procedures import RankProcedure, Standard
from infalign.transforms import Transformation, normalised_beta

NODES = 16  # Gauss–Legendre points a panel
SMALLEST = 1e-16  # the panels halve towards 0 and 1 down to this width


@dataclass(frozen=True, slots=True)
class Grid:
    """Composite Gauss–Legendre rule on [0, 1]; ``cumulative`` turns a panel's values into its running integral."""

    u: Array  # (panels, NODES)
    weight: Array  # (panels, NODES)
    width: Array  # (panels,)
    cumulative: Array  # (NODES, NODES): integral from the panel's start to node i of the interpolant, for width 1


@dataclass(frozen=True, slots=True)
class Law:
    """The law of the calibrated reward u under an aligned policy, on the nodes of the grid."""

    transform: str
    beta: float  # of the paper's raw Φ
    kl: float  # nats
    u: Array
    density: Array
    cdf: Array
    weight: Array

    def win_rate(self, procedure: RankProcedure) -> float:
        """Return W = 1 − ∫ h(F(u))·h'(u) du against the base policy under the same procedure."""
        return float(1.0 - np.sum(self.weight * procedure.distortion(self.cdf) * procedure.density(self.u)))


def aligned_law(transform: Transformation, *, beta: float) -> Law:
    """Return the law of the optimal policy of RLHF with reward Φ(C) and KL weight ``beta`` (of the paper's raw Φ).

    KL = E_f[log f] in nats. Raises ConfigError unless beta is positive and finite.
    """
    if not (beta > 0 and np.isfinite(beta)):
        raise ConfigError(f"the KL weight beta must be positive and finite, found {beta}")
    grid = _grid()
    exponent = transform(grid.u) * (transform.scale / beta)
    shifted = np.exp(exponent - exponent.max())  # e^{10}/0.01 overflows without the shift
    total = np.sum(grid.weight * shifted)
    density = shifted / total
    log_density = exponent - exponent.max() - np.log(total)
    masses = np.sum(grid.weight * density, axis=1)
    before = np.concatenate([[0.0], np.cumsum(masses)[:-1]])
    cdf = np.clip(before[:, None] + grid.width[:, None] * density @ grid.cumulative.T, 0.0, 1.0)
    kl = float(np.sum(grid.weight * density * np.where(density > 0, log_density, 0.0)))
    return Law(transform.name, beta, kl, grid.u, density, cdf, grid.weight)


def law_at_kl(transform: Transformation, *, kl: float) -> Law:
    """Return the law whose KL to the base is ``kl`` nats; its ``beta`` is the KL weight to train with.

    Raises ConfigError if no β reaches that KL on the grid, which resolves laws down to a width of 1e-16 of an end.
    """
    if not (kl > 0 and np.isfinite(kl)):
        raise ConfigError(f"the KL budget must be positive and finite, found {kl}")
    low, high = np.log(transform.scale) - 25.0, np.log(transform.scale) + 15.0

    def excess(log_beta: float) -> float:
        return aligned_law(transform, beta=float(np.exp(log_beta))).kl - kl

    if excess(low) < 0 or excess(high) > 0:
        raise ConfigError(f"{transform.name} cannot reach a KL of {kl:g} nats; choose a budget between 1e-6 and 15")
    return aligned_law(transform, beta=float(np.exp(brentq(excess, low, high, xtol=1e-13, rtol=1e-14))))


def training_beta(transform: Transformation, *, kl: float) -> float:
    """Return the KL weight of a trainer whose reward is the normalised Φ and whose optimum spends ``kl`` nats."""
    return normalised_beta(transform, law_at_kl(transform, kl=kl).beta)


def curve(transform: Transformation, procedure: RankProcedure, kls: Array) -> tuple[Array, Array]:
    """Return the win rates (procedure's, standard) of the aligned policies at each of ``kls``, both of its shape."""
    laws = [law_at_kl(transform, kl=float(kl)) for kl in kls]
    return np.array([law.win_rate(procedure) for law in laws]), np.array([law.win_rate(Standard()) for law in laws])


@cache
def _grid() -> Grid:
    halves = 0.5 ** np.arange(1, int(-np.log2(SMALLEST)) + 1)  # 1/2, 1/4, … SMALLEST
    edges = np.concatenate([[0.0], halves[::-1], 1.0 - halves[1:], [1.0]])
    edges = np.unique(np.concatenate([edges, np.linspace(0.0, 1.0, 33)]))
    x, w = np.polynomial.legendre.leggauss(NODES)
    x, w = (x + 1) / 2, w / 2
    width = np.diff(edges)
    legendre = np.polynomial.legendre.legvander(2 * x - 1, NODES - 1)
    antiderivative = np.stack(
        [
            (lambda p: p(2 * x - 1) - p(-1.0))(np.polynomial.legendre.Legendre.basis(d).integ()) / 2
            for d in range(NODES)
        ],
        axis=1,
    )
    cumulative = antiderivative @ np.linalg.inv(legendre)
    return Grid(edges[:-1, None] + width[:, None] * x, width[:, None] * w, width, cumulative)
