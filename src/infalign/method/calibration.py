"""Calibrated rewards: ranks among the reference policy's own rollouts (docs/derivations.md, calibrated reward)."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infalign.core.errors import DataError

Array = NDArray[np.float64]


def as_rewards(values: Any, what: str = "rewards") -> Array:
    """Return rewards as float64. Raises DataError for what is no array of numbers, and for a number no float holds.

    Booleans count as 0 and 1, and NaN is one of the numbers.
    """
    try:
        as_lists = hasattr(values, "new_tensor") or np.ma.is_masked(values)  # torch's are on any device
        array = np.asarray(values.tolist() if as_lists else values)
    except (ValueError, TypeError, RuntimeError) as error:  # torch's of a list of tensors with gradients
        raise DataError(f"{what}: {error}; give an array of numbers") from error
    if (kind := array.dtype.kind) not in "bf":
        doubtful = array[(array > 2**53) | (array < -(2**53))] if kind in "iu" else array.ravel()
        if problem := next(filter(None, map(not_a_number, doubtful.tolist())), None):
            raise DataError(f"{what}: {problem}")
    return array.astype(float, copy=False)


def reward_rows(rewards_PK: Any) -> list[Array]:
    """Return the rewards of each prompt's K rollouts. Raises DataError unless each has 2 finite numbers or more."""
    rows = [as_rewards(row) for row in rewards_PK]
    odd = not_finite(rows)
    if odd or not rows or not all(row.ndim == 1 and row.size >= 2 for row in rows):
        shapes = f"rows of shape {', '.join(sorted({str(row.shape) for row in rows}))}" if rows else "no prompts"
        raise DataError(f"rewards must be finite, prompts × 2 rollouts or more, found {odd or shapes}")
    return rows


def not_finite(rows: Sequence[Array]) -> str | None:
    """Return where the first reward is that is not finite, and what to do, or None."""
    prompt = next((place for place, row in enumerate(rows) if not np.isfinite(row).all()), None)
    if prompt is None:
        return None
    odd = rows[prompt][~np.isfinite(rows[prompt])][0]
    return f"{odd} for prompt {prompt}; score it again, or leave it out"


def reward_table(rewards_PK: Any) -> Array:
    """Return the rewards (P, K) of as many rollouts for each prompt. Raises as `reward_rows`."""
    rows = reward_rows(rewards_PK)
    if (fewest := min(row.size for row in rows)) < (most := max(row.size for row in rows)):
        raise DataError(f"prompts have {fewest} to {most} rewards; give as many for each")
    return np.stack(rows)


def stacked(rows: Sequence[Array]) -> Array:
    """Return rows as a matrix, or as an object array where they differ in length."""
    if len({row.size for row in rows}) == 1:
        return np.stack(rows)
    ragged = np.empty(len(rows), object)
    ragged[:] = rows
    return ragged


def tied_prompts(sorted_PK: Array) -> NDArray[np.bool_]:
    """Return whether some of a prompt's sorted rewards are equal, (P,)."""
    return np.asarray((sorted_PK[:, 1:] == sorted_PK[:, :-1]).any(axis=1))


def not_a_number(value: object) -> str | None:
    """Return why ``value`` is not a number that a float holds, and what to do; None if it is. True and "1" are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return f"found a {type(value).__name__}; return a number for every response"
    try:
        rounded = float(value)
    except OverflowError:
        return "found inf: the number exceeds the range of a float; return a smaller number"
    exact = int(value) if isinstance(value, Integral) else value  # NumPy compares its integers as floats
    if rounded != exact and not math.isnan(rounded):
        return f"found {exact!r}, which a float cannot represent, so it would tie with its neighbors; return floats"
    return None


def win(a: ArrayLike, b: ArrayLike) -> Array:
    """Return 1 where ``a`` beats ``b``, 1/2 where they tie, 0 where it loses; the arguments broadcast.

    >>> win([2.0, 1.0, 0.0], 1.0)
    array([1. , 0.5, 0. ])
    """
    a, b = as_rewards(a), as_rewards(b)
    return 0.5 * ((a > b) + 1.0 * (a >= b))


def calibrate(rewards: ArrayLike, sorted_reference_rewards: ArrayLike) -> Array:
    """Rank rewards among the K reference rollouts of their prompt: Ĉ = (1/K)·Σ_i w(y, z_i), in [0, 1].

    ``rewards`` of shape (M,) go with ``sorted_reference_rewards`` of shape (K,), one prompt; (P, M) with (P, K),
    row by row. Ties count 1/2, so a rollout ranked among a set that contains itself gets its mid-rank.
    With probability at least 1 − δ the error is below sqrt(log(2/δ)/2K) for all rewards at once (DKW).

    Raises DataError if a reward is not finite (NaN would rank best), if K < 2, or if references are not sorted.

    >>> calibrate([0.5, 2.0], [0.0, 1.0, 2.0, 3.0])
    array([0.25 , 0.625])
    """
    rewards, references = as_rewards(rewards), as_rewards(sorted_reference_rewards, "reference rewards")
    if references.ndim not in (1, 2) or references.shape[-1] < 2:
        raise DataError(
            f"calibration needs at least 2 reference rewards per prompt, found an array of shape {references.shape}"
        )
    for name, values in (("reward", rewards), ("reference reward", references)):
        if not np.isfinite(values).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise DataError(
                f"{name} {where} is {values[where]}; rewards must be finite to be ranked, so score that response again"
            )
    if (references[..., 1:] < references[..., :-1]).any():
        raise DataError("the reference rewards of a prompt must be sorted in ascending order")
    if references.ndim == 1:
        return _ranks(rewards, references)
    if rewards.shape[:-1] != references.shape[:-1]:
        raise DataError(f"rewards have {rewards.shape[0]} prompts, references {references.shape[0]}; they must match")
    return np.array([_ranks(*row) for row in zip(rewards, references, strict=True)]).reshape(rewards.shape)


def snap_to_references(rewards: ArrayLike, sorted_reference_rewards_K: ArrayLike, tolerance: float) -> Array:
    """Return rewards, those within ``tolerance`` of a reference reward replaced by the nearest: rounding breaks no tie.

    >>> snap_to_references([0.5, 1.0000001], [0.0, 1.0, 2.0], 1e-6)
    array([0.5, 1. ])
    """
    rewards, references = np.asarray(rewards, float), np.asarray(sorted_reference_rewards_K, float)
    if not references.size:
        return rewards
    above = np.searchsorted(references[1:-1], rewards) + 1  # of two neighbors the upper
    low, high = references[above - 1], references[np.minimum(above, references.size - 1)]
    nearest = np.where(rewards - low < high - rewards, low, high)
    return np.where(np.abs(rewards - nearest) <= tolerance, nearest, rewards)


def _ranks(rewards: Array, references_K: Array) -> Array:
    below = np.searchsorted(references_K, rewards, side="left")
    return (below + np.searchsorted(references_K, rewards, side="right")) / (2.0 * references_K.size)


def places(values_PX: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return how many values of its row lie below each value, and how many at or below it, from one sort."""
    order = np.argsort(values_PX, axis=1)
    ordered = np.take_along_axis(values_PX, order, axis=1)
    first = np.ones(ordered.shape, bool)  # whether a value is the first of those that tie
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    last = np.roll(first, -1, axis=1)
    place, samples = np.arange(ordered.shape[1]), ordered.shape[1]
    below, at_most = np.empty((2, *ordered.shape), np.intp)
    np.put_along_axis(below, order, np.maximum.accumulate(np.where(first, place, 0), axis=1), axis=1)
    ends = np.where(last, place + 1, samples)[:, ::-1]
    np.put_along_axis(at_most, order, np.minimum.accumulate(ends, axis=1)[:, ::-1], axis=1)
    return below, at_most
