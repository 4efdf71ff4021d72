"""Means over prompts with their intervals."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr
from scipy.stats import t

from infalign.errors import ConfigError, DataError
from infalign.evaluation.samples import chunks

RESAMPLES = 2000
RESAMPLED_PROMPTS = 10_000  # above this, the bootstrap and its expansion agree to within the noise of resampling


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


def estimate(values_P: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean over prompts with a bootstrap interval (prompts are the clusters); seeded.

    Give the difference of two policies' values on the same prompts for a paired interval.

    It is the bias-corrected and accelerated bootstrap (BCa) of a mean, bias and acceleration taken from the skewness
    and the normal quantiles replaced by Student's. Measured on win rates from 20, 50 and 200 prompts
    (`benchmarks/coverage.py`), its 95 % intervals cover 94–96 %, where the percentile bootstrap covers 91–95 %; if few
    prompts decide, because almost all are won, 91 % from 20 prompts and 94 % from 50. Above 10,000 prompts its
    expansion is used, which no longer resamples.

    Where all values are equal the interval has no width, which says nothing about other prompts. Raises DataError for
    fewer than two prompts, which give no interval, and for a value that is not finite; ConfigError unless
    0 < confidence < 1.
    """
    values = np.asarray(values_P, float)
    if values.size < 2:
        raise DataError(f"an interval needs at least 2 prompts, found {values.size}")
    if not np.isfinite(values).all():
        raise DataError(f"the value of prompt {np.flatnonzero(~np.isfinite(values))[0]} is not finite")
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence of an interval lies between 0 and 1, found {confidence}")
    prompts, mean = values.size, values.mean()
    spread = values - mean
    square = float(spread @ spread)
    skew = float((spread**3).sum()) / (6.0 * square**1.5) if square > 0 else 0.0
    z = t.ppf(0.5 + confidence / 2.0, prompts - 1) * np.array([-1.0, 1.0])
    if prompts > RESAMPLED_PROMPTS:
        low, high = mean + np.sqrt(square) / prompts * (z + skew * (2.0 * z**2 + 1.0))
        return Estimate(float(mean), float(low), float(high))
    z = skew + np.sqrt(prompts / (prompts - 1)) * z
    levels = ndtr(skew + z / np.maximum(1.0 - skew * z, 1e-9))
    rng = np.random.default_rng(seed)
    means = [
        values[rng.integers(prompts, size=(rows.stop - rows.start, prompts))].mean(axis=1)
        for rows in chunks(RESAMPLES, prompts)
    ]
    low, high = np.quantile(np.concatenate(means), levels)
    return Estimate(float(mean), float(low), float(high))
