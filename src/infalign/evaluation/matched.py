"""Win rates at one KL."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import DataError
from infalign.method.calibration import Array

MAX_KL_RATIO = 4.0  # a method is left out if it spends under a quarter of the median KL
MIN_KL = 1e-3  # nats; a policy with a smaller KL has learnt nothing, and any share of no gain is noise
MAX_EXTRAPOLATION = 1.25  # a method is compared at a KL of at least 1/1.25 of the smallest that it spent


@dataclass(frozen=True, slots=True)
class Matched:
    """A method's win rates at one KL, one a prompt, shape (P,), and how far interpolation may have moved their mean.

    ``values`` follow theory's curve for a policy that is free for every prompt. A policy that knows less than the rank
    bends later, at worst like √KL; ``shift`` is what the mean would change if it did. 0 where the method has that KL.
    """

    values: Array
    shift: float


def is_comparable(kls: Sequence[float], kl: float) -> bool:
    """Return whether a method whose policies spend ``kls`` nats can be compared at ``kl`` nats.

    It can from 1/1.25 of the smallest to the largest, and is bracketed where the smallest is at most ``kl``.
    """
    return smallest_kl(kls) / MAX_EXTRAPOLATION <= kl <= max(kls)


def smallest_kl(kls: Sequence[float]) -> float:
    """Return the smallest KL of a method's policies that have learnt anything; ∞ if none has."""
    return min((kl for kl in kls if kl >= MIN_KL), default=math.inf)


def matched(
    budgets: Sequence[tuple[ArrayLike, ArrayLike]],
    kl: float,
    gain: Callable[[float], float],
) -> Matched:
    """Return each prompt's win rate at mean KL ``kl``, by interpolation along a method's budgets.

    ``budgets``: for each budget of one method its per-prompt KL and win rates. ``gain(kl)`` is the shape of the curve,
    theory's W − 1/2 of the same transformation and procedure: what is interpolated, linearly in KL, is the share of it
    that the method reaches, and as far below the first budget as `is_comparable` allows, that share is constant. (A
    straight line from the base would lose many points: theory's curves rise like √KL.) Policies below `MIN_KL`
    bracket nothing. Raises DataError elsewhere.
    """
    points = sorted(
        ((float(np.mean(np.asarray(k, float))), np.asarray(w, float)) for k, w in budgets), key=lambda point: point[0]
    )
    points = [point for point in points if point[0] >= MIN_KL] or points[-1:]
    spent = [mean for mean, _ in points]
    if kl > spent[-1]:
        raise DataError(f"no policy reaches a KL of {kl:.3f} nats; the largest is {spent[-1]:.3f}")
    if not is_comparable(spent, kl):
        raise DataError(
            f"the smallest KL of a policy is {spent[0]:.3f} nats, more than {MAX_EXTRAPOLATION} times {kl:.3f}, and "
            "below it a win rate would be a guess; train one with a smaller budget"
        )
    above = next(i for i, mean in enumerate(spent) if mean >= kl)

    def along(shape: Callable[[float], float]) -> Array:
        high, wins = points[above]
        if high == kl:
            return wins
        share = (wins - 0.5) / shape(high)
        if above > 0:
            low, low_wins = points[above - 1]
            weight = (kl - low) / (high - low)
            share = weight * share + (1 - weight) * (low_wins - 0.5) / shape(low)
        return np.asarray(0.5 + share * shape(kl))

    values = along(gain)
    by_root = float(np.clip(along(lambda nats: float(np.sqrt(nats))).mean(), 0.0, 1.0))
    return Matched(values, by_root - float(values.mean()))


def widen(estimate: Mapping[str, float], *shifts: float, least: float = -1.0) -> dict[str, float]:
    """Return an estimate whose interval also covers any of these shifts of the mean, each in part or in full.

    It stays within [``least``, 1]: that of a share with 0, that of a difference of shares with the default.
    """
    low, high = (sum(clip(shift, 0.0) for shift in shifts) for clip in (min, max))
    return {**estimate, "low": max(estimate["low"] + low, least), "high": min(estimate["high"] + high, 1.0)}
