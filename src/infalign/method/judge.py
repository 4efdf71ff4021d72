"""The judge's view of a reward: the chance A(u) that a response of reward rank u beats what the base policy serves.

Responses are selected by the reward, and a judge decides who wins. A is a function of the rank's normal score
s = N⁻¹(u), in which it is smooth also where A′(u) grows without bound towards u = 0 or 1, as for Gaussian rewards.
It need not rise everywhere: where the judge turns against the top of the reward it falls (docs/theory.md, judge).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from infalign.method.calibration import Array

MIN_JUDGED_SAMPLES = 8  # samples per prompt from which a judge is estimated
MAX_NORMAL_SCORE = 38.0  # the normal score of the smallest floating-point numbers


class Judge(Protocol):
    """The chance to win by the judge, as a function of the normal score of the reward rank."""

    def chance(self, score: Array) -> Array:
        """Return A."""

    def slope(self, score: Array) -> Array:
        """Return dA/ds."""


@dataclass(frozen=True, eq=False)
class ProbitSpline:
    """A = N(η(s)) with η a natural cubic spline: a straight line outside its ``knots``, as for Gaussian rewards.

    ``coefficients`` (J,), or (B, J) for B judges at once, belong to the functions of `basis`, as many as knots.
    """

    knots: Array  # (J,), ascending
    coefficients: Array

    def chance(self, score: Array) -> Array:
        """Return A, with a first axis for several judges."""
        return np.asarray(ndtr(self.coefficients @ self.basis(score)))

    def slope(self, score: Array) -> Array:
        """Return dA/ds."""
        steepness = self.coefficients @ self.basis(score, derivative=True)
        return np.asarray(normal_density(self.coefficients @ self.basis(score)) * steepness)

    def basis(self, score: Array, *, derivative: bool = False) -> Array:
        """Return 1, s, and for each knot but the last two what bends there, or their derivatives, (J, scores)."""
        s = np.ravel(score)
        distance = np.maximum(s - self.knots[:, None], 0.0)
        bends = 3.0 * distance**2 if derivative else distance**3
        scaled = (bends[:-1] - bends[-1]) / (self.knots[-1] - self.knots[:-1, None])
        line = [np.zeros_like(s), np.ones_like(s)] if derivative else [np.ones_like(s), s]
        return np.concatenate([line, scaled[:-1] - scaled[-1]])


@dataclass(frozen=True, slots=True, eq=False)
class EstimatedJudge:
    """A judge estimated from samples, with what says how sure it is."""

    judge: ProbitSpline
    resampled: ProbitSpline  # many judges, each from prompts drawn with replacement
    halves: tuple[ProbitSpline, ProbitSpline]  # one from each half of the prompts
    prompts: int
    samples: int  # of each prompt
    misfit: float  # root mean square difference between model and measured chances
    noise: float  # root mean square standard error of the measured chances


def normal_scores(u: Array, v: Array) -> Array:
    """Return N⁻¹(u) with v = 1 − u, exact near both ends and finite at them."""
    scores: Array = np.where(u < 0.5, ndtri(u), -ndtri(v))
    return np.clip(scores, -MAX_NORMAL_SCORE, MAX_NORMAL_SCORE)


def normal_density(score: Array) -> Array:
    """Return the density of the standard normal law."""
    return np.asarray(np.exp(-0.5 * np.square(score)) / np.sqrt(2.0 * np.pi))
