"""Win rates at one KL."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from infalign.errors import DataError
from infalign.method.calibration import Array


def matched(
    budgets: Sequence[tuple[ArrayLike, ArrayLike]],
    kl: float,
    gain: Callable[[float], float],
) -> Array:
    """Return each prompt's win rate at mean KL ``kl``, shape (P,), by interpolation along a method's budgets.

    ``budgets``: for each budget of one method its per-prompt KL and win rates. ``gain(kl)`` is the shape of the curve,
    theory's W − 1/2 of the same transformation and procedure: what is interpolated, linearly in KL, is the share of it
    that the method reaches, and below the first budget that share is taken as constant. (A straight line from the base
    would lose many points: theory's curves rise like √KL.) Raises DataError when ``kl`` lies beyond the last budget.
    """
    points = sorted(
        ((float(np.mean(np.asarray(k, float))), np.asarray(w, float)) for k, w in budgets), key=lambda point: point[0]
    )
    above = next((i for i, (mean, _) in enumerate(points) if mean >= kl), None)
    if above is None:
        raise DataError(f"no policy reaches a KL of {kl:.3f} nats; the largest is {points[-1][0]:.3f}")
    high, wins = points[above]
    if high == kl:
        return wins
    share = (wins - 0.5) / gain(high)
    if above > 0:
        low, low_wins = points[above - 1]
        weight = (kl - low) / (high - low)
        share = weight * share + (1 - weight) * (low_wins - 0.5) / gain(low)
    return 0.5 + share * gain(kl)
