"""Advantages of responses from the rewards of their own group, for any trainer that takes them.

They see the current pass rate, so nothing has to be stored. In the mean over a group, advantage × ∇log π(y) is an
estimate of the gradient of the objective, exact in expectation but for GRPO's, which divides by the group's spread.

The win rate of Best-of-N or Worst-of-N, W = E[max of N draws of g(C)] with g(u) = P(u beats what the base policy
serves), has the unbiased gradient estimate Σ_i credit_i ∇log π(y_i) from any M ≥ N responses to a prompt, and g one
from the K reference rollouts: order-statistic credit, without a transformation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array, as_rewards
from infalign.method.procedures import BestOfN, Extreme
from infalign.method.procedures.extremes import parse

GRPO_EPSILON = 1e-4  # TRL's


def advantages(rewards: ArrayLike, groups: ArrayLike, objective: str = "pass@8") -> Any:
    """Return the advantage of each response, (B,), from ``rewards`` (B,) and the number or name of its group, (B,).

    ``objective``:

    - ``pass@K`` or ``best-of-K``: E[max of K draws], by leave-one-out credit over all sets of K (PKPO, arXiv
      2505.15201); ``pass^K`` or ``worst-of-K``: E[min of K draws];
    - ``rloo``: E[reward], reward − mean of the others;
    - ``maxrl``: E log pass rate, cut off after M − 1 terms in a group of M, (reward − mean)/mean, and 0 where none is
      right (arXiv 2602.02710); rewards ≥ 0;
    - ``grpo``: (reward − mean)/(standard deviation + 1e-4), as TRL has it.

    Tensors of torch give one on the same device, and of the same type if that is floating. Raises ConfigError for
    another objective and DataError for rewards that are not finite, or a group with too few responses.

    >>> advantages([0, 0, 0, 1], [7, 7, 7, 7], "pass@2")  # among failures one more costs nothing
    array([0., 0., 0., 2.])
    """
    values, names = as_rewards(rewards), np.asarray(getattr(groups, "tolist", lambda: groups)())
    if values.ndim != 1 or values.shape != names.shape or not np.isfinite(values).all():
        raise DataError(f"advantages need one finite reward and one group per response, found {values.shape}")
    share, least = _objective(objective)
    shares_B = np.empty(values.shape)
    _, group_of, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if (smallest := int(sizes.min(initial=least))) < least:
        raise DataError(f"{objective} needs at least {least} responses per group; one group has {smallest}")
    for size in np.unique(sizes):
        rows_GM = np.stack([np.flatnonzero(group_of == group) for group in np.flatnonzero(sizes == size)])
        shares_B[rows_GM] = share(values[rows_GM])
    given: Any = rewards
    return (given / 1).new_tensor(shares_B.tolist()) if hasattr(given, "new_tensor") else shares_B  # / 1 is floating


def _objective(name: str) -> tuple[Callable[[Array], Array], int]:
    """Return how the rewards of groups of one size, (G, M), become advantages, and the smallest M."""
    if procedure := BestOfN(1) if name == "rloo" else parse(name):
        return partial(credit, procedure=procedure), max(2, procedure.n)
    known = {"maxrl": _maxrl, "grpo": _grpo}
    if name not in known:
        raise ConfigError(
            f"unknown objective {name!r}; known: pass@K, pass^K, best-of-K, worst-of-K, rloo, maxrl, grpo"
        )
    return known[name], 2


def _maxrl(rewards_GM: Array) -> Array:
    if (rewards_GM < 0).any():
        raise DataError("maxrl needs non-negative rewards, such as 0 and 1")
    mean_G1 = rewards_GM.mean(axis=1, keepdims=True)
    return np.asarray((rewards_GM - mean_G1) / np.where(mean_G1 > 0, mean_G1, 1.0))


def _grpo(rewards_GM: Array) -> Array:
    spread_G1 = rewards_GM.std(axis=1, ddof=1, keepdims=True)
    return np.asarray((rewards_GM - rewards_GM.mean(axis=1, keepdims=True)) / (spread_G1 + GRPO_EPSILON))


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
    credits_PM = np.empty(values_PM.shape)
    np.put_along_axis(credits_PM, order, sign * size * shares, axis=1)
    return credits_PM
