"""The lock of a run directory: one process at a time, and which process holds it."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from infalign.core.distributed import is_first
from infalign.core.errors import ConfigError, InfalignError
from infalign.core.storage import write_text
from infalign.pipeline.ownership import check_run_dir, mark

LOCK, HOLDER = ".lock", "holder.json"


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Create the run directory ``root``, lock it until the block ends, and mark it as a run's.

    The operating system releases the lock of a process that died. ``holder.json`` names the holder; the file of a dead
    process is overwritten. Blocks of one process may be nested, and in a distributed run only the first process takes
    the lock.

    Raises InfalignError that names the holder, and ConfigError if the directory cannot be created or written to or,
    before anything is written, if it is no run's.
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
        found = holder(root)
        by = describe(found) if found else "another process"
        raise InfalignError(
            f"the run directory {root} is in use by {by}; wait until it finishes, or choose another run_dir"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot create the run directory {root}: {error.strerror}; change run_dir") from error
    try:
        if lock.lock_counter == 1:
            mark(root)
            about = {
                "pid": os.getpid(),
                "began": _began(os.getpid()),
                "host": socket.gethostname(),
                "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            }
            write_text(root / HOLDER, json.dumps(about))
        yield
    finally:
        if not root.is_dir():
            raise InfalignError(f"the run directory {root} was moved or deleted; rerun with its new place as run_dir")
        if lock.lock_counter == 1:
            (root / HOLDER).unlink(missing_ok=True)
        lock.release()


def holder(root: Path) -> dict[str, str | int] | None:
    """Return pid, host, command and since of the process that holds a run directory, or None.

    A holder that crashed on this host is detected by its pid and, since pids are reused, by the start time of that
    process where the system gives it. For a holder on another host the file is trusted.
    """
    try:
        found: dict[str, str | int] = json.loads((root / HOLDER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if found["host"] == socket.gethostname():
        if found.get("began") not in (None, _began(int(found["pid"]))):
            return None
        try:
            os.kill(int(found["pid"]), 0)  # signal 0 only checks that the process exists
        except ProcessLookupError:
            return None
        except PermissionError:  # the process is alive and belongs to another user
            pass
    return found


def describe(found: dict[str, str | int]) -> str:
    """Return a description of the holder."""
    return f"process {found['pid']} on {found['host']} since {found['since']} ({found['command']})"


def _began(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None without a process or without ``/proc``."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return None
