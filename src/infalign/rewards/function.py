"""The reward of any Python function, or of several: their weighted sum, as TRL adds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from infalign.core.user_code import import_function
from infalign.method.by_name import ByName, UserReward
from infalign.rewards.base import checked_rewards
from infalign.rewards.limited import SECONDS, Limited

MAY_HANG = {"trl.rewards:accuracy_reward", "trl.rewards:reasoning_accuracy_reward"}  # as math_verify


def function_reward(spec: str, seconds: float | None = None) -> ByName:
    """Return a reward function, which is called by the names of its parameters; raises as `import_function`.

    With ``seconds``, and if it may hang, it is `Limited`.
    """
    function = ByName(import_function(spec))
    may_hang = seconds or spec in MAY_HANG or isinstance(function.function, Limited)
    return ByName(_limited(function.function, spec, seconds or SECONDS)) if may_hang else function


@cache
def _limited(function: Callable[..., Any], spec: str, seconds: float) -> Limited:
    """Return a function with a time limit; all parts of a run that a process scores share its process."""
    return replace(function, seconds=seconds) if isinstance(function, Limited) else Limited(function, spec, seconds)


@dataclass(frozen=True)
class WeightedSum(UserReward):
    """Σ_i w_i·r_i of functions; one that returns None for a response adds nothing to it, and None of all stays None."""

    parts: tuple[tuple[ByName, float], ...]

    def __call__(self, prompts: list[Any], responses: Sequence[str], *rest: Any, **more: Any) -> list[float | None]:
        """Return the sum for each response; takes what `ByName` takes, and raises as `checked_rewards`."""
        terms = []
        for function, weight in self.parts:
            values, about = function(prompts, responses, *rest, **more), f"of {function.name}"
            found = checked_rewards(values, prompts, first=0, name=about, of_function=True)
            terms.append([weight * float(value) for value in found])
        given = [[term for term in of_row if not math.isnan(term)] for of_row in zip(*terms, strict=True)]
        return [math.fsum(of_row) if of_row else None for of_row in given]


def weighted_reward(weights: Mapping[str, float], seconds: float | None = None) -> UserReward:
    """Return the weighted sum of reward functions, or the one there is with weight 1; raises as `function_reward`."""
    parts = tuple((function_reward(spec, seconds), weight) for spec, weight in weights.items())
    return parts[0][0] if [*weights.values()] == [1] else WeightedSum(parts)
