"""Transformations as a network that generalizes learns them from finitely many rollouts: as tables."""

import numpy as np
from scipy.special import xlog1py, xlogy

from infalign.method.calibration import Array
from infalign.method.procedures.base import log_choose
from infalign.method.transforms import Tabulated, Transformation, at_ranks

ACCURACY, SMALLEST_BETA = 1e-7, 1e-150  # the largest error of log f where there is mass, at a normalized β from this on


def smoothed(transform: Transformation, rollouts: int) -> Tabulated:
    """Return E[Φ(Ĉ) | u] = Σ_c C(K, c)·u^c·(1−u)^{K−c}·Φ(c/K) with K = ``rollouts``, shifted to Φ(1) = 0.

    This is what regression on Φ(Ĉ) converges to in a network that sees the rank u of a response and many prompts: the
    noise of each prompt's references averages out, and Φ is left smoothed over 1/√K. Φ(0) is as `at_ranks` has it.
    """
    phi = at_ranks(transform, np.arange(rollouts, -1, -1) / rollouts, rollouts)  # of the ranks 1, 1 − 1/K, …, 0
    drops = phi - phi[0]

    def chance(v: Array, draws: int) -> Array:
        lost, v = np.arange(draws + 1), v[:, None]
        return np.asarray(np.exp(log_choose(draws, lost) + xlogy(lost, v) + xlog1py(draws - lost, -v)))

    def drop_and_slope(v: Array) -> tuple[Array, Array]:
        return chance(v, rollouts) @ drops, rollouts * (chance(v, rollouts - 1) @ np.diff(drops))

    unit = SMALLEST_BETA * float(np.ptp(drops))
    knots = v = np.linspace(0.0, 1.0, 17)
    heights, slopes = drop, slope = drop_and_slope(v)
    start, end = (np.stack([v, drop, slope])[:, piece] for piece in (slice(-1), slice(1, None)))
    while start.size:  # the pieces that may still be rough
        middle, width = (start[0] + end[0]) / 2, end[0] - start[0]
        cubic = (start[1] + end[1]) / 2 + width * (start[2] - end[2]) / 8
        drop, slope = drop_and_slope(middle)
        rough = np.abs(cubic - drop) > ACCURACY * np.maximum(np.abs(drop), unit)
        inner = np.stack([middle, drop, slope])[:, rough]
        knots, heights, slopes = (np.append(*pair) for pair in zip((knots, heights, slopes), inner, strict=True))
        start, end = np.append(start[:, rough], inner, axis=1), np.append(inner, end[:, rough], axis=1)
    order = np.argsort(knots)
    scale = transform.scale
    return Tabulated(f"smoothed:{transform.name}", knots[order], scale * heights[order], scale * slopes[order])
