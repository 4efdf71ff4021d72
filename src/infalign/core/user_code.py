"""The user's own code: it is imported here, and what it raises becomes an error that says where."""

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from infalign.core.errors import ConfigError, InfalignError, StoppedError

# Files of the code that calls or imports a function of the user.
BETWEEN = (str(Path(__file__).parents[1]), contextlib.__file__, importlib.__file__, "<frozen importlib")


def import_function(spec: str, what: str = "reward function") -> Callable[..., Any]:
    """Import the function ``package.module:function`` or ``folder/file.py:function``. Raises as `imported`."""
    function: Callable[..., Any] | None = imported(spec, what)
    if not callable(function):
        place, _, name = spec.rpartition(":")
        raise ConfigError(f"{what} {spec!r}: {place} has no function {name}")
    return function


def imported(spec: str, what: str) -> Any:
    """Return what ``package.module:name`` or ``folder/file.py:name`` is, None if it is not there; its code runs.

    Raises ConfigError, which says ``what`` is imported, if the colon or the module is missing or the module raises.
    """
    place, _, name = spec.rpartition(":")
    in_file = is_file(spec)
    if not name.isidentifier() or not (in_file or all(part.isidentifier() for part in place.split("."))):
        kind = what.rpartition(" ")[2]
        raise ConfigError(f"{what} {spec!r}: write it as package.module:{kind} or my_file.py:{kind}")
    with user_code(f"{what} {spec!r}: importing {place} raised", ConfigError):
        if in_file:
            module = _module_of(Path(place), f"{what} {spec!r}")
        else:
            try:
                module = importlib.import_module(place)
            except ImportError as error:
                raise ConfigError(
                    f"{what} {spec!r}: cannot import {place} ({error}); install it, put it on PYTHONPATH, or "
                    f"name its file, my_file.py:{name}"
                ) from error
    return getattr(module, name, None)


def function_name(spec: str) -> str:
    """Return the name of a function or class, without the folder of its file."""
    return spec.rpartition("/")[2] if is_file(spec) else spec


def is_file(spec: str) -> bool:
    """Return whether ``spec`` names something in a file, not in a module."""
    return spec.rpartition(":")[0].endswith(".py")


def source_file(spec: str) -> Path | None:
    """Return the file with the source of what ``spec`` names, if there is one; nothing of the user's is imported."""
    place = spec.rpartition(":")[0]
    if is_file(spec):
        return Path(place)
    top, *inner = place.split(".")
    try:
        module_spec = find_spec(top)
    except ValueError:  # not a valid module name
        return None
    for name in inner:
        inside = module_spec.submodule_search_locations if module_spec is not None else None
        module_spec = PathFinder.find_spec(name, inside) if inside else None
    return Path(module_spec.origin) if module_spec is not None and module_spec.origin is not None else None


def _module_of(path: Path, what: str) -> ModuleType:
    """Import a file once, under a name by which processes that are started here find it too, with its folder."""
    file = path.absolute()
    if not file.is_file():
        raise ConfigError(f"{what}: the file {path} does not exist")
    importlib.invalidate_caches()
    name = _name_of(file)
    if name in sys.modules:
        return sys.modules[name]
    _search(file.parent)
    module_spec = spec_from_file_location(name, file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = sys.modules[name] = module_from_spec(module_spec)  # dataclasses look their module up
    try:
        module_spec.loader.exec_module(module)
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


@contextlib.contextmanager
def user_code(what: str, kind: type[InfalignError] = InfalignError) -> Iterator[None]:
    """Run code of the user: whatever it raises, also SystemExit, becomes an error that says ``what`` and where.

    Errors of infalign and signals pass. The working directory is afterwards what it was.
    """
    try:
        with contextlib.chdir(Path.cwd()):
            yield
    except (InfalignError, KeyboardInterrupt, StoppedError):
        raise
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(BETWEEN)]
        place = f" in {Path(frames[0].filename).name}, line {frames[0].lineno}" if frames else ""
        said = " ".join(str(error).split())[:300]
        raise kind(f"{what} {type(error).__name__}{place}: {said}; fix it and rerun the same command") from error
