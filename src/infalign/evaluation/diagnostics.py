"""Whether ranks can be trusted: saturation, error, and how far two sources agree."""

import numpy as np

from infalign.method.calibration import Array, calibrate


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


def agreement(rewards_PM: Array, judged_PM: Array) -> Array:
    """Return Spearman's correlation of two sources of rewards within each prompt, shape (P′,).

    Prompts where all rewards of one source tie are left out. The agreement of reward and judge bounds
    what a policy can win by the judge; that of reward and length shows what is learned besides. P′ may be 0.
    """
    differ = (np.ptp(rewards_PM, axis=1) > 0) & (np.ptp(judged_PM, axis=1) > 0)
    # Mid-ranks, less their mean.
    ours, theirs = (calibrate(own, np.sort(own, axis=1)) - 0.5 for own in (rewards_PM[differ], judged_PM[differ]))
    return np.asarray((ours * theirs).sum(axis=1) / np.sqrt((ours**2).sum(axis=1) * (theirs**2).sum(axis=1)))
