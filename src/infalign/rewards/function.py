"""The reward of any Python function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from infalign.core.errors import ConfigError
from infalign.method.by_name import ByName, UserReward
from infalign.method.reward import user_code
from infalign.rewards.weighted import WeightedSum


def function_reward(spec: str) -> ByName:
    """Return a reward function, which is called by the names of its parameters; raises as `import_function`."""
    return ByName(import_function(spec))


def import_function(spec: str) -> Callable[..., Any]:
    """Import the function ``package.module:function`` or ``folder/file.py:function``; its module's code runs.

    Raises ConfigError that says what is missing (the colon, the module or the function) or what its module raised.
    """
    place, _, name = spec.rpartition(":")
    in_file = is_file(spec)
    if not name.isidentifier() or not (in_file or all(part.isidentifier() for part in place.split("."))):
        raise ConfigError(f"reward function {spec!r}: write it as package.module:function or my_file.py:function")
    with user_code(f"reward function {spec!r}: importing {place} raised", ConfigError):
        if in_file:
            module = _module_of(Path(place), spec)
        else:
            try:
                module = importlib.import_module(place)
            except ImportError as error:
                raise ConfigError(
                    f"reward function {spec!r}: cannot import {place} ({error}); install it, put it on PYTHONPATH, or "
                    "name its file, my_file.py:function"
                ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward function {spec!r}: {place} has no function {name}")
    return function


def weighted_reward(weights: Mapping[str, float]) -> UserReward:
    """Return the weighted sum of reward functions, or the one there is with weight 1; raises as `function_reward`."""
    parts = tuple((function_reward(spec), weight) for spec, weight in weights.items())
    return parts[0][0] if [weight for _, weight in parts] == [1] else WeightedSum(parts)


def function_name(spec: str) -> str:
    """Return the name of a function, without the folder of its file."""
    return spec.rpartition("/")[2] if is_file(spec) else spec


def is_file(spec: str) -> bool:
    """Return whether ``spec`` names a function in a file, not in a module."""
    return spec.rpartition(":")[0].endswith(".py")


def source_file(spec: str) -> Path | None:
    """Return the file with the source of a reward function, if there is one; nothing of the user's is imported."""
    place = spec.rpartition(":")[0]
    if is_file(spec):
        return Path(place)
    top, *inner = place.split(".")
    try:
        found = find_spec(top)
    except ValueError:  # not a valid module name
        return None
    for name in inner:
        inside = found.submodule_search_locations if found is not None else None
        found = PathFinder.find_spec(name, inside) if inside else None
    return Path(found.origin) if found is not None and found.origin is not None else None


def _module_of(path: Path, spec: str) -> ModuleType:
    """Import a file once as a module of a name that nothing else has."""
    name = f"_{path.stem}_{blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    found = spec_from_file_location(name, path)
    if not path.is_file() or found is None or found.loader is None:
        raise ConfigError(f"reward function {spec!r}: the file {path} does not exist")
    module = sys.modules[name] = module_from_spec(found)  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
