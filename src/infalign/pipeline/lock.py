"""The lock of a run directory: one process at a time."""

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
from infalign.pipeline.ownership import MARKER, check_run_dir

LOCK, HOLDER = ".lock", ".holder"
MARKED = "The directory of a run of infalign, which replaces and removes what it made here.\n"


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
