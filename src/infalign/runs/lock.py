"""One process at a time in a run directory, and who it is."""

import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from infalign.distributed import is_first
from infalign.errors import ConfigError, InfalignError
from infalign.storage import write_text

LOCK, HOLDER = ".lock", "holder.json"


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Make the run directory ``root`` and hold it: until the block ends no other process gets it.

    The lock is the operating system's, so a process that died holds nothing. ``holder.json`` says who holds it; what a
    dead process left behind is overwritten. Blocks of one process may be nested, and of a distributed run only the
    first process takes the lock. A directory that was made here and stayed empty is removed again.

    Raises InfalignError that names the holder, and ConfigError if the directory cannot be made or written to.
    """
    if not is_first():
        yield
        return
    lock = FileLock(root / LOCK, timeout=0, is_singleton=True)
    try:
        made = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InfalignError(
            f"the run directory {root} is in use{_by(root)}; wait until it ends, or choose another run_dir"
        ) from None
    except OSError as error:
        raise ConfigError(f"the run directory {root} cannot be made: {error.strerror}; change run_dir") from error
    try:
        if lock.lock_counter == 1:
            write_text(root / HOLDER, json.dumps(_self()))
        yield
    finally:
        if lock.lock_counter == 1:
            (root / HOLDER).unlink(missing_ok=True)
            if made and [path.name for path in root.iterdir()] == [LOCK]:
                shutil.rmtree(root)
        lock.release()


def holder(root: Path) -> dict[str, str | int] | None:
    """Return pid, host, command and since of the process that holds a run directory, None if none does.

    One that died on this host without a word is told by its pid and, where the system tells, by when that process
    began, for pids come again; of another host the file is believed.
    """
    try:
        found: dict[str, str | int] = json.loads((root / HOLDER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if found["host"] == socket.gethostname():
        if found.get("began") not in (None, _began(int(found["pid"]))):
            return None
        try:
            os.kill(int(found["pid"]), 0)  # sends nothing
        except ProcessLookupError:
            return None
        except PermissionError:  # somebody else's, and alive
            pass
    return found


def describe(found: dict[str, str | int]) -> str:
    """Return a holder in words."""
    return f"process {found['pid']} on {found['host']} since {found['since']} ({found['command']})"


def _by(root: Path) -> str:
    found = holder(root)
    return f" by {describe(found)}" if found else " by another process"


def _began(pid: int) -> int | None:
    """Return when a process began, in ticks since the system did; None if there is none or the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return None


def _self() -> dict[str, str | int | None]:
    return {
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "host": socket.gethostname(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }
