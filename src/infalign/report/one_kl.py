"""Methods at one KL: which can be compared there, and what each of them wins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from infalign.evaluation.matched import MAX_KL_RATIO, MIN_KL, Matched, is_comparable, matched, smallest_kl
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.transforms import Identity
from infalign.theory.law import Law, law_at_kl

MAX_LAW_KL = 300.0  # nats; beyond it the identity wins all that there is to win
SMALLEST = 1e-6  # nats, that a law is asked for


@dataclass(frozen=True)
class AtOneKL:
    """Methods at one KL, None if nobody has learnt anything.

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
    law_at: Callable[[str, float], Law | None]

    @classmethod
    def of(
        cls,
        methods: Mapping[str, Sequence[str]],
        kls: Mapping[str, Array],
        law_at: Callable[[str, float], Law | None],
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

    def law(self, method: str, nats: float) -> Law | None:
        """Return theory's law of a method, that of its policy nearest to so many nats; None if there is none."""
        nearest = min(self.methods[method], key=lambda name: abs(float(self.kls[name].mean()) - nats))
        return self.law_at(nearest, max(nats, SMALLEST))

    def gain(self, method: str, procedure: Served) -> Callable[[float], float]:
        """Return theory's gain over 1/2 as a function of the KL.

        A method without a law at what it spends has the identity's, which only shapes the interpolation.
        """
        lawful = self.law(method, max(float(self.kls[name].mean()) for name in self.methods[method])) is not None

        def of(nats: float) -> float:
            law = self.law(method, nats) if lawful else None
            return (law or law_at_kl(Identity(), kl=float(np.clip(nats, SMALLEST, MAX_LAW_KL)))).win_rate(
                procedure
            ) - 0.5

        return of

    def matched(self, method: str, values: Mapping[str, Array], gain: Callable[[float], float]) -> Matched:
        """Return the ``values`` (by policy) of one of ``methods`` at the common KL, interpolated along ``gain``."""
        assert self.kl is not None
        return matched([(self.kls[name], values[name]) for name in self.methods[method]], self.kl, gain)
