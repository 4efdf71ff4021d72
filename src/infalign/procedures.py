"""Inference-time procedures: what is served when the model is sampled several times.

A rank-based procedure is a *distortion* h of the CDF: a policy with CDF F over calibrated reward is served
with CDF h(F). Each also weighs the samples of a finite set so that the weighted law is an unbiased estimate of what
would be served.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaln, gammaln, pdtr, pdtrc, xlog1py, xlogy
from scipy.stats import rankdata

from infalign.calibration import Array
from infalign.errors import ConfigError, DataError
from infalign.quadrature import TOLERANCE, Panels, adapted, graded

MOST_DRAWS = 100_000  # of a procedure that has a probability for each of them
NEGLIGIBLE = 1e-9  # probability that a sample-based estimate may leave out


class Procedure(Protocol):
    """What evaluation needs of a procedure."""

    @property
    def name(self) -> str:
        """The spelling for the command line and reports."""

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Return the probability, shape (P, M), that each sample is the one served from a random draw of the M."""


class Distortion(Protocol):
    """A map of CDFs: what is served has CDF h(F)."""

    def distortion(self, p: ArrayLike) -> Array:
        """Return h(p), the served CDF where the policy's CDF is ``p``."""

    def density(self, p: ArrayLike) -> Array:
        """Return h'(p)."""


class RankProcedure(Procedure, Distortion, Protocol):
    """A procedure that only looks at ranks."""


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Serve the best of N draws: h(p) = p^N."""

    n: int

    def __post_init__(self) -> None:
        _check_n(self.n)

    @property
    def name(self) -> str:
        """``best-of-4`` for N = 4."""
        return f"best-of-{self.n}"

    def distortion(self, p: ArrayLike) -> Array:
        """Return p^N."""
        return np.asarray(p, float) ** self.n

    def density(self, p: ArrayLike) -> Array:
        """Return N·p^(N−1)."""
        return self.n * np.asarray(p, float) ** (self.n - 1)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the i-th smallest of M by C(i−1, N−1)/C(M, N), shared evenly within ties."""
        rewards = _samples(rewards_PM, self.n, self.name)
        return _weights_from_counts(rewards, _subsets_within(rewards.shape[1], self.n))


@dataclass(frozen=True, slots=True)
class WorstOfN:
    """Serve the worst of N draws, the choice of an attacker who retries: h(p) = 1 − (1 − p)^N."""

    n: int

    def __post_init__(self) -> None:
        _check_n(self.n)

    @property
    def name(self) -> str:
        """``worst-of-4`` for N = 4."""
        return f"worst-of-{self.n}"

    def distortion(self, p: ArrayLike) -> Array:
        """Return 1 − (1 − p)^N."""
        return 1.0 - (1.0 - np.asarray(p, float)) ** self.n

    def density(self, p: ArrayLike) -> Array:
        """Return N·(1 − p)^(N−1)."""
        return self.n * (1.0 - np.asarray(p, float)) ** (self.n - 1)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the i-th smallest of M by C(M−i, N−1)/C(M, N), shared evenly within ties."""
        rewards = _samples(rewards_PM, self.n, self.name)
        return _weights_from_counts(rewards, 1.0 - _subsets_within(rewards.shape[1], self.n)[::-1])


@dataclass(frozen=True, slots=True)
class Standard:
    """Serve one plain draw: h(p) = p."""

    name = "standard"

    def distortion(self, p: ArrayLike) -> Array:
        """Return p."""
        return np.array(p, float)

    def density(self, p: ArrayLike) -> Array:
        """Return 1."""
        return np.ones_like(np.asarray(p, float))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh every sample alike."""
        rewards = _samples(rewards_PM, 1, self.name)
        return np.full(rewards.shape, 1.0 / rewards.shape[1])


@dataclass(frozen=True)
class OrderStatistics:
    """Draw N, sort, and serve the i-th smallest with probability ``probabilities[i−1]``: h = Σ_i q_i·I_p(i, N−i+1).

    Raises ConfigError unless the probabilities are non-negative and sum to 1.

    >>> OrderStatistics("median-of-3", (0.0, 1.0, 0.0)).distortion(0.5)
    array(0.5)
    """

    name: str
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_probabilities(self.name, self.probabilities)

    def distortion(self, p: ArrayLike) -> Array:
        """Return Σ_i q_i·I_p(i, N−i+1), the regularised incomplete beta function."""
        p = np.asarray(p, float)
        total = np.zeros_like(p)
        for i, q in self._served():
            total += q * betainc(i, len(self.probabilities) - i + 1, p)
        return total

    def density(self, p: ArrayLike) -> Array:
        """Return Σ_i q_i·Beta(p; i, N−i+1)."""
        p, n = np.asarray(p, float), len(self.probabilities)
        total = np.zeros_like(p)
        for i, q in self._served():
            total += q * np.exp(xlogy(i - 1, p) + xlog1py(n - i, -p) - betaln(i, n - i + 1))
        return total

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the j-th smallest of M by Σ_i q_i·C(j−1, i−1)·C(M−j, N−i)/C(M, N), shared evenly within ties."""
        n = len(self.probabilities)
        rewards = _samples(rewards_PM, n, self.name)
        samples = rewards.shape[1]
        j = np.arange(1.0, samples + 1)
        served = np.zeros(samples + 1)
        for i, q in self._served():
            log_ways = _log_choose(j - 1, i - 1) + _log_choose(samples - j, n - i) - _log_choose(samples, n)
            served[1:] += q * np.exp(log_ways)
        return _weights_from_counts(rewards, np.cumsum(served))

    def _served(self) -> list[tuple[int, float]]:
        return [(i, q) for i, q in enumerate(self.probabilities, start=1) if q > 0]


def kth_best(k: int, n: int) -> OrderStatistics:
    """Return the procedure that serves the k-th best of ``n`` draws, spelled ``2nd-best-of-8``."""
    _check_k(k, n)
    suffix = "th" if 10 <= k % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(k % 10, "th")
    return OrderStatistics(f"{k}{suffix}-best-of-{n}", tuple(float(i == n - k) for i in range(n)))


def top_k(k: int, n: int) -> OrderStatistics:
    """Return the procedure that serves one of the ``k`` best of ``n`` draws at random, spelled ``top-2-of-8``."""
    _check_k(k, n)
    return OrderStatistics(f"top-{k}-of-{n}", tuple(float(i >= n - k) / k for i in range(n)))


def of_best(procedure: BestOfN | WorstOfN, n: int) -> BestOfN | OrderStatistics:
    """Return what ``procedure`` serves, as one procedure, of a policy that itself serves the best of ``n`` draws.

    Best-of-N of Best-of-n is Best-of-Nn. Worst-of-N serves the worst of the bests of N groups of n: it is below the
    j-th smallest of the Nn draws unless each group has one of the others, which inclusion and exclusion count.

    >>> of_best(WorstOfN(2), 2).name
    'worst-of-2 of best-of-2'
    """
    if isinstance(procedure, BestOfN):
        return BestOfN(procedure.n * n)
    groups, draws = procedure.n, procedure.n * n
    none_within = [  # of the groups within the j smallest draws; exact, since the terms cancel
        sum((-1) ** k * comb(groups, k) * comb(draws - n * k, j - n * k) for k in range(min(groups, j // n) + 1))
        / comb(draws, j)
        for j in range(draws + 1)
    ]
    probabilities = 0.0 - np.diff(none_within)
    name = f"{procedure.name} of best-of-{n}"
    return OrderStatistics(name, tuple(float(q) for q in probabilities))


@dataclass(frozen=True, slots=True)
class BestOfPoisson:
    """Serve the best of 1 + Poisson(``mu``) draws: h(p) = p·e^{μ(p−1)} (arXiv 2506.19248)."""

    mu: float

    def __post_init__(self) -> None:
        if not (self.mu > 0 and np.isfinite(self.mu)):
            raise ConfigError(f"best-of-poisson needs a positive finite mean number of further draws, found {self.mu}")

    @property
    def name(self) -> str:
        """``best-of-poisson:4`` for μ = 4."""
        return f"best-of-poisson:{self.mu:.15g}"

    def distortion(self, p: ArrayLike) -> Array:
        """Return p·e^{μ(p−1)}."""
        p = np.asarray(p, float)
        served: Array = p * np.exp(self.mu * (p - 1.0))
        return served

    def density(self, p: ArrayLike) -> Array:
        """Return (1 + μp)·e^{μ(p−1)}."""
        p = np.asarray(p, float)
        density: Array = (1.0 + self.mu * p) * np.exp(self.mu * (p - 1.0))
        return density

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Mix the weights of Best-of-n over n ≤ M; raises DataError if n > M has a probability above 1e-9."""
        rewards = _samples(rewards_PM, 1, self.name)
        samples = rewards.shape[1]
        if pdtrc(samples - 1, self.mu) > NEGLIGIBLE:
            raise DataError(
                f"{self.name} draws more than {samples} samples with probability {pdtrc(samples - 1, self.mu):.2g}; "
                "draw more a prompt"
            )
        n = np.arange(1, samples + 1)
        probability = np.exp(xlogy(n - 1, self.mu) - self.mu - gammaln(n)) / pdtr(samples - 1, self.mu)
        within = sum((q * _subsets_within(samples, int(m)) for m, q in zip(n, probability, strict=True) if q > 0), 0.0)
        return _weights_from_counts(rewards, np.asarray(within))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Serve by a procedure drawn at random, for example when N is random or unknown: h = Σ_i w_i·h_i.

    ``parts`` are (probability, procedure) pairs; every answer, of the policy and of the base, draws anew. Mixtures
    among the parts are unfolded. Raises ConfigError unless the probabilities are non-negative and sum to 1, and for
    Rewind-and-Repeat.
    """

    parts: tuple[tuple[float, RankProcedure], ...]

    def __post_init__(self) -> None:
        _check_probabilities("a mixture", tuple(weight for weight, _ in self.parts))
        parts = [
            (weight * inner, _ranked(part))
            for weight, whole in self.parts
            for inner, part in (whole.parts if isinstance(whole, Mixture) else ((1.0, whole),))
        ]
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def name(self) -> str:
        """``0.5*best-of-2+0.5*standard``."""
        return "+".join(f"{weight:.15g}*{part.name}" for weight, part in self.parts)

    def distortion(self, p: ArrayLike) -> Array:
        """Return Σ_i w_i·h_i(p)."""
        return np.asarray(sum(weight * part.distortion(p) for weight, part in self.parts))

    def density(self, p: ArrayLike) -> Array:
        """Return Σ_i w_i·h_i'(p)."""
        return np.asarray(sum(weight * part.density(p) for weight, part in self.parts))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Mix the weights of the parts."""
        return np.asarray(sum(weight * part.weights(rewards_PM) for weight, part in self.parts))


@dataclass(frozen=True)
class RankDensity:
    """Any procedure that serves base rank u with density ``g(u)`` where a plain draw has 1: h(p) = ∫_0^p g/∫_0^1 g.

    ``g`` is a function on arrays in (0, 1), normalised here. Raises ConfigError if it is negative, not finite or not
    integrable.
    """

    name: str
    g: Callable[[Array], ArrayLike]

    def __post_init__(self) -> None:
        _ = self._integral  # refuses a bad g now and not in the middle of something

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
        rewards = _samples(rewards_PM, 1, self.name)
        return _weights_from_counts(rewards, self.distortion(np.linspace(0.0, 1.0, rewards.shape[1] + 1)))

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


@dataclass(frozen=True, slots=True)
class RewindAndRepeat:
    """Draw until the reward reaches the base policy's ``quantile``, ``n`` times at most.

    When no draw passes, ``serve`` says which is served: the ``last`` one (the paper) or the ``best``.
    """

    quantile: float
    n: int
    serve: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        _check_n(self.n)
        if not 0.0 < self.quantile < 1.0:
            raise ConfigError(f"the threshold of rewind is a quantile between 0 and 1, found {self.quantile}")
        if self.serve not in ("last", "best"):
            raise ConfigError(f"rewind serves the last or the best of its failed draws, found serve = {self.serve!r}")

    @property
    def name(self) -> str:
        """``rewind:0.85:32`` for the paper's setting, ``rewind:0.85:32:best`` when the best failed draw is served."""
        return f"rewind:{self.quantile:.15g}:{self.n}" + (":best" if self.serve == "best" else "")

    def given(self, below: float) -> "Rewound":
        """Return the distortion for a policy whose probability of falling below the threshold is ``below``."""
        return Rewound(float(below), self.n, self.serve)

    def expected_draws(self, below: ArrayLike) -> Array:
        """Return E[draws] = (1 − s^N)/(1 − s) for a probability ``below`` = s of falling below the threshold."""
        return _geometric(np.asarray(below, float), self.n)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Weigh the samples of each prompt given its threshold, drawing without replacement from the M.

        With c samples below the threshold a passing one is served with probability Σ_{k<n} (c)_k/(M−1)_k / M, where
        (x)_k is the falling factorial; a failing one with (c−1)_{n−1}/(M−1)_{n−1} / M as the last draw, as the best
        like the same sample under Best-of-n.
        """
        rewards = _samples(rewards_PM, self.n, self.name)
        fails = rewards < self._thresholds(thresholds_P, len(rewards))
        samples = rewards.shape[1]
        count = fails.sum(axis=1)
        k = np.arange(self.n)
        all_fail = _falling_ratio(count[:, None], samples - 1, k).sum(axis=1)  # P(the first k of the others all fail)
        if self.serve == "best":
            failing = BestOfN(self.n).weights(rewards)
        else:
            failing = _falling_ratio(count - 1, samples - 1, np.array(self.n - 1))[:, None] / samples
        weights_PM: Array = np.where(fails, failing, all_fail[:, None] / samples)
        return weights_PM

    def draws(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike) -> Array:
        """Return the expected number of draws for each prompt, shape (P,): Σ_{k<n} P(the first k draws all fail)."""
        rewards = _samples(rewards_PM, self.n, self.name)
        count = (rewards < self._thresholds(thresholds_P, len(rewards))).sum(axis=1)
        draws_P: Array = _falling_ratio(count[:, None], rewards.shape[1], np.arange(self.n)).sum(axis=1)
        return draws_P

    def _thresholds(self, thresholds_P: ArrayLike | None, prompts: int) -> Array:
        if thresholds_P is None:
            raise ConfigError(f"{self.name} needs the base policy's {self.quantile:g} quantile of every prompt")
        thresholds = np.asarray(thresholds_P, float)
        if thresholds.shape != (prompts,):
            raise DataError(f"{self.name} needs one threshold for each of {prompts} prompts, found {thresholds.shape}")
        if np.isnan(thresholds).any():
            raise DataError(f"the threshold of prompt {int(np.argmax(np.isnan(thresholds)))} is nan")
        return thresholds[:, None]


@dataclass(frozen=True, slots=True)
class Rewound:
    """Rewind-and-Repeat for a policy that falls below the threshold with probability ``below`` = s.

    h(p) = s^N + (1 − s^N)(p − s)/(1 − s) for p ≥ s; below that p·s^{N−1} where the last draw is served, p^N where the
    best is.
    """

    below: float
    n: int
    serve: Literal["last", "best"]

    def distortion(self, p: ArrayLike) -> Array:
        """Return h(p)."""
        p, s = np.asarray(p, float), self.below
        failing = p**self.n if self.serve == "best" else p * s ** (self.n - 1)
        return np.where(p < s, failing, s**self.n + (p - s) * _geometric(np.asarray(s), self.n))

    def density(self, p: ArrayLike) -> Array:
        """Return h'(p)."""
        p, s = np.asarray(p, float), self.below
        failing = self.n * p ** (self.n - 1) if self.serve == "best" else np.full_like(p, s ** (self.n - 1))
        return np.where(p < s, failing, _geometric(np.asarray(s), self.n))


def parse_procedure(name: str) -> RankProcedure | RewindAndRepeat:
    """Return the procedure that ``name`` spells.

    ``standard``, ``best-of-4``, ``worst-of-4``, ``2nd-best-of-8``, ``top-2-of-8``, ``best-of-poisson:4``,
    ``rewind:0.85:32``, ``rewind:0.85:32:best``, and mixtures like ``0.5*best-of-2+0.5*standard``.
    """
    number = r"([-+.e\d]+)"
    try:
        if name == "standard":
            return Standard()
        if "*" in name:
            return Mixture(tuple(_parse_part(part) for part in name.split("+")))
        if match := re.fullmatch(r"best-of-(\d+)", name):
            return BestOfN(int(match[1]))
        if match := re.fullmatch(r"worst-of-(\d+)", name):
            return WorstOfN(int(match[1]))
        if match := re.fullmatch(r"(\d+)(?:st|nd|rd|th)-best-of-(\d+)", name):
            return kth_best(int(match[1]), int(match[2]))
        if match := re.fullmatch(r"top-(\d+)-of-(\d+)", name):
            return top_k(int(match[1]), int(match[2]))
        if match := re.fullmatch(rf"best-of-poisson:{number}", name):
            return BestOfPoisson(float(match[1]))
        if match := re.fullmatch(rf"rewind:{number}:(\d+)(:best)?", name):
            return RewindAndRepeat(float(match[1]), int(match[2]), "best" if match[3] else "last")
    except ValueError:
        pass
    raise ConfigError(
        f"unknown procedure {name!r}; known: standard, best-of-N, worst-of-N, 2nd-best-of-N (any k), top-K-of-N, "
        "best-of-poisson:MU, rewind:QUANTILE:N[:best], and mixtures like 0.5*best-of-2+0.5*standard"
    )


def _parse_part(text: str) -> tuple[float, RankProcedure]:
    weight, name = text.split("*")
    return float(weight), _ranked(parse_procedure(name))


def _ranked(part: RankProcedure | RewindAndRepeat) -> RankProcedure:
    if isinstance(part, RewindAndRepeat):
        raise ConfigError(f"a mixture cannot contain {part.name}, whose threshold belongs to the base policy")
    return part


def _check_n(n: int) -> None:
    if not (isinstance(n, int | np.integer) and n >= 1):
        raise ConfigError(f"a procedure draws at least once, and a whole number of times; found N = {n}")


def _check_k(k: int, n: int) -> None:
    _check_n(n)
    if n > MOST_DRAWS:
        raise ConfigError(f"the k-th best or the top k can be of at most {MOST_DRAWS:,} draws, found N = {n}")
    if not 1 <= k <= n:
        raise ConfigError(f"k must lie between 1 and N = {n}, found k = {k}")


def _check_probabilities(name: str, probabilities: tuple[float, ...]) -> None:
    if not probabilities or min(probabilities) < 0 or not abs(sum(probabilities) - 1.0) < 1e-9:
        raise ConfigError(f"the probabilities of {name} must be non-negative and sum to 1, found {probabilities}")


def _geometric(s: Array, n: int) -> Array:
    """Return 1 + s + … + s^(n−1)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = -np.expm1(xlogy(n, s)) / (1.0 - s)
    return np.where(s == 1.0, float(n), total)


def _log_choose(n: ArrayLike, k: int) -> Array:
    """Return log C(n, k), −∞ where k > n."""
    n = np.asarray(n, float)
    with np.errstate(invalid="ignore"):
        log_ways = gammaln(n + 1) - gammaln(k + 1.0) - gammaln(n - k + 1)
    return np.where(n < k, -np.inf, log_ways)


def _samples(rewards_PM: ArrayLike, n: int, name: str) -> Array:
    rewards = np.asarray(rewards_PM, float)
    if rewards.ndim != 2:
        raise DataError(f"{name} weighs a prompts × samples array, found shape {rewards.shape}")
    if rewards.shape[1] < n:
        raise DataError(f"{name} cannot be estimated from {rewards.shape[1]} samples a prompt; draw at least {n}")
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise DataError(f"reward of prompt {prompt}, sample {sample} is {rewards[prompt, sample]}, not finite")
    return rewards


def _subsets_within(samples: int, n: int) -> Array:
    """Return C(m, n)/C(samples, n) for m = 0..samples: the chance that n draws all lie among the m lowest."""
    m = np.arange(samples + 1.0)
    with np.errstate(invalid="ignore"):
        ratio = np.exp(gammaln(m + 1) - gammaln(m - n + 1) - gammaln(samples + 1) + gammaln(samples - n + 1))
    return np.where(m < n, 0.0, ratio)


def _weights_from_counts(rewards_PM: Array, served_within: Array) -> Array:
    """Spread the probability served_within[≤] − served_within[<] evenly over the samples of each tie."""
    at_most = rankdata(rewards_PM, method="max", axis=1).astype(int)
    below = rankdata(rewards_PM, method="min", axis=1).astype(int) - 1
    weights_PM: Array = (served_within[at_most] - served_within[below]) / (at_most - below)
    return weights_PM


def _falling_ratio(x: ArrayLike, y: int, k: ArrayLike) -> Array:
    """Return (x)_k/(y)_k, the chance that k draws without replacement from y all come from x of them."""
    x, k = np.broadcast_arrays(np.asarray(x, float), np.asarray(k, float))
    inside = (k <= x) & (k <= y)
    with np.errstate(invalid="ignore"):
        ratio = np.exp(gammaln(x + 1) - gammaln(x - k + 1) - gammaln(y + 1.0) + gammaln(y - k + 1))
    return np.where(inside, ratio, 0.0)
