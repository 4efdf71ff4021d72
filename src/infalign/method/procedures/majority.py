"""Majority vote: of N draws, serve the answer that most of them give (self-consistency, arXiv 2203.11171).

It compares answers and not rewards, so it is no distortion of ranks. Its optimum is in benchmarks/optima.
"""

from dataclasses import dataclass
from math import comb, factorial

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import DataError
from infalign.method.calibration import Array
from infalign.method.procedures.base import Serving, Votes, check_n


@dataclass(frozen=True, slots=True)
class MajorityVote:
    """Serve the answer with the most votes among ``n`` draws, one of these at random if several have as many."""

    n: int

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def name(self) -> str:
        """``majority-of-8`` for N = 8."""
        return f"majority-of-{self.n}"

    def served(self, policy: ArrayLike) -> Array:
        """Return the probability that each answer wins the vote, for probabilities (…, Y) of the answers.

        A polynomial in the probabilities, also where they do not sum to 1 or are complex.
        """
        policy = np.asarray(policy)
        votes = np.arange(self.n + 1)
        factorials = np.array([float(factorial(k)) for k in votes])
        return np.asarray(_winning(policy[..., None] ** votes / factorials, self.n) * factorials[-1])

    def serving(self, rng: np.random.Generator) -> Serving:
        """Return how one answer is chosen: the first draw with the answer that most draws give."""
        given = yield Votes(self.n)
        answers, counts = np.unique(given, return_counts=True)
        return given.index(float(rng.choice(answers[counts == counts.max()])))

    def weights(self, answers_PM: ArrayLike) -> Array:
        """Return the probability, (P, M), that each sample is the one served: unbiased, over all sets of N of the M.

        Equal ``answers`` are one answer, and its samples share its chance. Raises DataError for fewer than N samples.
        """
        answers = np.asarray(answers_PM)
        if answers.ndim != 2 or answers.shape[1] < self.n:
            raise DataError(f"{self.name} needs prompts × at least {self.n} samples, found shape {answers.shape}")
        weights_PM = np.empty(answers.shape)
        for row, found in zip(weights_PM, answers, strict=True):
            _, which, counts = np.unique(found, return_inverse=True, return_counts=True)
            ways = np.array([[float(comb(int(count), k)) for k in range(self.n + 1)] for count in counts])
            row[:] = (_winning(ways, self.n) / comb(answers.shape[1], self.n) / counts)[which]
        return weights_PM


def _winning(ways: Array, n: int) -> Array:
    """Return in how many ways each answer wins a vote of ``n``, (…, Y), given the ways to get k votes, (…, Y, n + 1).

    An answer with m votes wins if no other has more, and one time in 1 + t if t others have as many: ∫₀¹ a^t da, so
    the other answers have the generating function Σ_{k<m} ways_k·x^k + a·ways_m·x^m, integrated over a.
    """
    count = ways.shape[-2]
    nodes, share = np.polynomial.legendre.leggauss(count // 2 + 1)
    a, share = (nodes + 1.0) / 2.0, share / 2.0
    total = np.zeros(ways.shape[:-1], ways.dtype)
    for m in range(1, n + 1):
        factors = np.repeat(ways[..., None, :], a.size, axis=-2)  # (…, Y, a, n + 1)
        factors[..., m + 1 :] = 0.0
        factors[..., m] *= a
        one = np.zeros(factors[..., 0, :, :].shape, ways.dtype)
        one[..., 0] = 1.0
        before, after = [one], [one]
        for y in range(count - 1):
            before.append(_product(before[-1], factors[..., y, :, :]))
            after.append(_product(after[-1], factors[..., count - 1 - y, :, :]))
        for y in range(count):
            others = _product(before[y], after[count - 1 - y])[..., n - m]
            total[..., y] += ways[..., y, m] * (others @ share)
    return total


def _product(one: Array, other: Array) -> Array:
    """Return the product of polynomials on the last axis, cut off at their degree."""
    product = np.zeros_like(one)
    for k in range(one.shape[-1]):
        product[..., k:] += one[..., k, None] * other[..., : one.shape[-1] - k]
    return product
