"""Means over trainings from several seeds, with intervals over seeds and prompts, and what they say of a claim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from infalign.core.errors import DataError
from infalign.evaluation.intervals import Estimate, estimate
from infalign.method.calibration import Array

Verdict = Literal["confirmed", "refuted", "undecided"]


@dataclass(frozen=True, slots=True)
class Trained:
    """What one seed's training gave: a value for each of its test prompts, or one value and no prompts.

    ``shifts`` are how far interpolation may have moved the mean, each in part or in full (`matched.Matched`).
    """

    prompt_ids: Sequence[str]
    values: Array
    shifts: tuple[float, ...] = ()


def over_seeds(seeds: Sequence[Trained], *, confidence: float = 0.95) -> Estimate:
    """Return the mean over seeds with an interval for another training, evaluated on other prompts.

    It is as wide as two intervals together, their half widths added in squares: Student's over the seeds' means, and
    that over prompts (`intervals.estimate`) of each prompt's mean over the seeds that have it. If value = μ + a_seed +
    b_prompt + noise, the first holds the variance of a and of the noise, the second that of b and of the noise: all of
    it, and the noise twice, so the interval covers at least its confidence. Mean shifts by interpolation come on top.

    Raises DataError for fewer than two seeds.
    """
    if len(seeds) < 2:
        raise DataError(f"an interval over trainings needs at least 2 seeds, found {len(seeds)}")
    means = np.array([seed.values.mean() for seed in seeds])
    mean = float(means.mean())
    of_seeds = stdtrit(len(seeds) - 1, 0.5 + confidence / 2.0) * means.std(ddof=1) / np.sqrt(len(seeds))
    by_prompt: dict[str, list[float]] = {}
    for seed in seeds:
        for prompt, value in zip(seed.prompt_ids, seed.values if seed.prompt_ids else (), strict=True):
            by_prompt.setdefault(prompt, []).append(float(value))
    below, above = 0.0, 0.0
    if by_prompt:
        of_prompts = estimate([np.mean(values) for values in by_prompt.values()], confidence=confidence)
        below, above = of_prompts.mean - of_prompts.low, of_prompts.high - of_prompts.mean
    shifts = np.array([seed.shifts for seed in seeds]).mean(axis=0)
    low = mean - np.hypot(of_seeds, below) + np.minimum(shifts, 0.0).sum()
    high = mean + np.hypot(of_seeds, above) + np.maximum(shifts, 0.0).sum()
    return Estimate(mean, float(low), float(high))


def verdict(found: Estimate, least: float, most: float) -> Verdict:
    """Return what an interval says of the claim that a value is more than ``least`` and less than ``most``.

    >>> [verdict(Estimate(0.05, *ends), 0.03, 1.0) for ends in ((0.04, 0.06), (0.02, 0.08), (0.00, 0.02))]
    ['confirmed', 'undecided', 'refuted']
    """
    if least < found.low and found.high < most:
        return "confirmed"
    return "refuted" if found.high <= least or most <= found.low else "undecided"
