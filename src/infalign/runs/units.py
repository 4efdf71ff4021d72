"""Units of work: what a stage declares, and the keys that say what made an output."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infalign.runs.layout import Summary

Extent = dict[str, dict[str, int]]


def nothing() -> str:
    """Return "": what an attempt leaves that cannot be continued."""
    return ""


def no_warnings() -> list[str]:
    """Return no warning."""
    return []


@dataclass(frozen=True)
class Unit:
    """A piece of work with its own output and its own record of what made it.

    ``inputs`` are outputs of other units. ``settings`` are what the output depends on, with the content of what they
    name; ``extent`` is how much is wanted: when only this changes, what is there is kept and extended.
    """

    stage: str
    name: str
    inputs: tuple[Path, ...]
    settings: dict[str, Any]
    output: Path
    work: Callable[..., Summary]  # called with ``on_progress=``
    extent: Extent = field(default_factory=dict)
    workspace: Path | None = None  # what an unfinished attempt leaves to continue from
    so_far: Callable[[], str] = nothing  # what an unfinished attempt has, in words, "" for nothing
    warnings: Callable[[], list[str]] = no_warnings  # before it is done
    only_adds: bool = False  # files, so that its record holds while it is extended
    clears: bool = False  # what it made before, and only once it can replace it


def needs(units: Sequence[Unit]) -> dict[str, tuple[str, ...]]:
    """Return for each unit the names of those whose outputs it takes."""
    by_output = {unit.output: unit.name for unit in units}
    return {unit.name: tuple(by_output[path] for path in unit.inputs) for unit in units}


def keys(units: Sequence[Unit]) -> dict[str, str]:
    """Return for each unit the hash of all that its output depends on; units come after those they need."""
    needed, found = needs(units), dict[str, str]()
    for unit in units:
        found[unit.name] = _key(unit, [found[name] for name in needed[unit.name]], unit.extent)
    return found


def bases(units: Sequence[Unit]) -> dict[str, str]:
    """Return what must stay the same for what is there to be continued: the keys, without what may be extended."""
    needed, whole, found = needs(units), keys(units), dict[str, str]()
    for unit in units:
        # A unit without an extent depends on all of its inputs; one that is extended on what these may keep.
        of_inputs = found if unit.extent else whole
        found[unit.name] = _key(unit, [of_inputs[name] for name in needed[unit.name]], {})
    return found


def _key(unit: Unit, of_inputs: Sequence[str], extent: Mapping[str, Any]) -> str:
    content = json.dumps([unit.name, unit.settings, extent, list(of_inputs)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
