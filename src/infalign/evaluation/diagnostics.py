"""Whether ranks can be trusted: saturation, error, uniformity."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from infalign.method.calibration import Array


def saturation(rewards_PM: Array, reference_rewards_PK: Array) -> Array:
    """Return each prompt's share of rewards above all K reference rewards, shape (P,).

    All of them have calibrated reward 1, so neither training nor a curve over u can tell them apart. Fresh base samples
    without ties reach 1/(K + 1) on average; a policy far above it asks for a larger K.
    """
    return np.asarray((rewards_PM > reference_rewards_PK.max(axis=1, keepdims=True)).mean(axis=1))


def rank_error(rollouts: int, *, confidence: float = 0.95) -> float:
    """Return the bound on the error of calibrated rewards from K ``rollouts``: sqrt(log(2/δ)/2K) (DKW).

    It holds for all rewards of a prompt at once with probability ``confidence`` = 1 − δ.
    """
    return float(np.sqrt(np.log(2.0 / (1.0 - confidence)) / (2.0 * rollouts)))


def uniformity(ranks: ArrayLike) -> float:
    """Return the Kolmogorov distance of calibrated rewards from Unif[0, 1], which fresh base samples should follow."""
    u = np.sort(np.asarray(ranks, float).ravel())
    steps = rankdata(u, method="max") / u.size
    return float(np.max(np.maximum(np.abs(steps - u), np.abs((rankdata(u, method="min") - 1) / u.size - u))))
