"""Adaptive Gauss–Legendre quadrature on [0, 1] for functions whose mass may lie within 1e-300 of an end."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.legendre import leggauss, legvander

from infalign.method.calibration import Array

NODES = 16  # nodes of a panel
TOLERANCE = 1e-13
ROUNDS = 150  # an end panel shrinks 2^-8-fold a round, an inner one by a half
MOST_PANELS = 20_000  # panels that may be added
WORST = 1e-4  # panels with at least this share of the largest error are split together


def _integrals(x: Array) -> Array:
    """Return ∫_0^x of each shifted Legendre polynomial on a new last axis: ∫P_d = (P_{d+1} − P_{d−1})/(2d+1)."""
    p = legvander(2.0 * x - 1.0, NODES).reshape(*x.shape, NODES + 1)  # a single x has no axis of its own
    return np.append(p[..., 1:2] + 1.0, (p[..., 2:] - p[..., :-2]) / (2 * np.arange(1, NODES) + 1), axis=-1) / 2


_ROOTS, _WEIGHTS = leggauss(NODES)
_ROOTS = (_ROOTS - _ROOTS[::-1]) / 2  # symmetric to the last bit
POSITION, WEIGHT = (_ROOTS + 1) / 2, _WEIGHTS / 2  # of the nodes on [0, 1]
ANALYSIS = (legvander(_ROOTS, NODES - 1) * WEIGHT[:, None]).T * (2 * np.arange(NODES) + 1)[:, None]  # to coefficients
CUMULATIVE = _integrals(POSITION) @ ANALYSIS  # values at the nodes to the integral from 0 to each node


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A composite rule whose nodes are known both from 0 and from 1, so that neither end is rounded away.

    Lower panels are intervals of u, upper ones (``upper``) of v = 1 − u; all are in ascending order of u.
    """

    start: Array  # (panels,) the end of the interval that is nearer to 0 in its own coordinate
    width: Array
    upper: np.ndarray

    @property
    def u(self) -> Array:
        """The nodes, shape (panels, NODES), ascending."""
        own = self._own()
        return np.where(self.upper[:, None], 1.0 - own, own)

    @property
    def v(self) -> Array:
        """1 − u at the nodes, exact near u = 1."""
        own = self._own()
        return np.where(self.upper[:, None], own, 1.0 - own)

    @property
    def weight(self) -> Array:
        """The weights of the nodes; they sum to 1."""
        return self.width[:, None] * WEIGHT

    def _own(self) -> Array:
        return self.start[:, None] + self.width[:, None] * np.where(self.upper[:, None], POSITION[::-1], POSITION)

    def cumulative(self, values: Array) -> Array:
        """Return the integral from 0 to every node."""
        return self._before(values)[:, None] + self.width[:, None] * (values @ CUMULATIVE.T)

    def remaining(self, values: Array) -> Array:
        """Return the integral from every node to 1, without the cancellation of a difference."""
        return self._after(values)[:, None] + self.width[:, None] * (values @ (WEIGHT - CUMULATIVE).T)

    def integral_to(self, values: Array, x: Array) -> Array:
        """Return the integral from 0 to each of ``x``, any shape."""
        left = np.where(self.upper, 1.0 - self.start - self.width, self.start)
        panel = np.clip(np.searchsorted(left, x, side="right") - 1, 0, len(left) - 1)
        position = np.clip((x - left[panel]) / self.width[panel], 0.0, 1.0)
        coefficients = (values @ ANALYSIS.T)[panel]
        inside = (coefficients * _integrals(position)).sum(axis=-1) * self.width[panel]
        return np.asarray(self._before(values)[panel] + inside)

    def between(self, values: Array, parts: Array) -> tuple[Array, Array, Array]:
        """Return v, the values and their integral to 1 at ``parts`` of each panel, 0 its lower end, (panels, parts)."""
        coefficients = values @ ANALYSIS.T
        above = coefficients @ (_integrals(np.ones(1)) - _integrals(parts)).T
        rest = self._after(values)[:, None] + self.width[:, None] * above
        own = self.start[:, None] + self.width[:, None] * np.where(self.upper[:, None], 1.0 - parts, parts)
        v = np.where(self.upper[:, None], own, 1.0 - own)
        return v, coefficients @ legvander(2.0 * parts - 1.0, NODES - 1).T, rest

    def _before(self, values: Array) -> Array:
        masses = (values * self.weight).sum(axis=1)
        return np.asarray(np.cumsum(masses) - masses)

    def _after(self, values: Array) -> Array:
        masses = (values * self.weight).sum(axis=1)
        return np.asarray(np.cumsum(masses[::-1])[::-1] - masses)

    def tails(self, values: Array) -> Array:
        """Estimate what each panel's integral misses, from the last coefficients of its Legendre series.

        A jump between a panel's end and its first node leaves no trace in them, but the neighbors' series disagree.
        """
        coefficients = values @ ANALYSIS.T
        left, right = coefficients @ (-1.0) ** np.arange(NODES), coefficients.sum(axis=1)
        jump = np.abs(left[1:] - right[:-1])
        hidden = np.maximum(np.append(jump, 0.0), np.append(0.0, jump)) * POSITION[0]
        return np.asarray((np.abs(coefficients[:, -2:]).sum(axis=1) + hidden) * self.width)

    def split(self, chosen: np.ndarray) -> "Panels":
        """Halve the ``chosen`` panels; the one at an end is cut at 1/2, 1/4, … 2⁻⁸ of its width."""
        pieces = np.where(chosen, np.where(self.start == 0.0, 9, 2), 1)
        parent = np.repeat(np.arange(len(self.start)), pieces)
        position = np.arange(len(parent)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        count = pieces[parent]
        position = np.where(self.upper[parent], count - 1 - position, position)  # from the nearer end
        share = np.select([count == 1, count == 2], [1.0, 0.5], np.exp2(np.maximum(position, 1) - 9.0))
        offset = np.select([count == 1, count == 2], [0.0, 0.5 * position], np.where(position == 0, 0.0, share))
        return Panels(self.start[parent] + offset * self.width[parent], share * self.width[parent], self.upper[parent])


def graded(depth: int = 12, edges: Array | None = None) -> Panels:
    """Return panels that halve towards both ends down to 2^−depth, none wider than 1/16; more ``edges`` are in v."""
    own = np.unique(np.concatenate([[0.0], 0.5 ** np.arange(1, depth + 1), np.arange(1, 9) / 16]))
    v = np.empty(0) if edges is None else np.asarray(edges)
    lower = np.unique(np.concatenate([own, 1.0 - v[v > 0.5]]))
    upper = np.unique(np.concatenate([own, v[v <= 0.5]]))
    start = np.concatenate([lower[:-1], upper[-2::-1]])
    width = np.concatenate([np.diff(lower), np.diff(upper)[::-1]])
    return Panels(start, width, np.arange(len(start)) >= len(lower) - 1)


def adapted(panels: Panels, integrands: Callable[[Panels], tuple[Array, ...]]) -> tuple[Panels, float]:
    """Split panels until every one of ``integrands`` is resolved; return them and the error that remains.

    The error estimates the integrals' absolute error; above TOLERANCE, relative to an integral larger than 1, the
    integrands were not resolved.
    """
    most = len(panels.start) + MOST_PANELS
    for _ in range(ROUNDS):
        at_nodes = integrands(panels)
        tails = np.max([panels.tails(values) for values in at_nodes], axis=0)
        error = float(tails.sum())
        bound = TOLERANCE * max(1.0, *(float(np.sum(panels.weight * np.abs(values))) for values in at_nodes))
        # The worst panels are split first: where values are rounded, every panel stays rough, and splitting them all
        # would use up MOST_PANELS before a jump has been narrowed down.
        rough = tails > max(bound / len(tails), WORST * float(tails.max()))
        if error <= bound or not np.isfinite(error) or len(tails) > most:
            break
        panels = panels.split(rough)
    return panels, error
