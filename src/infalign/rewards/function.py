"""The reward of any Python function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from infalign.core.user_code import import_function
from infalign.method.by_name import ByName
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
