"""Read recipes from YAML, with overrides by ``--set key=value``."""

import re
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from infalign.core.errors import ConfigError
from infalign.core.settings import NOT_IN_TEXT, OneOf, shown
from infalign.core.spelling import did_you_mean, nearest
from infalign.recipe.built_in import find, meant
from infalign.recipe.settings import Recipe
from infalign.rewards.function import is_file

YAML_ERRORS = (yaml.YAMLError, UnicodeDecodeError, RecursionError)
LONGEST_RECIPE = 100_000  # bytes
MOST_VALUES = 100_000  # in a recipe with its aliases expanded
NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
OLD_NUMBER = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # octal and to base 60


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe, a file or one that comes along (`recipes.find`), and apply ``key.sub=value`` overrides in YAML.

    Raises ConfigError naming the file, the line of invalid YAML or of a duplicate key, the dotted key and, for an
    unknown key, the nearest known one.
    """
    path = find(path)
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_RECIPE + 1)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the recipe {path} cannot be read: {said}; {meant(path)}") from error
    if len(content) > LONGEST_RECIPE:
        raise ConfigError(f"{path} is no recipe: it has more than {LONGEST_RECIPE:,} bytes")
    return recipe_of(content, path, overrides)


def recipe_of(content: bytes, path: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe that a file at ``path`` with this content is. Raises ConfigError as `load_recipe` does."""
    try:
        settings = _yaml(content.decode())
    except YAML_ERRORS as error:
        raise ConfigError(f"{path} is not valid YAML: {_fault(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings; a recipe is a YAML mapping such as `run_dir: runs/demo`")
    _beside(path.parent, settings)
    for override in overrides or []:
        _apply(settings, override)
    _beside(Path(), settings)
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(e) for e in error.errors())) from error


def _beside(folder: Path, settings: dict[str, Any]) -> None:
    """Make absolute paths of the files of reward functions and of the chat template, which lie in ``folder``."""
    for name, key in (("reward", "function"), ("judge", "function"), ("gold", "function"), ("policy", "chat_template")):
        if not isinstance(section := settings.get(name), dict):
            continue
        given = section.get(key)
        if isinstance(given, str) and (given.endswith(".jinja") or is_file(given)) and not NOT_IN_TEXT.search(given):
            settings[name] = section | {key: str(folder.resolve() / given)}


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe with every default spelled out, as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, found {override!r}; for example --set rollout.k=16")
    try:
        value = _yaml(text)
    except YAML_ERRORS as error:
        raise ConfigError(f"--set {key}: {shown(text)} is not a YAML value: {_fault(error)}") from error
    *parents, last = key.split(".")
    place: Any = settings
    for depth, parent in enumerate([*parents, last]):
        if isinstance(place, list):
            if parent not in map(str, range(len(place))):
                raise ConfigError(f"--set {key}: {'.'.join(parents[:depth])} is a list of {len(place)}; use its number")
            step: Any = int(parent)
        elif isinstance(place, dict):
            step = parent
        else:
            raise ConfigError(f"--set {key}: {'.'.join(parents[:depth])} has no keys")
        if depth == len(parents):
            place[step] = value
        else:
            inner = {} if isinstance(place, dict) and place.get(step) is None else place[step]
            place[step] = copy(inner)  # a YAML alias may be shared by several keys, and only this one changes
            place = place[step]


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys and alias bombs, and gives the line of every error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if node is not None and node not in self._sizes:
            if node.end_mark is None:
                raise ComposerError(None, None, "an alias stands inside of what it repeats", node.start_mark)
            parts = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
                parts = list(chain.from_iterable(node.value))
            self._sizes[node] = 1 + sum(self._sizes[part] for part in parts)
            if self._sizes[node] > MOST_VALUES:
                said = f"more than {MOST_VALUES:,} values with all aliases written out"
                raise ComposerError(None, None, said, node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in NUMBERS and isinstance(node.value, str) and OLD_NUMBER.fullmatch(node.value):
            found = shown(node.value)
            said = f"{found} is another number in YAML 1.1 (0123 is octal, 1:30 is 90); write it in decimal digits"
            raise ConstructorError(None, None, said, node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:  # of the date 2024-13-01, !!bool x
            said = f"{shown(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, said, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > 63:
            raise ConstructorError(None, None, "a whole number of more than 64 bits", node.start_mark)
        return value


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[Any] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise ComposerError(None, None, f"the key {shown(key.value)} is given twice", key.start_mark)
            seen.add(key.value)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _fault(error: Exception) -> str:
    """Return what is wrong with YAML, with the line number if it is known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        said = " ".join(filter(None, (error.context, error.problem)))
        return f"line {error.problem_mark.line + 1}: {said}"
    return " ".join(str(error).split())


def _explain(error: ErrorDetails) -> str:
    """Say in one clause what is wrong with one key."""
    location = ".".join(str(part) for part in untagged(error["loc"]) if part != "[key]")
    match error["type"]:
        case "extra_forbidden":
            known = _keys_at(error["loc"][:-1])
            near = nearest(str(error["loc"][-1]), known)
            hint = f"did you mean `{near}`?" if near else f"known here: {', '.join(known)}"
            return f"unknown key `{location}`; {hint}"
        case "missing":
            return f"`{location}` is missing"
        case "union_tag_invalid" | "union_tag_not_found" if isinstance(error["input"], dict):
            choice = _choice_at(error["loc"])
            *others, last = map(repr, choice.kinds)
            given = error["input"][choice.key]
            asked = did_you_mean(str(given), choice.kinds, after="; ")
            return (
                f"`{location}.{choice.key}`: Input should be {', '.join(others)} or {last}, found {shown(given)}{asked}"
            )
        case "model_type" | "union_tag_not_found":
            return f"`{location}` takes settings: {', '.join(_keys_at(error['loc']))}{_found(error)}"
        case "string_pattern_mismatch":
            return f"`{location}`: a name has letters, digits, - and _ only"
        case "value_error":
            message = error["msg"].removeprefix("Value error, ")
            return f"`{location}`: {message}" if location else message
        case _:
            return f"`{location}`: {error['msg']}{_found(error)}"


def _found(error: ErrorDetails) -> str:
    return f", found {shown(error['input'])}" if isinstance(error["input"], (str, int, float, bool)) else ""


Location = tuple[int | str, ...]


def untagged(location: Location) -> Location:
    """Return the location of an error in a recipe, without the union tags that pydantic adds to it."""
    return tuple(part for part, _ in _walked(location) if part is not None)


def _keys_at(location: Location) -> list[str]:
    """Return the keys of the settings at ``location``."""
    *_, (_, place) = [(None, Recipe), *_walked(location)]
    if isinstance(place, OneOf):
        place = place.kinds[place.default]
    return list(place.model_fields)


def _choice_at(location: Location) -> OneOf:
    """Return the kinds of settings that are allowed at ``location``."""
    *_, (_, place) = _walked(location)
    assert isinstance(place, OneOf)
    return place


def _walked(location: Location) -> Iterator[tuple[int | str | None, Any]]:
    """Yield each part of a location, None for a union tag, with the settings at that place or their allowed kinds."""
    place: Any = Recipe
    for part in location:
        if isinstance(place, OneOf) and part in place.kinds:
            place = place.kinds[str(part)]
            yield None, place
            continue
        if fields := getattr(place, "model_fields", None):
            field = fields.get(part)
            place = None if field is None else _settings_in(field.annotation, field.metadata)
        else:  # the item type of list[Source] or dict[Name, …]
            place = _settings_in(next(iter(get_args(place)[-1:]), None))
        yield part, place


def _settings_in(annotation: Any, metadata: Sequence[Any] = ()) -> Any:
    """Return the settings class in an annotation, or its allowed kinds."""
    if choice := next((m for m in metadata if isinstance(m, OneOf)), None):
        return choice
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _settings_in(inner, more)
    return _settings_in(get_args(annotation)[0]) if isinstance(annotation, UnionType) else annotation  # Lora | None
