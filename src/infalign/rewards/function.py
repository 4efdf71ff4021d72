"""The reward of any Python function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from infalign.core.user_code import import_function
from infalign.method.by_name import ByName, UserReward
from infalign.rewards.limited import SECONDS, Limited
from infalign.rewards.weighted import WeightedSum

MAY_HANG = {"trl.rewards:accuracy_reward", "trl.rewards:reasoning_accuracy_reward"}  # as math_verify


def function_reward(spec: str, seconds: float | None = None, late: float | None = 0.0) -> ByName:
    """Return a reward function, which is called by the names of its parameters; raises as `import_function`.

    With ``seconds``, and if it may hang, it is `Limited`.
    """
    function = ByName(import_function(spec))
    may_hang = seconds or spec in MAY_HANG or isinstance(function.function, Limited)
    return ByName(_limited(function.function, spec, seconds or SECONDS, late)) if may_hang else function


@cache
def _limited(function: Callable[..., Any], spec: str, seconds: float, late: float | None) -> Limited:
    """Return a function with a time limit; all parts of a run that a process scores share its process."""
    if isinstance(function, Limited):
        return replace(function, seconds=seconds, late=late)
    return Limited(function, spec, seconds, late)


def weighted_reward(
    weights: Mapping[str, float], seconds: float | None = None, *, leaves_out: bool = False
) -> UserReward:
    """Return the weighted sum of reward functions, or the one there is with weight 1; raises as `function_reward`."""
    late = None if leaves_out else 0.0
    parts = tuple((function_reward(spec, seconds, late), weight) for spec, weight in weights.items())
    alone = [weight for _, weight in parts] == [1] and not leaves_out
    return parts[0][0] if alone else WeightedSum(parts, leaves_out)
