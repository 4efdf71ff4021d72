"""Read recipes from YAML, with overrides by ``--set key=value``."""

from copy import copy
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from infalign.core.errors import ConfigError
from infalign.core.settings import NOT_IN_TEXT, explained, shortened
from infalign.core.user_code import is_file
from infalign.method.procedures import respelled
from infalign.recipe.built_in import find, meant
from infalign.recipe.settings import Recipe

YAML_ERRORS = (YAMLError, ValueError, LookupError, ArithmeticError, RecursionError)  # not only of YAML: of !!int x
MAX_RECIPE_BYTES = 100_000


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe, a file or a built-in one (`built_in.find`), and apply ``key.sub=value`` overrides in YAML.

    ``policies.NAME=null`` takes a policy out. Raises ConfigError naming the file, the line of invalid YAML or of a
    duplicate key, the dotted key and, for an unknown key, the nearest known one.
    """
    path = find(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the recipe {path}: {said}; {meant(path)}") from error
    if len(content) > MAX_RECIPE_BYTES:
        raise ConfigError(f"{path} is not a recipe: it has more than {MAX_RECIPE_BYTES:,} bytes")
    return recipe_of(content, path, overrides)


def recipe_of(content: bytes, path: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe that a file at ``path`` with this content is. Raises ConfigError as `load_recipe` does."""
    try:
        settings = read_yaml(content.decode())
    except YAML_ERRORS as error:
        raise ConfigError(f"{path} is not valid YAML: {_fault(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} has no settings; a recipe is a YAML mapping such as `run_dir: runs/demo`")
    _beside(path.parent, settings)
    for override in overrides or []:
        _apply(settings, override)
    _beside(Path(), settings)
    with explained(str(path)):
        return Recipe.model_validate(settings)


def _beside(folder: Path, settings: dict[str, Any]) -> None:
    """Make absolute paths of the files of reward functions, procedures and the chat template in ``folder``."""
    if isinstance(procedure := settings.get("procedure"), str):
        settings["procedure"] = respelled(procedure, partial(_placed, folder))
    for name, key in (("reward", "function"), ("judge", "function"), ("gold", "function"), ("policy", "chat_template")):
        section = settings.get(name)
        if isinstance(section, dict) and section.get(key) is not None:
            settings[name] = section | {key: _placed(folder, section[key])}


def _placed(folder: Path, given: Any) -> Any:
    """Return the spelling of a file in ``folder`` with its absolute path, and what is none as it is."""
    if isinstance(given, str) and (given.endswith(".jinja") or is_file(given)) and not NOT_IN_TEXT.search(given):
        return str(folder.resolve() / given)
    return given


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe with every default spelled out, as YAML."""
    return write_yaml(recipe.model_dump(mode="json"))


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, found {override!r}; for example --set rollout.k=16")
    try:
        value = read_yaml(text)
    except YAML_ERRORS as error:
        raise ConfigError(f"--set {key}: {shortened(text)} is not a YAML value: {_fault(error)}") from error
    *parents, last = key.split(".")
    place: Any = settings
    for depth, parent in enumerate([*parents, last]):
        if isinstance(place, list):
            if parent not in map(str, range(len(place))):
                raise ConfigError(f"--set {key}: {'.'.join(parents[:depth])} is a list of {len(place)}; use a number")
            step: Any = int(parent)
        elif isinstance(place, dict):
            step = parent
        else:
            raise ConfigError(f"--set {key}: {'.'.join(parents[:depth])} has no keys")
        if depth == len(parents) and parents == ["policies"] and value is None and isinstance(place, dict):
            if place.pop(step, None) is None:
                raise ConfigError(f"--set {key}: the recipe has no policy {last}; it has {', '.join(place)}")
        elif depth == len(parents):
            place[step] = value
        else:
            inner = {} if isinstance(place, dict) and place.get(step) is None else place[step]
            place[step] = copy(inner)  # a YAML alias may be shared by several keys, and only this one changes
            place = place[step]


class _Constructor(SafeConstructor):
    """A constructor for which 2024-01-02 is text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML 1.2 document. Raises one of `YAML_ERRORS`, also for duplicate keys."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml.load(text)


def write_yaml(value: Any) -> str:
    """Return a value as YAML 1.2."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, 10_000
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = StringIO()
    yaml.dump(value, text)
    return text.getvalue().removesuffix("...\n")


def _fault(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        said = " ".join(filter(None, (error.context, error.problem)))
        return f"line {error.problem_mark.line + 1}: {said}"
    return " ".join(str(error).split())
