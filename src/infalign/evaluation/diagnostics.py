"""Whether ranks can be trusted: saturation, error, how far two sources agree, and where more selection hurts."""

import numpy as np

from infalign.evaluation.intervals import Estimate, estimate
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates_of
from infalign.method.calibration import Array, calibrate
from infalign.method.procedures import BestOfN, Standard


def saturation(rewards_PM: Array, reference_rewards_PK: Array) -> Array:
    """Return each prompt's share of rewards above all K reference rewards, shape (P,).

    All of them have calibrated reward 1, so neither training nor a curve over u can tell them apart. Fresh base samples
    without ties reach 1/(K + 1) on average; a policy far above it asks for a larger K.
    """
    return np.asarray((rewards_PM > reference_rewards_PK.max(axis=1, keepdims=True)).mean(axis=1))


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


def best_of_n_by_judge(base: Samples, most: int) -> tuple[list[int], Array]:
    """Return N = 1, 2, 4, … and each prompt's win rate by the judge of Best-of-N over one plain draw, (N, P).

    Half of the samples are served, the other half compared with, and the halves take turns. N is at most ``most`` and
    the number of samples in a half.
    """
    half = base.selected.shape[1] // 2
    sizes = [2**i for i in range(64) if 2**i <= min(most, half)]
    first, second = base[:, :half], base[:, half : 2 * half]
    served, plain = [BestOfN(n) for n in sizes], [Standard()] * len(sizes)
    won_NP = (win_rates_of(first, second, served, plain) + win_rates_of(second, first, served, plain)) / 2
    return sizes, won_NP


def turning_point(sizes: list[int], won_NP: Array, *, confidence: float = 0.95) -> tuple[int, Estimate] | None:
    """Return the N from which Best-of-N falls by the judge, and by how much up to the largest N; None if none is sure.

    Each smaller N is compared with the largest, paired by prompt and at a confidence that holds for all together.
    """
    level = 1.0 - (1.0 - confidence) / max(len(sizes) - 1, 1)
    falls = {
        n: fall
        for n, won in zip(sizes[:-1], won_NP[:-1], strict=True)
        if (fall := estimate(won - won_NP[-1], confidence=level)).low > 0
    }
    if not falls:
        return None
    highest = max(falls, key=lambda n: falls[n].mean)
    return highest, falls[highest]
