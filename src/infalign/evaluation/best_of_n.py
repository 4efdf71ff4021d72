"""Best-of-n as an alignment method: its KL."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlog1py

from infalign.core.errors import DataError
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN

LEAST_LOG = -700.0  # below this, e^x underflows


def best_of_n_kl_bound(n: int) -> float:
    """Return log n − (n−1)/n nats: no policy spends more by serving the best of n draws; without atoms it is exact.

    Raises ConfigError unless n is a whole number of at least 1.
    """
    BestOfN(n)  # raises ConfigError for an invalid n
    return float(np.log(n) - (n - 1) / n)


def best_of_n_kl_given(log_probabilities: ArrayLike, n: int) -> Array:
    """Return the KL in nats of Best-of-n to the policy, estimated from responses that it served, shape of the input.

    ``log_probabilities`` are log ε, with ε the policy's probability of the response that was served:
    (1−ε)^n·[log n + (n−1)·log(1−ε) − (n−1)/n] + [1 − (1−ε)^n]·log([1 − (1−ε)^n]/ε) (Beirami et al., arXiv 2401.01879).
    It is the exact KL where the best response has probability ε and all others have none of their own: the bound as
    ε → 0, and 0 at ε = 1.

    Raises DataError for a log-probability that is NaN or above 0, ConfigError as `best_of_n_kl_bound`.
    """
    given = np.asarray(log_probabilities, float)
    bad = ~(given <= 0)
    if bad.any():
        raise DataError(
            f"log_probabilities has {given[bad][0]:g}; give logs of probabilities in nats, which are at most 0"
        )
    log_epsilon = np.maximum(given, LEAST_LOG)  # there the bound is reached to all digits
    epsilon, others = np.exp(log_epsilon), -np.expm1(log_epsilon)
    missed = np.exp(xlog1py(n, -epsilon))  # the probability that all n draws miss it
    among_others = missed * best_of_n_kl_bound(n) + xlog1py((n - 1) * missed, -epsilon)
    more = -others * np.expm1(xlog1py(n - 1, -epsilon)) / epsilon  # [1 − (1−ε)^n]/ε − 1, without cancellation
    return np.asarray(among_others + (1.0 - missed) * np.log1p(more))


def best_of_n_kl(rewards_PM: Array, log_probabilities_PM: Array, n: int) -> Array:
    """Return each prompt's mean of `best_of_n_kl_given` over what Best-of-n serves of M ≥ n samples, shape (P,).

    ``log_probabilities_PM`` are the samples' own, in nats, under the policy that drew them. Every sample counts with
    the probability that it is the best of n, so that the mean is unbiased for the estimator's over all draws. Raises
    DataError for other shapes and for fewer samples than n, and as `best_of_n_kl_given`.
    """
    if rewards_PM.shape != log_probabilities_PM.shape:
        raise DataError(
            f"rewards {rewards_PM.shape} and log-probabilities {log_probabilities_PM.shape} "
            "must both be prompts × samples"
        )
    kl_PM = best_of_n_kl_given(log_probabilities_PM, n)
    return np.asarray((BestOfN(n).weights(rewards_PM) * kl_PM).sum(axis=1))
