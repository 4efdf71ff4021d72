"""How many groups of on-policy training have a gradient at its start, from stored verdicts."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import binom, hypergeom

from infalign.core.errors import DataError
from infalign.evaluation.extrapolation import RATES
from infalign.evaluation.intervals import Estimate
from infalign.evaluation.measures import Measuring
from infalign.evaluation.reward_tables import Rewards, RewardTable
from infalign.method.group_advantages import advantages


def groups_with_signal(
    rewards: Rewards, objective: str, sizes: Sequence[int], *, threshold: float | None = None
) -> list[Estimate]:
    """Return which share of groups of each of ``sizes`` has an advantage other than 0, a mean over prompts.

    ``rewards`` are 0 or 1, or graded with a ``threshold``, of any number of responses per prompt. For groups of at most
    as many the share is unbiased; beyond, it is that of pass rates that fit, with limits that hold for all. Raises
    DataError as `measure`, for several models, and for a group that is too small for the ``objective``.

    >>> [round(one.mean, 2) for one in groups_with_signal([[0, 0, 0, 1], [0, 1, 1, 1]], "pass@3", [3, 4])]
    [0.38, 0.5]
    """
    (part,) = Measuring(threshold).parts(table := RewardTable.of(rewards))
    if len(table.models.names) > 1:
        raise DataError(f"the rewards are of {len(table.models.names)} models; give those of one")
    counts = part.counts(np.arange(part.groups.sizes.size))
    shares = []
    for size in sizes:
        right = np.arange(size + 1)
        rewards_RG = (np.arange(size) >= size - right[:, None]).astype(float)  # of groups with so many right responses
        advantages_RG = advantages(rewards_RG.ravel(), right.repeat(size), objective).reshape(rewards_RG.shape)
        has_signal = (np.abs(advantages_RG) > 1e-12).any(axis=1).astype(float)
        exact = hypergeom.pmf(right, counts.n[:, None], counts.c[:, None], np.minimum(size, counts.n)[:, None])
        of_rate = has_signal @ binom.pmf(right[:, None], size, RATES)
        within = (counts.n >= size)[:, None]
        shares.append(counts.estimate((exact * within) @ has_signal, np.tile(of_rate, (counts.sizes.size, 1))))
    return shares
