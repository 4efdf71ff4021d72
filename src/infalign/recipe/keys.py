"""Every key of a recipe with its type, default and meaning, as the settings themselves say it.

``python -m infalign.recipe.keys`` prints the page `docs/recipe.md`.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import PlainValidator
from pydantic.fields import FieldInfo

from infalign.core.errors import ConfigError
from infalign.core.settings import OneOf, Settings
from infalign.core.spelling import nearest
from infalign.recipe.settings import Recipe

NAME, NUMBER = "NAME", "N"  # stand for the name of a policy, and for the place in a list
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
INTRODUCTION = """\
# Keys of a recipe

*Written by `python -m infalign.recipe.keys` from the settings; `infalign recipes --explain KEY` says the same.*

A recipe is YAML; `--set KEY=VALUE` changes any key. NAME is the name of a policy, N a place in a list, counted from 0.
Keys whose default is *none* may be left out.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key: its type, default and meaning; ``kinds`` are the solvers or engines that take it, () for all."""

    path: tuple[str, ...]
    type: str
    default: str | None  # None: it has to be given
    meaning: str
    kinds: tuple[str, ...] = ()
    section: bool = False  # whether it holds other keys

    @property
    def name(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def facts(self) -> str:
        """Type, default and the kinds that take it, in words."""
        default = "has to be given" if self.default is None else f"default {self.default}"
        return "; ".join([self.type, default, *([f"of {', '.join(self.kinds)}"] if self.kinds else [])])


def all_keys() -> list[Key]:
    """Return all keys of a recipe, each section before the keys that it holds."""
    return list(_keys(Recipe, ()))


def explained(key: str) -> list[Key]:
    """Return what ``key`` means, and the keys that it holds.

    A policy may have any name and a place in a list any number. Raises ConfigError for a key that no recipe has.
    """
    keys, wanted = all_keys(), tuple(key.split("."))
    found = [known for known in keys if _matches(wanted, known.path)]
    found += [known for known in keys if _matches(wanted, known.path[:-1])]
    if not found:
        *around, last = wanted
        anywhere = {known.path[-1]: known.name for known in reversed(keys)}
        beside = {known.path[-1]: known.name for known in keys if _matches(around, known.path[:-1])}
        near = [names[word] for names in (beside, anywhere) if (word := nearest(last, list(names)))]
        hint = next(iter([anywhere[last]] if last in anywhere else near), None)
        said = f"did you mean {hint}?" if hint else f"a recipe has {', '.join(Recipe.model_fields)}"
        raise ConfigError(f"no recipe has the key {key}; {said}")
    return found


def reference() -> str:
    """Return the page of all keys, a table for each section."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for known in all_keys():
        rows.setdefault(known.path[:-1], []).append(_row(known))
    sections: dict[tuple[str, ...], list[str]] = {}  # those with the same keys share a table
    for path, table in rows.items():
        sections.setdefault(tuple(table), []).append(".".join(path))
    lines = [INTRODUCTION]
    for keys, names in sections.items():
        title = ", ".join(f"`{name}`" for name in names if name) or "The recipe"
        lines += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *keys, ""]
    return "\n".join(lines)


def _row(known: Key) -> str:
    default = "**required**" if known.default is None else known.default
    only = f" ({', '.join(known.kinds)})" if known.kinds else ""
    cells = (f"`{known.path[-1]}`", known.type, default, known.meaning + only)
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def _matches(given: Sequence[str], path: Sequence[str]) -> bool:
    return len(given) == len(path) and all(
        ours in (theirs, NAME) or (ours == NUMBER and theirs.isdigit())
        for theirs, ours in zip(given, path, strict=True)
    )


def _keys(settings: type[Settings], path: tuple[str, ...]) -> Iterator[Key]:
    for name, field in settings.model_fields.items():
        yield from _of_field((*path, name), field)


def _of_field(path: tuple[str, ...], field: FieldInfo) -> Iterator[Key]:
    inner, places = _inner(field.annotation, field.metadata)
    metadata = [*field.metadata, *inner[1]]
    choice = next((m for m in metadata if isinstance(m, OneOf)), None)
    holds = isinstance(inner[0], type) and issubclass(inner[0], Settings)
    section = choice is not None or holds
    meaning = field.description or (_docstring(inner[0]) if holds else "")
    words = _list_words(places, "settings") if section else _list_words(places, _type(inner[0], metadata))
    yield Key(path, words, _default(field), meaning, section=section)
    if choice is not None:
        yield from _of_kinds(choice, path + places)
    elif holds:
        yield from _keys(inner[0], path + places)


def _of_kinds(choice: OneOf, path: tuple[str, ...]) -> Iterator[Key]:
    """Yield the keys of all kinds of settings: one that differs between kinds comes once for each of its meanings."""
    about = "; ".join(f"{kind}: {_docstring(settings)}" for kind, settings in choice.kinds.items())
    yield Key((*path, choice.key), " | ".join(choice.kinds), choice.default, about)
    found: dict[Key, list[str]] = {}
    for kind, settings in choice.kinds.items():
        for known in _keys(settings, path):
            if known.path[-1] != choice.key or len(known.path) != len(path) + 1:
                found.setdefault(known, []).append(kind)
    order = [known.path for known in found]
    for known, kinds in sorted(found.items(), key=lambda item: order.index(item[0].path)):
        everywhere = len(kinds) == len(choice.kinds) or len(known.path) > len(path) + 1  # its section says where it is
        yield replace(known, kinds=() if everywhere else tuple(kinds))


def _inner(annotation: Any, metadata: Sequence[Any]) -> tuple[tuple[Any, list[Any]], tuple[str, ...]]:
    """Return the type inside of optional, annotated, list and dict, with its metadata, and the places around it."""
    found: list[Any] = list(metadata)
    if any(isinstance(m, (OneOf, PlainValidator)) for m in found):
        return (annotation, []), ()
    if get_origin(annotation) is Annotated:
        inside, *more = get_args(annotation)
        flat = [n for m in more for n in (m.metadata if isinstance(m, FieldInfo) else [m])]
        (kind, deeper), places = _inner(inside, flat)
        return (kind, [*flat, *deeper]), places
    if get_origin(annotation) in (Union, UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return _inner(options[0], []) if len(options) == 1 else ((annotation, []), ())
    if get_origin(annotation) is list:
        inside, places = _inner(get_args(annotation)[0], [])
        return inside, (NUMBER, *places)
    if get_origin(annotation) is dict:
        inside, places = _inner(get_args(annotation)[1], [])
        return inside, (NAME, *places)
    return (annotation, []), ()


def _list_words(places: tuple[str, ...], words: str) -> str:
    for place in places:
        words = f"list of {words}" if place == NUMBER else f"{words} by name"
    return words


def _type(kind: Any, metadata: Sequence[Any]) -> str:
    if get_origin(kind) is tuple:  # of URLs, of which one may stand alone
        return f"{_type(get_args(kind)[0], [])}, or list of it"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    words = "text" if any(isinstance(m, PlainValidator) for m in metadata) else WORDS.get(kind, str(kind))
    limits = [
        f"{sign} {getattr(m, attribute):,}"
        for limit, (attribute, sign) in SIGNS.items()
        for m in metadata
        if isinstance(m, limit)
    ]
    return " ".join([words, *([" and ".join(limits)] if limits else [])])


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, Settings):
        return "as below"
    if isinstance(value, str):
        return value
    return str(value.name) if hasattr(value, "name") else json.dumps(value)


def _docstring(settings: type) -> str:
    """Return the first paragraph of a class's docstring, without its full stop."""
    return inspect.cleandoc(settings.__doc__ or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")


if __name__ == "__main__":
    print(reference(), end="")
