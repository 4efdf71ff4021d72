"""The JSON schema of a recipe, and its keys with type, default and meaning, as the schema has them.

``python -m infalign.recipe.schema docs`` writes the page `keys.md` and, for editors, `recipe.schema.json`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean
from infalign.core.storage import write_text
from infalign.recipe.settings import Recipe

Node = dict[str, Any]
NAME, NUMBER = "NAME", "N"  # stand for the name of a policy, and for the place in a list
WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
WORDS |= {"object": "mapping"}
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
INTRODUCTION = """\
# Keys of a recipe

*Written by `python -m infalign.recipe.schema docs` from the settings; `infalign recipes --explain KEY` says the same.*

A recipe is YAML; `--set KEY=VALUE` changes any key. NAME is the name of a policy, N a place in a list, counted from 0.
Keys whose default is *none* may be left out. Sections share a table for the keys that they have in common. An editor
with a YAML language server completes and checks keys by [recipe.schema.json](recipe.schema.json).
"""


class _Generator(GenerateJsonSchema):
    """A generator that gives the default of a setting with a spelling as its spelling."""

    def encode_default(self, dft: Any) -> Any:
        return dft.name if hasattr(dft, "name") else super().encode_default(dft)


@cache
def json_schema() -> Node:
    """Return the JSON schema of a recipe."""
    return Recipe.model_json_schema(schema_generator=_Generator)


@dataclass(frozen=True, slots=True)
class Key:
    """A key: its type, default and meaning; ``kinds`` are the solvers or engines that take it, () for all."""

    path: tuple[str, ...]
    type: str
    default: str | None  # None: it has to be given
    meaning: str
    kinds: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def facts(self) -> str:
        """Type, default and the kinds that take it, in words."""
        default = "required" if self.default is None else f"default {self.default}"
        return "; ".join([self.type, default, *([f"of {', '.join(self.kinds)}"] if self.kinds else [])])


def all_keys() -> list[Key]:
    """Return all keys of a recipe, each section before the keys that it holds."""
    return list(_keys(json_schema(), ()))


def keys_named(words: str) -> list[Key]:
    """Return the keys that contain ``words``, which may name a policy; ConfigError, with a near name, if none does."""
    keys = all_keys()
    any_of = {known: ".".join("*" if part in (NAME, NUMBER) else part for part in known.path) for known in keys}
    if not (matches := [known for known in keys if words in known.name or fnmatchcase(words, any_of[known])]):
        hint = did_you_mean(words.rpartition(".")[2], [known.path[-1] for known in keys], after="; ")
        raise ConfigError(f"no recipe key contains {words}{hint or '; docs/keys.md lists all keys'}")
    return matches


def reference() -> str:
    """Return the page of all keys: a table for each group of sections, with the keys that they alone share."""
    sections: dict[str, list[str]] = {}
    for known in all_keys():
        sections.setdefault(_row(known), []).append(".".join(known.path[:-1]))
    tables: dict[tuple[str, ...], list[str]] = {}
    for row, holders in sections.items():
        tables.setdefault(tuple(holders), []).append(row)
    lines = [INTRODUCTION]
    for names, rows in tables.items():
        title = ", ".join(f"`{name}`" for name in names if name) or "The recipe"
        lines += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(known: Key) -> str:
    default = "**required**" if known.default is None else known.default
    only = f" ({', '.join(known.kinds)})" if known.kinds else ""
    cells = (f"`{known.path[-1]}`", known.type, default, known.meaning + only)
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def _keys(section: Node, path: tuple[str, ...]) -> Iterator[Key]:
    """Yield the keys of an object of the schema, each before those that it holds."""
    for name, field in section["properties"].items():
        inner, places = _inside(field)
        kinds = _kinds(inner)
        is_section = bool(kinds) or "properties" in inner
        words = "settings" if is_section else _type(inner)
        for place in places:
            words = f"list of {words}" if place == NUMBER else f"{words} by name"
        default = None if name in section.get("required", ()) else _default(field, is_section and not places)
        yield Key((*path, name), words, default, field.get("description") or _about(inner))
        if kinds:
            yield from _keys_of_kinds(kinds, (*path, name, *places))
        elif is_section:
            yield from _keys(inner, (*path, name, *places))


def _keys_of_kinds(kinds: dict[str, Node], path: tuple[str, ...]) -> Iterator[Key]:
    """Yield the keys of all kinds of settings: one that differs between kinds comes once for each of its meanings."""
    key = _discriminator([*kinds.values()])
    default = next((kind for kind, node in kinds.items() if "default" in node["properties"][key]), None)
    about = "; ".join(f"{kind}: {_about(node)}" for kind, node in kinds.items())
    yield Key((*path, key), " | ".join(kinds), default, about)
    kinds_of: dict[Key, list[str]] = {}
    for kind, node in kinds.items():
        for known in _keys(node, path):
            if known.path != (*path, key):
                kinds_of.setdefault(known, []).append(kind)
    order = [known.path for known in kinds_of]
    for known, of in sorted(kinds_of.items(), key=lambda item: order.index(item[0].path)):
        everywhere = len(of) == len(kinds) or len(known.path) > len(path) + 1  # its section says where it is
        yield replace(known, kinds=() if everywhere else tuple(of))


def _inside(node: Node) -> tuple[Node, tuple[str, ...]]:
    """Return what is inside of optional, list, mapping and reference, and the places around it."""
    if "$ref" in node:
        return _inside(json_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        return _inside(options[0])
    by_name: Node = next(iter(node.get("patternProperties", {}).values()), {})
    for place, held in ((NUMBER, node.get("items", {})), (NAME, by_name)):
        if held:
            inner, places = _inside(held)
            return inner, (place, *places)
    return node, ()


def _kinds(node: Node) -> dict[str, Node]:
    """Return the kinds of settings that a node allows, by what tells them apart; {} for another node."""
    options = [_inside(option)[0] for option in node.get("anyOf", ()) if "$ref" in option]
    key = _discriminator(options) if options else ""
    return {option["properties"][key]["const"]: option for option in options}


def _discriminator(kinds: list[Node]) -> str:
    properties: Node = kinds[0]["properties"]
    return next(name for name, field in properties.items() if "const" in field)


def _type(node: Node) -> str:
    if "anyOf" in node:  # one text, or several
        first, second, *_ = node["anyOf"]
        if "const" in second:
            return f"{_type(first)}, or {second['const']}"
        return f"{_type(first)}, or {'mapping' if second['type'] == 'object' else 'list of it'}"
    if "enum" in node:
        return " | ".join(node["enum"])
    limits = [f"{sign} {node[limit]:,}" for limit, sign in SIGNS.items() if limit in node]
    return " ".join([WORDS[node["type"]], *([" and ".join(limits)] if limits else [])])


def _default(field: Node, section: bool) -> str:
    value = field.get("default")
    if value is None:
        return "none"
    return "as below" if section else value if isinstance(value, str) else json.dumps(value)


def _about(node: Node) -> str:
    """Return the first paragraph of what a section is, without its full stop."""
    return str(node.get("description", "")).partition("\n\n")[0].replace("\n", " ").rstrip(".")


def main(folder: str) -> None:
    """Write the page of all keys and the schema to a folder."""
    write_text(Path(folder) / "keys.md", reference())
    write_text(Path(folder) / "recipe.schema.json", json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
