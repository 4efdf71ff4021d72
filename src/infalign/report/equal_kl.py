"""Methods at one KL: which can be compared there, and what each of them wins."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from infalign.evaluation.intervals import Confidence
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.transforms import Identity
from infalign.theory.law import law_at_kl

MAX_KL_RATIO = 4.0  # a method is left out if it spends under a quarter of the median KL
MIN_KL = 1e-3  # nats; a policy with a smaller KL has learned nothing, and any share of no gain is noise
MAX_EXTRAPOLATION = 1.25  # a method is compared at a KL of at least 1/1.25 of the smallest that it spent
MAX_LAW_KL = 300.0  # nats; beyond it the identity wins all that there is to win
SMALLEST = 1e-6  # nats, that a law is asked for


class HasWinRates(Protocol):
    """What a gain as a function of the KL is read from: theory's law at a KL."""

    def win_rate(self, procedure: Any, /) -> float:
        """Return the win rate of what a procedure serves."""


@dataclass(frozen=True, slots=True)
class Matched:
    """A method's win rate per prompt at one KL, shape (P,), and how far interpolation may have moved their mean.

    ``values`` follow theory's curve for a policy that is free for every prompt. A policy that knows less than the rank
    bends later, at worst like √KL; ``shift`` is what the mean would change if it did. 0 where the method has that KL.
    """

    values: Array
    shift: float

    def estimate(self, intervals: Confidence) -> dict[str, float]:
        """Return the mean win rate, with an interval that contains the error of interpolation."""
        return widen(intervals.of_shares(self.values), self.shift, least=0.0)

    def gain_over(self, other: "Matched", intervals: Confidence) -> dict[str, float]:
        """Return the mean difference to another method's win rates, paired by prompt, with such an interval."""
        return widen(intervals.of_differences(self.values - other.values), self.shift, -other.shift)


@dataclass(frozen=True)
class AtOneKL:
    """Methods at one KL, None if nobody has learned anything.

    ``median`` is of what was spent; ``left_out`` has the largest KL of each method that spent far less, which would
    lower the common KL; ``not_bracketed`` the smallest KL of each that spent more with every policy. ``methods`` has
    the policies of those that are comparable, ``kls`` what each policy spends, (P,).
    """

    median: float
    kl: float | None
    left_out: Mapping[str, float]
    not_bracketed: Mapping[str, float]
    methods: Mapping[str, Sequence[str]]
    kls: Mapping[str, Array]
    law_at: Callable[[str, float], HasWinRates | None]

    @classmethod
    def of(
        cls,
        methods: Mapping[str, Sequence[str]],
        kls: Mapping[str, Array],
        law_at: Callable[[str, float], HasWinRates | None],
        *,
        median: float | None = None,
        far: Mapping[str, float] | None = None,
    ) -> Self:
        """Compare the policies of ``methods`` at the largest KL that all methods reach, or at the ``median`` if less.

        By default the median is that of the methods' largest KLs, and no bound. A method that spends less than
        1/`MAX_KL_RATIO` of it, or what ``far`` has for it, is left out. ``law_at`` gives theory's law of a policy at so
        many nats, None if there is none.
        """
        spent = {method: [float(kls[name].mean()) for name in names] for method, names in methods.items()}
        most = {method: max(own) for method, own in spent.items()}
        bounds = [] if median is None else [median]
        median = float(np.median([*most.values()])) if median is None else median
        least = {method: max(median / (far or {}).get(method, MAX_KL_RATIO), MIN_KL) for method in methods}
        left_out = {method: own for method, own in most.items() if own < least[method]}
        kl = min([*(own for method, own in most.items() if method not in left_out), *bounds], default=0.0)
        if kl < MIN_KL:
            return cls(median, None, left_out, {}, {}, kls, law_at)
        near = {method: methods[method] for method, own in spent.items() if is_comparable(own, kl)}
        above = {m: smallest_kl(own) for m, own in spent.items() if m not in left_out and smallest_kl(own) > kl}
        return cls(median, kl, left_out, above, near, kls, law_at)

    def law(self, method: str, nats: float) -> HasWinRates | None:
        """Return theory's law of a method, that of its policy nearest to this KL; None if there is none."""
        nearest = min(self.methods[method], key=lambda name: abs(float(self.kls[name].mean()) - nats))
        return self.law_at(nearest, max(nats, SMALLEST))

    def theory(self, served: Served) -> dict[str, float]:
        """Return theory's win rates at the common KL, of the methods that have a law."""
        laws = {method: self.law(method, self.kl or 0.0) for method in self.methods}
        return {method: law.win_rate(served) for method, law in laws.items() if law is not None}

    def gain(self, method: str, procedure: Served) -> Callable[[float], float]:
        """Return theory's gain over 1/2 as a function of the KL.

        A method without a law at what it spends has the identity's, which only shapes the interpolation.
        """
        lawful = self.law(method, max(float(self.kls[name].mean()) for name in self.methods[method])) is not None

        def of(nats: float) -> float:
            law = self.law(method, nats) if lawful else None
            law = law or law_at_kl(Identity(), kl=float(np.clip(nats, SMALLEST, MAX_LAW_KL)))
            return law.win_rate(procedure) - 0.5

        return of

    def matched(
        self, values: Mapping[str, Array], procedure: Served, no_gain: Array | float = 0.5
    ) -> dict[str, Matched]:
        """Return what each of ``methods`` has at the common KL, from the win rates or other values (P,) of each policy.

        ``no_gain`` is what the reference has. Values rise with the KL as win rates of what ``procedure`` serves.
        """
        budgets = {m: [(self.kls[name], values[name]) for name in names] for m, names in self.methods.items()}
        return {m: matched(own, self.kl or 0.0, self.gain(m, procedure), no_gain) for m, own in budgets.items()}


def is_comparable(kls: Sequence[float], kl: float) -> bool:
    """Return whether a method whose policies spend ``kls`` nats can be compared at ``kl`` nats.

    It can from 1/1.25 of the smallest to the largest, and is bracketed where the smallest is at most ``kl``.
    """
    return smallest_kl(kls) / MAX_EXTRAPOLATION <= kl <= max(kls)


def smallest_kl(kls: Sequence[float]) -> float:
    """Return the smallest KL of a method's policies that have learned anything; ∞ if none has."""
    return min((kl for kl in kls if kl >= MIN_KL), default=math.inf)


def matched(
    budgets: Sequence[tuple[Array, Array]], kl: float, gain: Callable[[float], float], no_gain: Array | float = 0.5
) -> Matched:
    """Return each prompt's win rate at mean KL ``kl``, where the method `is_comparable`, along its budgets.

    ``budgets``: for each budget of one method its per-prompt KL and win rates, or other values, which are ``no_gain``
    for the reference. ``gain(kl)`` is the shape of the curve, theory's W − 1/2 of the same transformation and
    procedure: what is interpolated, linearly in KL, is the share of it that the method reaches, and below the first
    budget that share is constant. (A straight line from the base would lose many points: theory's curves rise like
    √KL.) Policies below `MIN_KL` bracket nothing.
    """
    points = sorted(((float(np.mean(spent)), wins) for spent, wins in budgets), key=lambda point: point[0])
    points = [point for point in points if point[0] >= MIN_KL]
    above = next(i for i, (spent, _) in enumerate(points) if spent >= kl)

    def along(shape: Callable[[float], float]) -> Array:
        high, wins = points[above]
        if high == kl:
            return wins
        share = (wins - no_gain) / shape(high)
        if above > 0:
            low, low_wins = points[above - 1]
            weight = (kl - low) / (high - low)
            share = weight * share + (1 - weight) * (low_wins - no_gain) / shape(low)
        return np.asarray(no_gain + share * shape(kl))

    values = along(gain)
    by_root = float(np.clip(along(lambda nats: float(np.sqrt(nats))).mean(), 0.0, 1.0))
    return Matched(values, by_root - float(values.mean()))


def widen(estimate: Mapping[str, float], *shifts: float, least: float = -1.0) -> dict[str, float]:
    """Return an estimate whose interval also covers any of these shifts of the mean, each in part or in full.

    It stays within [``least``, 1]: that of a share with 0, that of a difference of shares with the default.
    """
    low, high = (sum(clip(shift, 0.0) for shift in shifts) for clip in (min, max))
    return {**estimate, "low": max(estimate["low"] + low, least), "high": min(estimate["high"] + high, 1.0)}
