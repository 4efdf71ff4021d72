"""Inference-time win rates from samples, for every N at once, with intervals over prompts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap, rankdata

from infalign.calibration import Array
from infalign.errors import DataError
from infalign.procedures import Procedure, RewindAndRepeat

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Samples:
    """What one model said to every prompt: rewards that the procedure selects by, and a judge's.

    Both of shape (P, M). With ``judged`` equal to ``selected`` the judge is the selecting reward itself.
    """

    selected: Array
    judged: Array

    def __post_init__(self) -> None:
        if self.selected.ndim != 2 or self.selected.shape != self.judged.shape:
            raise DataError(
                f"selection rewards {self.selected.shape} and judge rewards {self.judged.shape} "
                "must both be prompts × samples"
            )


def win_rates(policy: Samples, base: Samples, procedure: Procedure) -> Array:
    """Return each prompt's unbiased inference-time win rate, shape (P,), of policy over base, both served alike.

    W = Σ_ij a_i·b_j·w(y_i, z_j): a, b are the probabilities that ``procedure`` serves sample i, j (selection reward,
    ties shared evenly), w compares the judge's rewards, ties 1/2. Rewind-and-Repeat takes its threshold from the first
    half of the base samples and compares with the second half, so that the base does not grade itself.

    Raises DataError if the prompts differ in number or the samples are fewer than the procedure draws.
    """
    if policy.selected.shape[0] != base.selected.shape[0]:
        raise DataError(f"the policy has {policy.selected.shape[0]} prompts, the base {base.selected.shape[0]}")
    thresholds = None
    if isinstance(procedure, RewindAndRepeat):
        thresholds, base = _rewind_thresholds(base, procedure)
    a_PM = procedure.weights(policy.selected, thresholds)
    b_PB = procedure.weights(base.selected, thresholds)
    return _weighted_wins(policy.judged, a_PM, base.judged, b_PB)


def rewind_draws(policy: Samples, base: Samples, procedure: RewindAndRepeat) -> Array:
    """Return each prompt's expected number of draws under Rewind-and-Repeat, shape (P,).

    For the base itself give ``base`` twice: the half that did not set the threshold is counted.
    """
    thresholds, rest = _rewind_thresholds(base, procedure)
    return procedure.draws((rest if policy is base else policy).selected, thresholds)


def estimate(values_P: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean over prompts with a percentile bootstrap interval (prompts are the clusters); seeded.

    Raises DataError for fewer than two prompts, which give no interval.
    """
    values = np.asarray(values_P, float)
    if values.size < 2:
        raise DataError(f"an interval needs at least 2 prompts, found {values.size}")
    interval = bootstrap(
        (values,),
        np.mean,
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(float(values.mean()), float(interval.low), float(interval.high))


def matched(
    budgets: Sequence[tuple[ArrayLike, ArrayLike]],
    kl: float,
    gain: Callable[[float], float],
) -> Array:
    """Return each prompt's win rate at mean KL ``kl``, shape (P,), by interpolation along a method's budgets.

    ``budgets``: for each budget of one method its per-prompt KL and win rates. ``gain(kl)`` is the shape of the curve,
    theory's W − 1/2 of the same transformation and procedure: what is interpolated, linearly in KL, is the share of it
    that the method reaches, and below the first budget that share is taken as constant. (A straight line from the base
    would lose many points: theory's curves rise like √KL.) Raises DataError when ``kl`` lies beyond the last budget.
    """
    points = sorted(
        ((float(np.mean(np.asarray(k, float))), np.asarray(w, float)) for k, w in budgets), key=lambda point: point[0]
    )
    above = next((i for i, (mean, _) in enumerate(points) if mean >= kl), None)
    if above is None:
        raise DataError(f"no policy reaches a KL of {kl:.3f} nats; the largest is {points[-1][0]:.3f}")
    high, wins = points[above]
    if high == kl:
        return wins
    share = (wins - 0.5) / gain(high)
    if above > 0:
        low, low_wins = points[above - 1]
        weight = (kl - low) / (high - low)
        share = weight * share + (1 - weight) * (low_wins - 0.5) / gain(low)
    return 0.5 + share * gain(kl)


def _rewind_thresholds(base: Samples, procedure: RewindAndRepeat) -> tuple[Array, Samples]:
    half = base.selected.shape[1] // 2
    if half < procedure.n:
        raise DataError(
            f"{procedure.name} needs {2 * procedure.n} base samples a prompt, found {base.selected.shape[1]}"
        )
    thresholds = np.quantile(
        base.selected[:, :half], procedure.quantile, axis=1, method="weibull"
    )  # its mean rank is exact
    return thresholds, Samples(base.selected[:, half:], base.judged[:, half:])


def _weighted_wins(policy_PM: Array, a_PM: Array, base_PB: Array, b_PB: Array) -> Array:
    """Return Σ_ij a_i·b_j·w(policy_i, base_j) for each prompt by one sort of the base and one look-up a sample."""
    wins = np.empty(len(policy_PM))
    for p, (policy, a, base, b) in enumerate(zip(policy_PM, a_PM, base_PB, b_PB, strict=True)):
        order = np.argsort(base)
        mass = np.concatenate([[0.0], np.cumsum(b[order])])
        below, at_most = (np.searchsorted(base[order], policy, side=side) for side in ("left", "right"))
        wins[p] = a @ (mass[below] + mass[at_most]) / 2
    return wins


def uniformity(ranks: ArrayLike) -> float:
    """Return the Kolmogorov distance of calibrated rewards from Unif[0, 1], which fresh base samples should follow."""
    u = np.sort(np.asarray(ranks, float).ravel())
    steps = rankdata(u, method="max") / u.size
    return float(np.max(np.maximum(np.abs(steps - u), np.abs((rankdata(u, method="min") - 1) / u.size - u))))
