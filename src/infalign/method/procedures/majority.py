"""Majority vote: of N draws, serve the answer that most of them give (self-consistency, arXiv 2203.11171).

It compares answers and not rewards, so it is no distortion of ranks. Its optimum is in benchmarks/optima.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from math import isqrt

import numpy as np
import scipy
from numpy.polynomial.legendre import leggauss
from numpy.polynomial.polynomial import polyval
from numpy.typing import ArrayLike, NDArray

from infalign.core.errors import DataError
from infalign.method.calibration import Array
from infalign.method.procedures.base import Serving, Votes, check_n, log_choose


@dataclass(frozen=True, slots=True)
class MajorityVote:
    """Serve the answer with the most votes among ``n`` draws, one of these at random if several have as many."""

    n: int

    def __post_init__(self) -> None:
        check_n(self.n)

    @property
    def name(self) -> str:
        return f"majority-of-{self.n}"

    def served(self, policy: ArrayLike) -> Array:
        """Return the probability that each answer wins the vote, for probabilities (…, Y) of the answers.

        A polynomial in the probabilities, also where they do not sum to 1 or are complex.
        """
        policy, k = np.asarray(policy), np.arange(self.n + 1)
        total = policy.sum(axis=-1, keepdims=True)
        log_ways = scipy.special.xlogy(k, (self.n * policy / total)[..., None]) - scipy.special.gammaln(k + 1.0)
        return np.asarray(_winning(log_ways, np.ones(policy.shape[-1], int), self.n) * total**self.n)

    def serving(self, rng: np.random.Generator) -> Serving:
        """Return how one answer is chosen: the first draw with the answer that most draws give, or else the first."""
        given = yield Votes(self.n)
        answers, counts = np.unique([vote for vote in given if not np.isnan(vote)], return_counts=True)
        return given.index(float(rng.choice(answers[counts == counts.max()]))) if answers.size else 0

    def weights(self, answers_PM: ArrayLike) -> Array:
        """Return the probability, (P, M), that each sample is the one served: unbiased, over all sets of N of the M.

        ``answers`` are compared as `votes` does; equal ones share the chance of their answer. A sample without one has
        none, and a set of such samples serves nothing. Raises DataError for fewer than N samples.
        """
        answers = np.asarray(answers_PM)
        if answers.ndim != 2 or answers.shape[1] < self.n:
            raise DataError(f"{self.name} needs prompts × at least {self.n} samples, found shape {answers.shape}")
        weights_PM = np.zeros(answers.shape)
        k, odds = np.arange(self.n + 1), self.n / (answers.shape[1] + 1.0 - self.n)
        for row, votes_M in zip(weights_PM, votes(answers.ravel().tolist()).reshape(answers.shape), strict=True):
            said = ~np.isnan(votes_M)
            _, which, counts = np.unique(votes_M[said], return_inverse=True, return_counts=True)
            sizes, kind, times = np.unique(counts, return_inverse=True, return_counts=True)
            log_ways = log_choose(np.append(sizes, row.size - which.size)[:, None], k) + k * np.log(odds)
            if sizes.size:
                chances = _winning(log_ways[:-1, : sizes[-1] + 1], times, self.n, log_ways[-1]) / sizes
                row[said] = np.maximum(chances, 0.0)[kind][which]
        return weights_PM


def votes(answers: Iterable[object]) -> Array:
    """Return a number for each answer, equal where they agree, and NaN for no answer: null, NaN and blank text.

    Answers that are all numbers, or spell them, agree as numbers do, 1 and 1.0; others as text without outer blanks.
    """
    texts = [None if answer is None or answer != answer else str(answer).strip() for answer in answers]
    keys: dict[str, object] = {text: text for text in texts if text}
    with suppress(ArithmeticError):  # of text that is no number
        numbers = {text: Decimal(text) for text in keys}
        keys |= numbers if all(map(Decimal.is_finite, numbers.values())) else {}
    place = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return np.array([place[keys[text]] if text else np.nan for text in texts], float)


def _winning(log_ways: Array, times: NDArray[np.intp], n: int, log_silent: ArrayLike = (0.0,)) -> Array:
    """Return the chance that one answer of each kind wins, (…, Y), given that there are n votes.

    ``log_ways`` to get k votes, (…, Y, votes), are those of each of ``times`` answers, ``log_silent`` of no answer.
    An answer with m votes wins if no other has more, and one time in 1 + t if t others have as many: ∫₀¹ a^t da, so
    the other answers have the generating function Π (Σ_{k<m} ways_k·x^k + a·ways_m·x^m), integrated over a. One of its
    coefficients is a mean over roots of unity: ten standard deviations of the votes, and more.
    """
    ways, silent = (np.exp(log - log.real.max(axis=-1, keepdims=True)) for log in (log_ways, np.asarray(log_silent)))
    ways, silent = (each / abs(each).sum(axis=-1, keepdims=True) for each in (ways, silent))
    roots, times = 40 + 10 * isqrt(n), times[:, None]
    x = np.exp(2j * np.pi * np.arange(roots) / roots)
    whole, nobody = polyval(x, np.moveaxis(ways, -1, 0)), polyval(x, silent) * x**-n
    together = ((whole**times).prod(axis=-2) @ nobody)[..., None]
    fewer, won, power = np.zeros_like(whole), np.zeros(ways.shape[:-1], complex), np.ones_like(x)
    for m in range(1, ways.shape[-1]):
        fewer, power = fewer + ways[..., m - 1, None] * power, power * x
        if (abs(ways[..., m]) < 1e-18 * abs(together)).all():  # rounding
            continue
        nodes, share = leggauss(min(int(times.sum()), n // m) // 2 + 1)
        for a, weight in zip((nodes + 1.0) / 2.0, share / 2.0, strict=True):
            factor = fewer + a * ways[..., m, None] * power
            others = factor ** (times - 1)
            alike, before, after = factor * others, np.ones_like(factor), np.ones_like(factor)
            before[..., 1:, :] = alike[..., :-1, :].cumprod(axis=-2)
            after[..., :-1, :] = alike[..., :0:-1, :].cumprod(axis=-2)[..., ::-1, :]
            won += weight * ways[..., m] * ((before * after * others) @ (nobody * power))
    return np.asarray(won / together if np.iscomplexobj(ways) else (won / together).real)
