"""Means over prompts with their intervals."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.samples import chunks
from infalign.method.calibration import Array, as_rewards

RESAMPLES = 2000
RESAMPLED_PROMPTS = 10_000  # above this, the bootstrap and its expansion agree to within the noise of resampling
RESAMPLED_CONFIDENCE = 0.999  # above this, so few resamples have no quantiles
DIGITS = 12  # of a share: what is nearer to an end, or to another share, is rounding
NEAR_END, FEW_PROMPTS = 0.1, 8.0  # near to an end and decided by so few prompts, a mean has no bootstrap
WEIGHTED_MEANS = 10_000  # means under random weights there
LEAST_SPREAD = 0.3  # of a resample, relative: smaller ones have too few of those values that differ


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its bootstrap interval.

    >>> Estimate(0.7, 0.6, 0.8).as_dict()
    {'mean': 0.7, 'low': 0.6, 'high': 0.8}
    """

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Confidence:
    """The confidence level of intervals, and the seed of the bootstrap.

    >>> round(Confidence(level=0.9).of([0.2, 0.4, 0.6])["mean"], 3)
    0.4
    """

    level: float = 0.95
    seed: int = 0

    def of(self, values_P: Any) -> dict[str, float]:
        """Return the mean over prompts with its interval."""
        return estimate(values_P, confidence=self.level, seed=self.seed).as_dict()

    def of_differences(self, differences_P: Any) -> dict[str, float]:
        """Return the mean over prompts of differences of shares with its interval, which holds where few differ too."""
        return estimate_difference(differences_P, confidence=self.level, seed=self.seed).as_dict()

    def of_shares(self, shares_P: Any) -> dict[str, float]:
        """Return the mean over prompts of shares with its interval, which holds near 0 and 1 too."""
        return estimate_share(shares_P, confidence=self.level, seed=self.seed).as_dict()


def estimate_share(shares_P: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean over prompts of shares, such as win rates, with an interval that also holds near 0 and 1; seeded.

    The interval is that of `estimate`. Where it would see too little, because the mean is within 0.1 of an end and the
    distance to it, x, lies in few prompts, (Σx)²/Σx² < 8, it is united with Gaffke's: the quantiles of the mean under
    Dirichlet(1, …, 1) weights of the P values and one more, which is 0 for the lower limit and 1 for the upper (Gaffke
    2005; Learned-Miller and Thomas, arXiv 1905.06208). For outcomes 0 and 1 that is Clopper and Pearson's: all of P won
    are above (α/2)^{1/P}. `benchmarks/interval_coverage.py` measures both.

    An unbiased estimate of one prompt's share may lie outside [0, 1], as under Rewind-and-Repeat; Gaffke's interval
    takes it as 0 or 1, and mean and limits are kept inside. Raises as `estimate`.

    >>> estimate([1.0] * 20).low, round(estimate_share([1.0] * 20).low, 2)
    (1.0, 0.83)
    """
    raw = estimate(shares_P, confidence=confidence, seed=seed)
    shares, inside = np.clip(np.asarray(shares_P, float), 0.0, 1.0), np.clip([raw.mean, raw.low, raw.high], 0.0, 1.0)
    clipped = Estimate(*inside.tolist())
    lost = np.round(1.0 - shares if clipped.mean > 0.5 else shares, DIGITS)
    if not _few_decide(lost):
        return clipped
    rng = np.random.default_rng(seed)
    some = np.sort(lost[lost > 0.0])
    none = int((lost == 0.0).sum())  # the weights of those at the end come in one piece
    parts, sums = chunks(WEIGHTED_MEANS, some.size + 1), np.stack([some, np.ones(some.size)], axis=1)
    weighted = np.vstack([rng.standard_exponential((rows.stop - rows.start, some.size)) @ sums for rows in parts])
    more = rng.standard_exponential(WEIGHTED_MEANS)
    total = weighted[:, 1] + (rng.standard_gamma(none, WEIGHTED_MEANS) if none else 0.0) + more
    least = float(np.quantile(weighted[:, 0] / total, 0.5 - confidence / 2.0))
    most = float(np.quantile((weighted[:, 0] + more) / total, 0.5 + confidence / 2.0))
    low, high = (1.0 - most, 1.0 - least) if clipped.mean > 0.5 else (least, most)
    return Estimate(clipped.mean, min(clipped.low, low), max(clipped.high, high))


def _few_decide(distances_P: Array) -> bool:
    near = distances_P.mean() <= NEAR_END
    return bool(near and not distances_P.sum() ** 2 >= FEW_PROMPTS * (distances_P @ distances_P) > 0.0)


def estimate_difference(differences_P: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean over prompts of paired differences of shares, with an interval that also holds where few differ.

    The interval is that of `estimate`. Where the mean size is below 0.1 and few prompts decide it, as in
    `estimate_share`, it is united with that of its positive part less that of its negative part: of 20 prompts that all
    tie, others may differ. Limits are kept inside [−1, 1]. Raises as `estimate`.

    >>> estimate([0.0] * 20).high, round(estimate_difference([0.0] * 20).high, 2)
    (0.0, 0.17)
    """
    raw = estimate(differences_P, confidence=confidence, seed=seed)
    values = np.round(np.asarray(differences_P, float), DIGITS)
    low, high = raw.low, raw.high
    if _few_decide(np.abs(values)):
        parts = (np.clip(part, 0.0, 1.0) for part in (values, -values))
        won, lost = (estimate_share(part, confidence=confidence, seed=seed) for part in parts)
        low, high = min(low, won.low - lost.high), max(high, won.high - lost.low)
    return Estimate(raw.mean, max(low, -1.0), min(high, 1.0))


def estimate(values_P: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean over prompts with a bootstrap interval (prompts are the clusters); seeded.

    Give the difference of two policies' values on the same prompts for a paired interval.

    It is the hull of three: the bias-corrected and accelerated bootstrap (BCa) of a mean, bias and acceleration taken
    from the skewness and the normal quantiles replaced by Student's; the studentized bootstrap, as much wider; and
    Student's interval. Each fails for some laws from 20 prompts; of 95 % intervals the hull covers 93 % or more
    (`benchmarks/interval_coverage.py`). Above 10,000 prompts BCa's expansion replaces the bootstraps; above a
    confidence of 0.999 the interval of 0.999 grows as Student's does.

    Where all values are equal the interval has no width, which says nothing about other prompts. Raises DataError for
    fewer than two prompts, which give no interval, and for a value that is not finite; ConfigError unless
    0 < confidence < 1.

    >>> estimate([0.25, 0.5, 0.5, 0.75]).mean
    0.5
    """
    values = as_rewards(values_P, "values")
    if values.size < 2:
        raise DataError(f"an interval needs at least 2 prompts, found {values.size}")
    if not np.isfinite(values).all():
        raise DataError(f"the value of prompt {np.flatnonzero(~np.isfinite(values))[0]} is not finite")
    if not (confidence > 0.0 and 0.5 + confidence / 2.0 < 1.0):  # Student's quantile at 1 is infinite
        raise ConfigError(f"the confidence level must be between 0 and 1, found {confidence}")
    if confidence > RESAMPLED_CONFIDENCE:
        known = estimate(values, confidence=RESAMPLED_CONFIDENCE, seed=seed)
        chances = 0.5 + np.array([confidence, RESAMPLED_CONFIDENCE]) / 2.0
        asked, of_known = scipy.special.stdtrit(values.size - 1, chances)
        low, high = (known.mean + asked / of_known * (end - known.mean) for end in (known.low, known.high))
        return Estimate(known.mean, float(low), float(high))
    values = np.sort(values)  # the order of prompts does not change the interval, and the mirror image mirrors it
    prompts, mean = values.size, values.mean()
    spread = values - mean
    square = float(spread @ spread)
    skew = float((spread**3).sum()) / (6.0 * square**1.5) if square > 0 else 0.0
    values = values[::-1] if skew < 0.0 else values
    t_quantile = scipy.special.stdtrit(prompts - 1, 0.5 + confidence / 2.0)
    z = t_quantile * np.array([-1.0, 1.0])
    error = np.sqrt(square / (prompts - 1) / prompts)
    students = (mean - t_quantile * error, mean + t_quantile * error)
    if prompts > RESAMPLED_PROMPTS:
        low, high = mean + np.sqrt(square) / prompts * (z + skew * (2.0 * z**2 + 1.0))
        return Estimate(float(mean), float(min(low, students[0])), float(max(high, students[1])))
    z = skew + np.sqrt(prompts / (prompts - 1)) * z
    levels = scipy.special.ndtr(skew + z / np.maximum(1.0 - skew * z, 1e-9))
    spread = values - mean
    moments = np.stack([spread, spread**2], axis=1)
    drawn = _times_drawn(prompts, seed)
    firsts, seconds = np.vstack([drawn[rows].astype(float) @ moments for rows in chunks(RESAMPLES, prompts)]).T
    means, spreads = mean + firsts / prompts, np.sqrt(np.maximum(seconds - firsts**2 / prompts, 0.0) / (prompts - 1))
    least = LEAST_SPREAD * error * np.sqrt(prompts) or 1.0
    ratios = np.sqrt(prompts) * (means - mean) / np.maximum(spreads, least) * np.minimum(10.0 * spreads / least, 1.0)
    wider = t_quantile / scipy.special.ndtri(0.5 + confidence / 2.0)
    studentized = mean - wider * error * np.quantile(ratios, [0.5 + confidence / 2.0, 0.5 - confidence / 2.0])
    low, high = np.quantile(means, levels)
    ends = np.stack([(low, high), studentized, students])
    return Estimate(float(mean), float(ends[:, 0].min()), float(ends[:, 1].max()))


@lru_cache(maxsize=8)
def _times_drawn(prompts: int, seed: int) -> NDArray[np.uint8]:
    """Return how often each prompt is in each resample, (RESAMPLES, P): the same for all values of so many prompts."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((RESAMPLES, prompts), np.uint8)  # no prompt is ever drawn 256 times
    for rows in chunks(RESAMPLES, prompts):
        places = rng.integers(prompts, size=drawn[rows].shape) + prompts * np.arange(len(drawn[rows]))[:, None]
        drawn[rows] = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape)
    return drawn


def of_clusters(values_P: ArrayLike, clusters_P: ArrayLike | None) -> Array:
    """Return one value per cluster of prompts, for intervals: m + (Σ − M·m)/M̄, whose mean is that over prompts.

    Σ is the sum over its M prompts, M̄ the mean of M. The spread is that of the mean over prompts of clusters drawn
    (the ratio estimate, linearized). None is a cluster per prompt. Raises DataError unless each value has a label.

    >>> of_clusters([1.0, 1.0, 0.0], ["a", "a", "b"]).round(3)
    array([1.111, 0.222])
    """
    values = np.asarray(values_P, float)
    if clusters_P is None:
        return values
    labels = np.asarray(clusters_P)
    if labels.shape != values.shape:
        raise DataError(f"clusters need one label per prompt: found {labels.size} labels, {values.size} prompts")
    cluster_P, sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    sums = np.bincount(cluster_P.ravel(), weights=values)
    return np.asarray(values.mean() + (sums - sizes * values.mean()) / sizes.mean())
