"""Whether ranks can be trusted: their error, and how far two sources agree."""

import numpy as np

from infalign.method.calibration import Array, calibrate


def rank_error(rollouts: int) -> float:
    """Return what errors of calibrated rewards from K ``rollouts`` stay below for 95 % of prompts: DKW's bound."""
    return float(np.sqrt(np.log(2.0 / 0.05) / (2.0 * rollouts)))


def agreement(rewards_PM: Array, judged_PM: Array) -> Array:
    """Return Spearman's correlation of two sources of rewards within each prompt, shape (P′,).

    Prompts where all rewards of one source tie are left out. The agreement of reward and judge bounds
    what a policy can win by the judge; that of reward and length shows what is learned besides. P′ may be 0.
    """
    differ = (np.ptp(rewards_PM, axis=1) > 0) & (np.ptp(judged_PM, axis=1) > 0)
    # Mid-ranks, less their mean.
    ours, theirs = (calibrate(own, np.sort(own, axis=1)) - 0.5 for own in (rewards_PM[differ], judged_PM[differ]))
    return np.asarray((ours * theirs).sum(axis=1) / np.sqrt((ours**2).sum(axis=1) * (theirs**2).sum(axis=1)))
