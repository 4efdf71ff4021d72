"""What the benchmarks over several seeds share: the words behind their names, and intervals over seeds."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import t


def seeds_and_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the seeds, by default 0, 1 and 2, and the settings ``key=value`` of a recipe."""
    seeds, settings = ([word for word in words if ("=" in word) is setting] for setting in (False, True))
    return seeds or ["0", "1", "2"], settings


def interval(values: Sequence[float]) -> str:
    """Return the mean over seeds with half the width of its 95 % interval (Student's), which one seed does not have."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.2f} ± {half:.2f}"
