"""The reward of any Python function."""

from __future__ import annotations

import importlib
from typing import cast

from infalign.errors import ConfigError
from infalign.method.reward import user_code
from infalign.rewards.base import RewardFunction


def function_reward(spec: str) -> RewardFunction:
    """Import the reward function that ``spec`` names as ``package.module:function``; its module's code runs.

    Raises ConfigError that says what is missing (the colon, the module or the function) or what its module raised.
    """
    module_name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise ConfigError(f"reward function {spec!r}: write it as package.module:function")
    with user_code(f"reward function {spec!r}: importing {module_name} raised", ConfigError):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(
                f"reward function {spec!r}: cannot import {module_name} ({error}); install it or put it on PYTHONPATH"
            ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward function {spec!r}: {module_name} has no function {function_name}")
    return cast(RewardFunction, function)
