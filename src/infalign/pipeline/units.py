"""Units of work, and the keys that identify how an output was made."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from infalign.core.progress import NOTHING, SoFar

Summary = dict[str, Any]  # what a unit says of its output, in JSON's types
Extent = dict[str, dict[str, int]]


def nothing() -> SoFar:
    """Return that an unfinished attempt leaves nothing to continue."""
    return NOTHING


def no_warnings() -> list[str]:
    """Return no warnings."""
    return []


def no_cost(counts: Any) -> None:
    """Return that nothing is computed that a plan could count."""


@dataclass(frozen=True)
class Unit:
    """A piece of work with its own output and its own record of how that was made.

    ``inputs`` are outputs of other units, which go first. ``settings`` are all settings that the output depends on,
    with content hashes for paths; ``extent`` is the amount of output: when only this changes, the existing output is
    kept and extended.
    """

    stage: str
    kind: str  # of work; a kind and its subject are unique
    subject: str = ""  # what it is about, such as a model's name
    _: KW_ONLY
    inputs: tuple[Path, ...]
    settings: dict[str, Any]
    output: Path
    work: Callable[..., Summary]  # called with ``on_progress=``
    extent: Extent = field(default_factory=dict)
    workspace: Path | None = None  # where an unfinished attempt keeps its checkpoints
    so_far: Callable[[], SoFar] = nothing  # the partial output
    warnings: Callable[[], list[str]] = no_warnings  # shown before the unit runs
    only_adds: bool = False  # it only adds files, so its record stays valid while the output is extended
    together: bool = False  # all processes of a distributed training do it, others the first alone
    clears: bool = False  # it removes its old output itself, once it can replace that
    cost: Callable[[Any], Any] = no_cost  # by a plan's counts, if the whole of it is to be done

    @property
    def name(self) -> str:
        """The kind and the subject: ``train-aware``."""
        return f"{self.kind}-{self.subject}" if self.subject else self.kind


def needs(units: Sequence[Unit]) -> dict[str, tuple[str, ...]]:
    """Return for each unit the names of the units whose outputs it reads, and which go first."""
    by_output = {unit.output: unit.name for unit in units}
    return {unit.name: tuple(by_output[path] for path in unit.inputs) for unit in units}


def keys(units: Sequence[Unit]) -> dict[str, str]:
    """Return for each unit the hash of all that its output depends on; units come after those they need."""
    needed, found = needs(units), dict[str, str]()
    for unit in units:
        found[unit.name] = _key(unit, [found[name] for name in needed[unit.name]], unit.extent)
    return found


def bases(units: Sequence[Unit]) -> dict[str, str]:
    """Return for each unit the key under which a partial output can be continued; it omits the extent."""
    needed, whole, found = needs(units), keys(units), dict[str, str]()
    for unit in units:
        # A unit without an extent depends on the full keys of its inputs, a unit with one only on their bases.
        of_inputs = found if unit.extent else whole
        found[unit.name] = _key(unit, [of_inputs[name] for name in needed[unit.name]], {})
    return found


def _key(unit: Unit, of_inputs: Sequence[str], extent: Mapping[str, Any]) -> str:
    content = json.dumps([unit.name, _without_none(unit.settings), extent, list(of_inputs)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _without_none(settings: Any) -> Any:
    """Return settings without those that are None, so that an option that did not exist is one that was not given."""
    if isinstance(settings, dict):
        return {name: _without_none(value) for name, value in settings.items() if value is not None}
    return [_without_none(value) for value in settings] if isinstance(settings, list) else settings
