"""Work on a file from elsewhere, done first in a process whose memory and processor time end: a file can be a bomb.

The time is the processor's, so that a busy machine and a slow download change nothing.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from infalign.core.errors import ConfigError, DataError, InfalignError

GIGABYTES, SECONDS = "INFALIGN_MOST_GB", "INFALIGN_MOST_SECONDS"  # variables that change the limits
GIVEN = {GIGABYTES: 4.0, SECONDS: 60.0}
BYTES_A_SECOND = 1e7
POLL = 0.02  # seconds, in which a process can take some 100 MB more
PANIC = 70  # the exit code after an exception that Python code does not raise, such as a panic in Rust

Stamps = tuple[tuple[str, int, int], ...]


class BombError(InfalignError):
    """A file asks for more than the limits, or ends the process that reads it; the message goes on after its name."""


def rehearse(work: Callable[[str], Iterator[str]], path: str | Path) -> None:
    """Do ``work`` on a file in a process of its own; it yields what is read next, such as ``its tokenizer``.

    A large file has more time, as much as reading it takes.
    Raises BombError if that exceeds the limits or ends the process, and the ConfigError or DataError that it raises.
    Any other exception of it is no finding: whoever does the work for its result then says it better.
    What has passed is not done again in this process while its files and the limits stay the same.
    """
    _passes(work, str(path), _limit(GIGABYTES), _limit(SECONDS), _stamps(Path(path)))


@cache  # which keeps no exception
def _passes(work: Callable[[str], Iterator[str]], path: str, most_gb: float, seconds: float, stamps: Stamps) -> None:
    """Do the work once for files with these ``stamps``."""
    most_bytes = 1e9 * most_gb
    if Path(path).is_file():
        seconds += sum(size for _, size, _ in stamps) / BYTES_A_SECOND
    command = [sys.executable, "-P", "-m", __name__, str(seconds), work.__module__, work.__name__, path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
    with (
        TemporaryFile() as out,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL, env=environment
        ) as process,
    ):
        try:
            small = _stays_below(most_bytes, process)
        finally:
            process.kill()
        code = process.wait()
        out.seek(0)
        last = out.read().decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    if not small:
        raise BombError(f"{last} asks for more than {most_bytes / 1e9:g} GB of memory; if it is to, raise {GIGABYTES}")
    if code == -signal.SIGXCPU:
        raise BombError(f"{last} asks for more than {seconds:.0f} s of processor time; if it is to, raise {SECONDS}")
    kinds = {PANIC: BombError, ConfigError.exit_code: ConfigError, DataError.exit_code: DataError}
    if code in kinds:
        raise kinds[code](last)
    if code:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise BombError(f"{last} ends the process that reads it ({how})")


def _stamps(path: Path) -> Stamps:
    """Return the name, size and modification time of a file, or of each in a folder; of a hub's model nothing."""
    files = (file for file in (path, *path.rglob("*")) if file.is_file())
    return tuple((str(file), state.st_size, state.st_mtime_ns) for file in sorted(files) for state in [file.stat()])


def _limit(variable: str) -> float:
    """Return the limit that a variable sets, or the given one. Raises ConfigError for one that is no number."""
    try:
        limit = float(os.environ.get(variable, GIVEN[variable]))
    except ValueError:
        limit = 0.0
    if not 1 <= limit < float("inf"):
        raise ConfigError(f"the environment variable {variable} is a number of 1 or more; found {os.environ[variable]}")
    return limit


def _stays_below(most_bytes: float, process: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of a process, or until it has more memory, and return which."""
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if watched.memory_info().rss > most_bytes:
                return False
        time.sleep(POLL)
    return True


def main() -> None:
    """Do the work that the command line names under a limit of processor time, which outlives a killed parent."""
    seconds, module, name, path = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(float(seconds)), resource.getrlimit(resource.RLIMIT_CPU)[1]))
    doing = "it"
    print(doing, flush=True)
    try:
        for doing in getattr(import_module(module), name)(path):
            print(doing, flush=True)
    except (ConfigError, DataError) as error:
        print(error)
        sys.exit(error.exit_code)
    except Exception:
        return
    except BaseException as error:
        print(f"{doing} fails: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}")
        sys.exit(PANIC)


if __name__ == "__main__":
    main()
