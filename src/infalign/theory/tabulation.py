"""Transformations as tables: to be saved, and as a network that generalizes learns them from finitely many rollouts."""

from collections.abc import Callable

import numpy as np
from scipy.special import xlog1py, xlogy

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures.base import log_choose
from infalign.method.transforms import (
    Exponential,
    Identity,
    Power,
    Tabulated,
    Transformation,
    at_ranks,
    normalized_beta,
)

ACCURACY = 1e-10  # the largest error of log f wherever there is mass
SMOOTH_ACCURACY, SMALLEST_BETA = 1e-7, 1e-150  # the same for a smoothed Φ, at a normalized β of at least this


def tabulated(transform: Transformation, *, beta: float) -> Tabulated:
    """Return ``transform`` as a table that can be saved, with the same law at the paper's ``beta`` and above it.

    The table is shifted to Φ(1) = 0, which changes no policy. Raises ConfigError for log, which is −∞ at u = 0.
    """
    if isinstance(transform, Tabulated):
        return transform

    def drop_and_slope(v: Array) -> tuple[Array, Array]:
        return transform.drop(v), _slope(transform, v)

    unit = normalized_beta(transform, beta)
    return _refined(transform.name, transform.scale, drop_and_slope, ACCURACY, unit)


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
    return _refined(f"smoothed:{transform.name}", transform.scale, drop_and_slope, SMOOTH_ACCURACY, unit)


def _refined(
    name: str, scale: float, drop_and_slope: Callable[[Array], tuple[Array, Array]], accuracy: float, unit: float
) -> Tabulated:
    """Return the table of a normalized Φ(1 − v) − Φ(1), with enough knots for an error of accuracy·max(|Φ|, unit)."""
    knots = v = np.linspace(0.0, 1.0, 17)
    drops, slopes = drop, slope = drop_and_slope(v)
    start, end = (np.stack([v, drop, slope])[:, piece] for piece in (slice(-1), slice(1, None)))
    while start.size:  # the pieces that may still be rough
        middle, width = (start[0] + end[0]) / 2, end[0] - start[0]
        cubic = (start[1] + end[1]) / 2 + width * (start[2] - end[2]) / 8
        drop, slope = drop_and_slope(middle)
        rough = np.abs(cubic - drop) > accuracy * np.maximum(np.abs(drop), unit)
        inner = np.stack([middle, drop, slope])[:, rough]
        knots, drops, slopes = (np.append(*pair) for pair in zip((knots, drops, slopes), inner, strict=True))
        start, end = np.append(start[:, rough], inner, axis=1), np.append(inner, end[:, rough], axis=1)
    order = np.argsort(knots)
    return Tabulated(name, knots[order], scale * drops[order], scale * slopes[order])


def _slope(transform: Transformation, v: Array) -> Array:
    """Return the derivative of the normalized Φ by v = 1 − u."""
    match transform:
        case Identity():
            return np.full_like(v, -1.0)
        case Exponential(t):
            return np.asarray(-abs(t) * np.exp(min(t, 0.0) - t * v))
        case Power(m):
            return np.asarray(-abs(m) * ((1.0 - v) if m > 0 else v) ** (abs(m) - 1.0))
    raise ConfigError(f"{transform.name} cannot be written as a table; use its name in the recipe instead")
