"""An optimum with what an independent quadrature of its own table says of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infalign.method.calibration import Array
from infalign.method.procedures import Served, distortion
from infalign.method.transforms import Tabulated
from infalign.theory.law import Law, aligned_law, at_base

INSIDE = 1e-15  # densities are evaluated from here to 1 − here: a user's density may be infinite at an end


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best policy for a procedure at one β, and the transformation that makes any RLHF solver find it.

    ``residual`` is the largest |log f − (Φ[F]/β − log Z)| where f ≥ 1, in nats (smaller f weigh it by f), with Φ[F]
    computed anew from the law of ``transform`` by quadrature; ``self_check`` is the largest difference of KL and win
    rate from that law and, for Best- and Worst-of-N, from exact identities (docs/theory.md, optimum of Best-of-N).
    ``stationary`` counts the stationary points found, of which this is the best.
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


def certified(
    procedure: Served,
    base: Served,
    table: Tabulated,
    beta: float,
    kl: float,
    wins: float,
    *,
    identity: float = 0.0,
    stationary: int = 1,
    extra: Callable[[Law], Array] | None = None,
) -> Optimum:
    """Return the optimum with what an independent quadrature of its own table says of it.

    ``extra`` gives what Φ[F] has besides ∫ h′(F)·h₀′, at the nodes of a law.
    """
    law = aligned_law(table, beta=beta)
    mine, theirs = distortion(procedure, law.chance_below), distortion(base, at_base)
    shape = law.panels.weight.shape
    cdf = np.clip(law.cdf, INSIDE, 1.0 - INSIDE)
    phi = -law.panels.remaining((mine.density(cdf) * theirs.density(law.u)).reshape(shape)).ravel()  # Φ(1) = 0
    if extra is not None:
        phi += extra(law)
    misfit = law.log_density - phi / beta
    misfit -= np.sum(law.weight * law.density * misfit)
    residual = float(np.max(np.minimum(law.density, 1.0) * np.abs(misfit)))
    found = abs(law.kl - kl), abs(law.win_rate(procedure, base) - wins), identity
    return Optimum(procedure, base, table, beta, kl, wins, residual, max(found), stationary)


def as_table(name: str, v: Array, phi: Array, slope: Array) -> Tabulated:
    """Return the table without the knots that rounding has moved onto their neighbours."""
    kept = np.concatenate([[True], np.diff(v) > 0])
    kept[np.flatnonzero(kept)[-1]] = False
    kept[-1] = True
    return Tabulated(name, v[kept], phi[kept], slope[kept])
