"""The units of a run that are still to be done, and why."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from infalign.core.errors import DataError
from infalign.core.progress import NOTHING
from infalign.core.spelling import listed_names
from infalign.core.storage import flaws, read_record
from infalign.pipeline.records import Record, record_path, records, started_path
from infalign.pipeline.units import Unit, identify


@dataclass(frozen=True)
class Pending:
    """The state of a unit that is still to be done, and the reason; the reason is empty for a missing output."""

    state: Literal["missing", "partial", "stale"]
    because: str
    share: float = 0.0  # of its work that is done


def pending(wanted: Sequence[Unit], root: Path) -> dict[str, Pending]:
    """Return the units still to be done, each with its state and the reason.

    A unit is done when its output exists, the units it needs are done, and its record has the same settings, extent and
    keys of these units.
    """
    ids, made = identify(wanted), records(root)
    todo: dict[str, Pending] = {}
    for unit in wanted:
        needs, _, base = ids[unit.name]
        why, grown = list[str](), list[str]()
        if (record := made.get(unit.name)) is not None:
            why = list(_reasons(unit, record, root, {name: ids[name].key for name in needs}, todo))
            grown = list(changes(record["extent"], unit.extent))
            if not why and not grown:
                continue
        ready = not why and todo.keys().isdisjoint(needs)
        begun = ready and holds(started_path(root, unit.name), attempt(base, needs, root))
        so_far = unit.so_far() if begun and unit.so_far is not None else NOTHING
        if so_far.said:
            todo[unit.name] = Pending("partial", "; ".join([*grown, so_far.said]), so_far.share)
        elif record is None:
            todo[unit.name] = Pending("missing", "")
        else:
            todo[unit.name] = Pending("stale", "; ".join([*why, *grown]))
    return todo


def _reasons(
    unit: Unit, record: Record, root: Path, now: Mapping[str, str], todo: Mapping[str, Pending]
) -> Iterator[str]:
    """Yield why a record is stale, except for its extent; ``now`` has the current keys of the units it needs."""
    yield from changes(record["settings"], unit.settings)
    before = record["needs"]
    if waiting := [name for name in now if name in todo]:
        yield f"follows {listed_names(waiting)}"
    if again := [name for name in now if name not in todo and before.get(name, now[name]) != now[name]]:
        yield f"{listed_names(again)} was redone"
    if new := [name for name in now if name not in todo and name not in before]:
        yield f"now needs {listed_names(new)}"
    if gone := [name for name in before if name not in now]:
        yield f"no longer needs {listed_names(gone)}"
    if not unit.output.exists():
        yield "its output is missing"
    elif lost := [name for name in record["output"] if not (root / name).exists()]:
        yield f"{listed_names(lost)} is missing"


def check_outputs(units: Iterable[Unit], root: Path) -> None:
    """Raise DataError if an output of these units, as far as they are recorded, is not what was recorded."""
    made = records(root)
    for unit in units:
        for flaw in flaws(made[unit.name]["output"] if unit.name in made else {}, root):
            raise DataError(
                f"{root}: {flaw}, so it is no longer what {unit.name} made; delete it and rerun the recipe to make it "
                "again, or restore it from a copy"
            )


def reasons(todo: Mapping[str, Pending]) -> list[str]:
    """Return a line for each reason to redo or to continue units: ``again: train-aware (…)``."""
    names: dict[Pending, list[str]] = {}
    for name, status in todo.items():
        if status.state != "missing":
            names.setdefault(status, []).append(name)
    words = {"stale": "again", "partial": "continued"}
    return [f"{words[status.state]}: {', '.join(units)} ({status.because})" for status, units in names.items()]


def attempt(base: str, needs: Iterable[str], root: Path) -> str:
    """Return what identifies an attempt at a unit: its base, and what it reads of the units it needs, all done.

    Of an output that grows that is what its own attempt read: the rest is in the base. A model that was made again, by
    other libraries or on another machine, may be another one, so responses of the old one are not continued.
    """
    content = hashlib.blake2b(digest_size=16)
    for name in needs:
        record, started = record_path(root, name), started_path(root, name)
        made = read_record(record) if record.is_file() else None  # another process, or a cluster, has yet to write it
        grows = started.is_file() and (made is None or made["extent"])
        content.update((started.read_text() if grows else json.dumps(made and made["output"], sort_keys=True)).encode())
    return f"{base} {content.hexdigest()}"


def holds(path: Path, text: str) -> bool:
    """Return whether a file has this text."""
    return path.is_file() and path.read_text() == text


def changes(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield the differences between two settings, one clause each: ``rollout.k 6 → 10``.

    >>> list(changes({"rollout": {"k": 6}, "seed": 0}, {"rollout": {"k": 10}, "seed": 0}))
    ['rollout.k 6 → 10']
    """
    if before == now:
        return
    if _is_content(before) and _is_content(now) and before.get("name") == now.get("name"):
        named = f" ({now['name']})" if "name" in now else ""
        yield f"the content of {key}{named} {'changed' if now['content'] else 'is not found'}"
    elif isinstance(before, dict) and isinstance(now, dict) and not _is_content(before) and not _is_content(now):
        for inner in before | now:
            yield from changes(before.get(inner), now.get(inner), f"{key}.{inner}" if key else inner)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, pair in enumerate(zip(before, now, strict=True)):
            yield from changes(*pair, f"{key}.{place}")
    else:
        yield f"{key} {_shown(before)} → {_shown(now)}"


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _shown(value: Any) -> str:
    if _is_content(value):
        return str(value.get("name", "a local one"))
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
