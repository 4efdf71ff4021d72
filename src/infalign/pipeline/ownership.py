"""What of a directory is the run's own: nothing else is ever overwritten or removed."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from infalign.core.errors import ConfigError
from infalign.pipeline.records import record_path, records, started_path
from infalign.pipeline.units import Unit

MARKER = ".infalign"
SHARDS = "part-[0-9]*.parquet"  # what a unit that only adds may have written since its record


def check_run_dir(root: Path) -> None:
    """Raise ConfigError unless ``root`` is a run's directory or can become one: absent, empty, or with hidden files.

    A run's directory has the `MARKER`, and can be written to.
    """
    there = next(place for place in (root, *root.absolute().parents) if os.path.lexists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not writable" if there.is_dir() else "is not a folder"
        raise ConfigError(f"cannot create the run directory {root}: {there} {what}; change run_dir")
    if there != root:
        return
    entry = min((path for path in root.iterdir() if not path.name.startswith(".")), default=None)
    # In this order: another process that starts here now writes the marker before anything visible.
    if entry is not None and not (root / MARKER).is_file():
        raise ConfigError(
            f"run_dir is {root}, which is not a run directory: it contains {entry.name}, and a run replaces and "
            "removes files in its directory; choose a new or an empty one"
        )


def check_inputs(inputs: Iterable[Path], wanted: Sequence[Unit]) -> None:
    """Raise ConfigError if one of the files that a recipe names lies where a unit writes, links resolved."""
    places = {place.resolve(): place for unit in wanted for place in _places(unit)}
    for file in inputs:
        for folder in (file, *file.parents):
            if folder in places:
                raise ConfigError(
                    f"the recipe reads {file}, which the run itself would replace or remove ({places[folder]}); use "
                    "a copy of it elsewhere, or choose another run_dir"
                )


def check_outputs_free(wanted: Iterable[Unit], root: Path) -> None:
    """Raise ConfigError if a file that the run did not make lies where one of the units will write.

    Records list what finished units made, some of them in another's folder, as a policy's card is. What an unfinished
    one left is the run's: it starts in an empty place.
    """
    for unit in wanted:
        files: list[Path] = []
        if record_path(root, unit.name).is_file():
            files = [file for file in _files(unit.output) if not (unit.only_adds and file.match(SHARDS))]
        elif not started_path(root, unit.name).is_file():
            files = [file for place in _places(unit) for file in _files(place)]
        made = {root / name for record in records(root).values() for name in record["output"]} if files else set()
        if foreign := [file for file in files if file not in made]:
            raise ConfigError(
                f"{foreign[0]} was not made by this run, but {unit.name} would replace it; move it elsewhere, or "
                "choose another run_dir"
            )


def _places(unit: Unit) -> list[Path]:
    return [unit.output] if unit.workspace is None else [unit.output, unit.workspace]


def _files(place: Path) -> list[Path]:
    """Return the files in a place, without hidden ones, which killed processes, desktops and file systems leave."""
    paths = place.rglob("*") if place.is_dir() else [place]
    return sorted(path for path in paths if (path.is_file() or path.is_symlink()) and not path.name.startswith("."))
