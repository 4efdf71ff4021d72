"""Units of work, and the keys that identify how an output was made."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from infalign.core.progress import SoFar

Summary = dict[str, Any]  # what a unit says of its output, in JSON's types


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
    extent: dict[str, dict[str, int]] = field(default_factory=dict)
    workspace: Path | None = None  # where an unfinished attempt keeps its checkpoints
    so_far: Callable[[], SoFar] | None = None  # the partial output
    only_adds: bool = False  # it only adds files, so its record stays valid while the output is extended
    together: bool = False  # all processes of a distributed training do it, others the first alone
    clears: bool = False  # it removes its old output itself, once it can replace that
    passes: Sequence[Any] = ()  # of texts through models, by which a plan tells the time

    @property
    def name(self) -> str:
        """The kind and the subject: ``train-aware``."""
        return f"{self.kind}-{self.subject}" if self.subject else self.kind


class Identity(NamedTuple):
    """The units that a unit needs, whose outputs it reads, and hashes of all that its own output depends on.

    Under the ``base``, which omits the extent, a partial output can be continued.
    """

    needs: tuple[str, ...]
    key: str
    base: str


def identify(units: Sequence[Unit]) -> dict[str, Identity]:
    """Return the identity of each unit; units come after those they need."""
    by_output, ids = {unit.output: unit.name for unit in units}, dict[str, Identity]()
    for unit in units:
        needs = tuple(by_output[path] for path in unit.inputs)
        keys, bases = ([getattr(ids[name], part) for name in needs] for part in ("key", "base"))
        # A unit without an extent depends on the full keys of its inputs, a unit with one only on their bases.
        base = _key(unit, bases if unit.extent else keys, {})
        ids[unit.name] = Identity(needs, _key(unit, keys, unit.extent), base)
    return ids


def _key(unit: Unit, of_inputs: Sequence[str], extent: Mapping[str, Any]) -> str:
    content = json.dumps([unit.name, _without_none(unit.settings), extent, list(of_inputs)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _without_none(settings: Any) -> Any:
    """Return settings without those that are None, so that an option that did not exist is one that was not given."""
    if isinstance(settings, dict):
        return {name: _without_none(value) for name, value in settings.items() if value is not None}
    return [_without_none(value) for value in settings] if isinstance(settings, list) else settings
