"""All policies where W − β·KL of a finite model is stationary, under a procedure that looks at ranks alone.

They obey a recursion, log q_{g+1} − log q_g = h′(P_g)(C⁰_{g+1} − C⁰_g)/β with q = m/m⁰ the mass of a reward group over
that under the reference, so that everything follows from one log q, which must make the whole mass 1. A scan over that
number misses none of them: `FiniteModel.optimum`, an iteration at a KL budget, is checked against the best.
"""

from typing import Any

import numpy as np
from finite_model import FiniteModel

STARTS = 256  # points of each kind in the scan
SECTIONS = 64  # parts into which a bracket is cut
ULP = 2.0 * float(np.finfo(float).eps)


def best_law(model: FiniteModel, procedure: Any, beta: float, base: Any = None) -> np.ndarray:
    """Return log π of the policy that maximizes W − ``beta``·KL, (Y,)."""

    def objective(law: np.ndarray) -> float:
        return model.win_rate(np.exp(law), procedure, base) - beta * model.kl(np.exp(law))

    return max(stationary_laws(model, procedure, beta, base), key=objective)


def stationary_laws(model: FiniteModel, procedure: Any, beta: float, base: Any = None) -> np.ndarray:
    """Return log π of all stationary points, (points, Y).

    At log q_1 = 0 all q ≥ 1; at minus the largest rise all q ≤ 1. Where h′ is larger at 0 than at 1 the recursion goes
    down from log q_G instead: upwards, rounding would grow.
    """
    mass = model.masses(model.reference)
    rises = np.diff(model.win_rates_of_groups(base or procedure)) / beta
    span = float(procedure.density(np.linspace(0.0, 1.0, 1026)[1:-1]).max() * rises.sum())
    if span < ULP:
        return np.log(model.reference)[None]  # what can be gained is below rounding
    lowest, highest = procedure.density([0.0, 1.0])
    down = bool(lowest > highest)
    side = 1.0 if down else -1.0
    graded = np.geomspace(1e-6 * min(span, 1.0), span, STARTS)
    starts = np.unique(np.concatenate([[0.0], side * graded, side * np.linspace(0.0, span, STARTS)]))
    over = _shoot(starts, mass, procedure, rises, down)[1] >= 1.0
    over[0], over[-1] = False, True  # this holds up to rounding
    crossings = np.flatnonzero(over[1:] != over[:-1])
    low, high, over_low = starts[crossings], starts[crossings + 1], over[crossings]
    while (high - low > ULP * np.maximum(np.abs(low), 1.0)).any():
        inside = np.linspace(low, high, SECTIONS)
        over = _shoot(inside, mass, procedure, rises, down)[1] >= 1.0
        over[0], over[-1] = over_low, ~over_low
        crossing = np.argmax(over != over_low, axis=0)
        points = np.arange(len(crossing))
        low, high = inside[crossing - 1, points], inside[crossing, points]
    log_q = _shoot(low, mass, procedure, rises, down)[0].T
    log_q -= log_q.max(axis=1, keepdims=True)
    log_q -= np.log(np.exp(log_q) @ mass)[:, None]
    return np.log(model.reference) + log_q[:, model.group]


def _shoot(
    start: np.ndarray, mass: np.ndarray, procedure: Any, rises: np.ndarray, down: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return log q_g, shape (G, *start.shape), and the whole mass, of the recursion from log q_1 or q_G."""
    order = slice(None, None, -1) if down else slice(None)
    first, *others = mass[order]
    log_q = [np.minimum(start, 600.0)]
    seen = first * np.exp(log_q[0])
    for own, rise in zip(others, -rises[order] if down else rises, strict=True):
        cdf = np.maximum(1.0 - seen, 0.0) if down else np.minimum(seen, 1.0)
        log_q.append(np.minimum(log_q[-1] + procedure.density(cdf) * rise, 600.0))
        seen = seen + own * np.exp(log_q[-1])
    return np.stack(log_q[order]), seen
