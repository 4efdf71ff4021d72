"""The reward of any Python function."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from infalign.core.errors import ConfigError
from infalign.method.by_name import ByName, UserReward
from infalign.method.reward import user_code
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


def weighted_reward(
    weights: Mapping[str, float], seconds: float | None = None, *, leaves_out: bool = False
) -> UserReward:
    """Return the weighted sum of reward functions, or the one there is with weight 1; raises as `function_reward`."""
    late = None if leaves_out else 0.0
    parts = tuple((function_reward(spec, seconds, late), weight) for spec, weight in weights.items())
    alone = [weight for _, weight in parts] == [1] and not leaves_out
    return parts[0][0] if alone else WeightedSum(parts, leaves_out)


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
    """Import a file once, under a name by which processes that are started here find it too, with its folder."""
    file = path.absolute()
    if not file.is_file():
        raise ConfigError(f"reward function {spec!r}: the file {path} does not exist")
    importlib.invalidate_caches()
    name = _name_of(file)
    if name in sys.modules:
        return sys.modules[name]
    _search(file.parent)
    _check_neighbors(file, spec)
    found = spec_from_file_location(name, file)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = module_from_spec(found)  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search(folder: Path) -> None:
    """Let modules in a folder be found, after all others: nothing finds them in place of a library."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _name_of(file: Path) -> str:
    """Return the shortest name, with folders if need be, that stands for this file and no other module.

    Without one, as in a folder with a dot, its name is one that only this process knows.
    """
    for folder in file.parents:
        name, before = ".".join(file.relative_to(folder).with_suffix("").parts), [*sys.path]
        _search(folder)
        if getattr(sys.modules.get(name), "__file__", str(file)) == str(file) and source_file(f"{name}:") == file:
            return name
        sys.path[:] = before
    return f"_{file.stem}_{blake2b(str(file).encode(), digest_size=8).hexdigest()}"


def _check_neighbors(file: Path, spec: str) -> None:
    """Raise ConfigError if the file imports a neighbor that has the name of another module."""
    files = [file]
    for one in files:
        with suppress(SyntaxError):  # which importing it raises
            for node in ast.walk(ast.parse(one.read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                for name in {name.partition(".")[0] for name in names}:
                    near = [file.with_name(f"{name}.py"), file.with_name(name) / "__init__.py"]
                    for neighbor in (path for path in near if path.is_file() and path not in files):
                        if (other := source_file(f"{name}:")) != neighbor:
                            raise ConfigError(
                                f"reward function {spec!r}: {one} imports {name}, which is {neighbor} or {other}; "
                                "rename its file"
                            )
                        files.append(neighbor)
