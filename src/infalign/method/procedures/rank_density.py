"""Any procedure given by the density of the rank that it serves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures.base import Serving, checked_samples, weights_from_counts
from infalign.method.quadrature import TOLERANCE, Panels, adapted, graded


@dataclass(frozen=True)
class RankDensity:
    """Any procedure that serves base rank u with density ``g(u)`` where a plain draw has 1: h(p) = ∫_0^p g/∫_0^1 g.

    ``g`` is a function on arrays in (0, 1), normalized here. Raises ConfigError if it is negative, not finite or not
    integrable.

    >>> RankDensity("like best-of-2", lambda u: u).distortion([0.5, 1.0]).round(6)
    array([0.25, 1.  ])
    """

    name: str
    g: Callable[[Array], ArrayLike]

    def __post_init__(self) -> None:
        _ = self._integral  # a bad g is refused now and not in a later call

    def distortion(self, p: ArrayLike) -> Array:
        """Return ∫_0^p g/∫_0^1 g."""
        panels, values, total = self._integral
        return panels.integral_to(values, np.asarray(p, float)) / total

    def density(self, p: ArrayLike) -> Array:
        """Return g(p)/∫_0^1 g."""
        return self._values(np.asarray(p, float)) / self._integral[2]

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the j-th smallest of M by h(j/M) − h((j−1)/M), shared evenly within ties.

        A plug-in estimate with a bias of order 1/M: no unbiased one exists unless g is a polynomial of degree < M.
        """
        rewards = checked_samples(rewards_PM, 1, self.name)
        return weights_from_counts(rewards, self.distortion(np.linspace(0.0, 1.0, rewards.shape[1] + 1)))

    def serving(self, rng: np.random.Generator) -> Serving:
        """Raise ConfigError: a density says what is served, and not how."""
        raise ConfigError(
            f"{self.name} is a density of ranks, which no number of samples serves exactly; serve a nearby mixture "
            "or `OrderStatistics`"
        )

    @cached_property
    def _integral(self) -> tuple[Panels, Array, float]:
        rough = graded()  # its integral is the scale: below 1 the tolerance of quadrature is absolute
        scale = max(float((self._values(rough.u) * rough.weight).sum()), 1e-300)
        panels, error = adapted(rough, lambda panels: (self._values(panels.u) / scale,))
        values, error = self._values(panels.u), error * scale
        total = float((values * panels.weight).sum())
        if not total > 0:
            raise ConfigError(f"the density of {self.name} is zero everywhere")
        if error > 1e3 * TOLERANCE * total:
            raise ConfigError(
                f"the density of {self.name} is not integrable: its integral over [0, 1] is {total:g} ± {error:g}"
            )
        return panels, values, total

    def _values(self, u: Array) -> Array:
        with np.errstate(all="ignore"):  # what is not finite is refused below
            values = np.broadcast_to(np.asarray(self.g(u), float), np.shape(u))
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            raise ConfigError(
                f"the density of {self.name} must be non-negative and finite: g({u[bad][0]:.17g}) = {values[bad][0]:g}"
            )
        return values
