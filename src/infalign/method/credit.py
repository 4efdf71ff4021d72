"""Order-statistic credit: the on-policy gradient of a Best-of-N or Worst-of-N win rate, without a transformation.

W = E[max of N draws of g(C)] with g(u) = P(u beats what the base policy serves) has the unbiased gradient estimate
Σ_i credit_i ∇log π(y_i) from any M ≥ N responses to a prompt, and g one from the K reference rollouts.
"""

import numpy as np
from numpy.typing import ArrayLike

from infalign.method.calibration import Array, as_rewards, win
from infalign.method.procedures import Extreme


def served_win_rate(rewards: ArrayLike, reference_rewards_K: ArrayLike, procedure: Extreme) -> Array:
    """Return how often each reward beats what ``procedure`` serves of the base policy, shape of ``rewards``.

    Unbiased from K ≥ N reference rewards: the mean over all sets of N of them, ties one half. For exact ranks it is
    u^N for Best-of-N and 1 − (1 − u)^N for Worst-of-N. Raises DataError for fewer than N rollouts.
    """
    rewards, references_K = as_rewards(rewards), as_rewards(reference_rewards_K)
    return np.asarray(win(rewards[..., None], references_K) @ procedure.weights(references_K[None])[0])


def credit(values_PM: Array, procedure: Extreme) -> Array:
    """Return each response's share in what the procedure serves of its group, (P, M): M × s^{loo−1} of PKPO.

    s_i is the mean over all sets of N of the M responses, 0 for those without i, of (extreme of the set) − (extreme of
    the set without i) (Walder and Karkhanis 2025, arXiv 2505.15201, mirrored for Worst-of-N). What is subtracted does
    not depend on response i, so the mean over a group of credit_i·∇log π(y_i) is unbiased for ∇E[extreme of N].
    Needs 2 ≤ N ≤ M; for N = 1 it is value − leave-one-out mean, as in RLOO.
    """
    size, n = values_PM.shape[1], procedure.n
    if n == 1:
        return np.asarray((values_PM - values_PM.mean(axis=1, keepdims=True)) * size / (size - 1))
    sign = procedure.sign
    order = (sign * values_PM).argsort(axis=1)
    ascending = np.take_along_axis(sign * values_PM, order, axis=1)
    # With i the largest of a set, the second largest is number j in C(j, n − 2) of C(size, n) sets.
    j = np.arange(size - 1.0, 0.0, -1.0)
    seconds = n * (n - 1) / (size * (size - n + 1)) * np.cumprod(np.append(1.0, np.maximum(j - n + 2, 0.0) / j))[::-1]
    below = np.cumsum(seconds * ascending, axis=1) - seconds * ascending
    shares = (np.cumsum(seconds) - seconds) * ascending - below
    found = np.empty(values_PM.shape)
    np.put_along_axis(found, order, sign * size * shares, axis=1)
    return found
