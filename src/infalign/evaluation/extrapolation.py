"""What counts of right responses say where nothing is unbiased, as of pass@k for k beyond the samples of a prompt.

A prompt has an unknown rate p; c of its n responses are right. Values a_c with Σ_c a_c·P(c | n, p) ≤ f(p) for all p
have a mean over prompts below that of f(p), whatever the rates are. Linear programs choose these, and values above,
such that limits are tight for a mixture of rates that fits the counts.
"""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaln, expit, xlog1py, xlogy

from infalign.core.errors import DataError
from infalign.evaluation.intervals import Estimate, estimate, estimate_share, of_clusters
from infalign.method.calibration import Array
from infalign.method.procedures.base import check_n, falling_ratio

RATES = np.concatenate([[0.0], expit(np.linspace(-14.0, 11.0, 168)), [1.0]])  # at which bounds are imposed
FIT_STEPS = 100  # of expectation-maximization; more fit noise
KNOTS, SINGLE = 33, 12  # values are linear between knots; from either end, so many counts are knots
TOLERANCE = 1e-6  # above that of a linear program
WEIGHTED_MEANS = 4000
MODEL_UP_TO = 2  # times the samples: farther on, rates decide that the samples do not show


class Counts:
    """Right responses of prompts and their number; ``clusters_P`` labels prompts that are variants of one problem.

    Functions of the rate are (S, `RATES`), a row per number of responses n in ascending order, and values of counts
    (X,), those of 0 … n for each n. Raises DataError for what are no counts, and for a single prompt or cluster.
    """

    def __init__(
        self, correct_P: ArrayLike, samples_P: ArrayLike, clusters_P: ArrayLike | None = None, *, seed: int = 0
    ) -> None:
        correct, samples = np.broadcast_arrays(np.asarray(correct_P, float), np.asarray(samples_P, float))
        wrong = ~((correct >= 0) & (correct <= samples) & (samples >= 1) & (correct % 1 == 0) & (samples % 1 == 0))
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(f"prompt {first} has {correct[first]:g} right of {samples[first]:g} responses; give counts")
        self.sizes, size_P, prompts = np.unique(samples.astype(int), return_inverse=True, return_counts=True)
        self.n = np.repeat(self.sizes, self.sizes + 1)
        self.c = np.concatenate([np.arange(n + 1) for n in self.sizes])
        self.starts = np.append(np.flatnonzero(self.c == 0), self.c.size)
        n, c = self.n[:, None], self.c[:, None]
        self.chances = np.exp(xlogy(c, RATES) + xlog1py(n - c, -RATES) - betaln(c + 1, n - c + 1) - np.log1p(n))
        self.of_prompt = self.starts[size_P] + correct.astype(int)
        self.shares, self.clusters_P, self.seed = prompts / correct.size, clusters_P, seed
        self.clusters = of_clusters(correct, clusters_P).size
        if self.clusters < 2:
            raise DataError("an interval needs at least 2 prompts, or clusters of them, found 1")

    @cached_property
    def mixture(self) -> Array:
        """The probabilities of `RATES` that fit, by expectation-maximization from a flat start.

        A rate is 0 or at least 1/(2n), n the most responses: what hardly shows is taken as not there.
        """
        edge = 0.5 / self.sizes[-1]
        mixture = ((RATES % 1.0 == 0.0) | (np.minimum(RATES, 1.0 - RATES) >= edge)).astype(float)
        seen, prompts = np.unique(self.of_prompt, return_counts=True)
        likelihood = self.chances[seen]
        for _ in range(FIT_STEPS):
            mixture = mixture * (prompts / (likelihood @ mixture) @ likelihood)
            mixture /= mixture.sum()
        return np.asarray(mixture)

    def of_rate(self, values_XR: Array) -> Array:
        """Return the mean over counts at each rate, (S, `RATES`), of values that may depend on it."""
        return np.asarray(np.add.reduceat(self.chances * values_XR, self.starts[:-1]))

    def estimate(self, exact_X: Array, target_SR: Array, *, least: float = 0.0, confidence: float = 0.95) -> Estimate:
        """Return the mean over prompts of a function of the rate, with limits within [``least``, 1].

        The mean of ``exact_X`` estimates a part of it without bias, the mixture the rest. Limits are Gaffke's
        (`estimate_share` has the sources) of values below and above: quantiles of means under Dirichlet(1, …, 1)
        weights of the clusters and one more of the worst value; those of `estimate_share` where there is no rest.
        """
        point, low, high = np.hstack([self._values(s, exact_X, target) for s, target in enumerate(target_SR)])
        if (low == high).all():
            interval = estimate_share if least == 0.0 else estimate
            values = of_clusters(exact_X[self.of_prompt], self.clusters_P)
            return interval(values, confidence=confidence, seed=self.seed)
        seen, weights_WX, more_W = self._weights
        mean, total = min(float(point[self.of_prompt].mean()), 1.0), weights_WX.sum(axis=1) + more_W
        lower = np.quantile((weights_WX @ low[seen] + more_W * low.min()) / total, 0.5 - confidence / 2.0)
        upper = np.quantile((weights_WX @ high[seen] + more_W * high.max()) / total, 0.5 + confidence / 2.0)
        return Estimate(mean, min(mean, max(float(lower), least)), max(mean, min(float(upper), 1.0)))

    def pass_at(self, k: int, *, confidence: float = 0.95) -> dict[str, Any]:
        """Return pass@k, also beyond the samples, with its limits and a ``claim`` that says what the mean is.

        ``unbiased`` up to the fewest samples n of a prompt; up to 2n that of a ``model``, a mixture of rates that fits;
        beyond, ``bounds``, where it is None. Limits need no model.

        >>> [one["mean"] and round(one["mean"], 3) for one in map(Counts([0, 2, 4], 4).pass_at, [4, 8, 16])]
        [0.667, 0.69, None]
        """
        check_n(k)
        exact = 1.0 - falling_ratio(self.n - self.c, self.n, np.minimum(k, self.n))
        target = np.tile(1.0 - (1.0 - RATES) ** k, (self.sizes.size, 1))
        found = self.estimate(exact, target, confidence=confidence).as_dict()
        claim = "unbiased" if k <= self.sizes[0] else "model" if k <= MODEL_UP_TO * self.sizes[0] else "bounds"
        return {**found, "mean": None if claim == "bounds" else found["mean"], "claim": claim}

    @cached_property
    def _weights(self) -> tuple[Array, Array, Array]:
        """Return the counts that are seen, their weights in random means, and that of one more cluster."""
        seen, place_P = np.unique(self.of_prompt, return_inverse=True)
        labels = np.arange(place_P.size) if self.clusters_P is None else np.asarray(self.clusters_P)
        table = np.zeros((self.clusters, seen.size))
        np.add.at(table, (np.unique(labels, return_inverse=True)[1], place_P), 1.0)
        alike, times = np.unique(table, axis=0, return_counts=True)
        rng = np.random.default_rng(self.seed)
        weights = rng.standard_gamma(times, (WEIGHTED_MEANS, times.size)) @ alike
        return seen, weights, rng.standard_exponential(WEIGHTED_MEANS) * place_P.size / self.clusters

    def _values(self, s: int, exact_X: Array, target_R: Array) -> Array:
        """Return the values of counts of the ``s``-th number of responses, (3, n + 1): point, below and above."""
        own = slice(self.starts[s], self.starts[s + 1])
        exact, chances = exact_X[own], self.chances[own]
        rest = target_R - exact @ chances
        if np.abs(rest).max() < TOLERANCE:
            return np.stack([exact] * 3)
        expected = chances @ self.mixture
        point = exact + chances * self.mixture @ rest / np.maximum(expected, np.finfo(float).tiny)
        low, high = (sign * self._above(sign * rest, sign * exact, chances, expected) for sign in (-1.0, 1.0))
        return np.stack([point, low, high])

    def _above(self, rest_R: Array, exact: Array, chances: Array, expected: Array) -> Array:
        """Return ``exact`` and values whose mean is above ``rest_R`` at all rates, of the lowest expected upper limit.

        That is their mean, one standard error (at most Σ √share·|value − center|), and a share of the largest.
        """
        from scipy.optimize import linprog  # which takes time to import

        size = len(exact) - 1
        ends = np.arange(min(SINGLE, size) + 1)
        inner = np.rint(size * np.sin(np.linspace(0.0, np.pi / 2.0, KNOTS)) ** 2)
        knots = np.unique(np.concatenate([inner, ends, size - ends])).astype(int)
        one, column, at = np.eye(knots.size), np.ones((knots.size, 1)), exact[knots]
        hats = np.stack([np.interp(np.arange(size + 1), knots, unit) for unit in one])
        share = hats @ expected + 1e-3 / self.clusters
        rows = np.block(  # of the values, their distances to the center, the center, the largest
            [
                [-(hats @ chances).T, np.zeros((rest_R.size, knots.size + 2))],
                [one, -one, -column, 0.0 * column],
                [-one, -one, column, 0.0 * column],
                [one, 0.0 * one, 0.0 * column, -column],
            ]
        )
        cost = np.concatenate([share, np.sqrt(share / self.clusters), [0.0, 1.0 / self.clusters]])
        solution = linprog(cost, rows, np.concatenate([-rest_R - TOLERANCE, -at, at, -at]), bounds=(None, None))
        if solution.status != 0:
            raise DataError(f"no bounds were found for {size} responses per prompt: {solution.message}")
        return np.asarray(exact + np.asarray(solution.x)[: knots.size] @ hats)
