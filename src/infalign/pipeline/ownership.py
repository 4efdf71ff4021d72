"""What of a directory is the run's own: one process at a time writes it, and nothing else is overwritten or removed."""

import os
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from infalign.core.distributed import is_first
from infalign.core.errors import ConfigError, InfalignError
from infalign.core.storage import write_text
from infalign.pipeline.records import record_path, records, started_path
from infalign.pipeline.units import Unit

MARKER, LOCK, HOLDER = ".infalign", ".lock", ".holder"
MARKED = "The directory of a run of infalign, which replaces and removes what it made here.\n"
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


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Create the run directory ``root``, lock it until the block ends, and mark it as a run's.

    The operating system releases the lock of a process that died. ``.holder`` names who took it last. Blocks of one
    process may be nested, and in a distributed run only the first process takes the lock. Raises InfalignError that
    names the holder, and ConfigError if the directory cannot be created or written to or, before anything is written,
    if it is no run's.
    """
    if not is_first():
        yield
        return
    lock = FileLock(root / LOCK, timeout=0, is_singleton=True)
    try:
        check_run_dir(root)
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        by = (root / HOLDER).read_text(encoding="utf-8") if (root / HOLDER).is_file() else "another process"
        raise InfalignError(
            f"the run directory {root} is in use by {by}; wait until it finishes, or choose another run_dir"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot create the run directory {root}: {error.strerror}; change run_dir") from error
    try:
        if lock.lock_counter == 1:
            check_run_dir(root)
            if not (root / MARKER).is_file():
                write_text(root / MARKER, MARKED)
            since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
            write_text(root / HOLDER, f"process {os.getpid()} on {socket.gethostname()} since {since} ({command})")
        yield
    finally:
        if not root.is_dir():
            raise InfalignError(f"the run directory {root} was moved or deleted; rerun with its new place as run_dir")
        lock.release()


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
