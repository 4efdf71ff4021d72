"""Start an inference server from its own environment for as long as it is needed."""

import ctypes
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from infalign.core.errors import ConfigError, PartialError
from infalign.core.memory import free_memory

START_SECONDS = 1800.0  # seconds; a large model takes minutes to load
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
KEY_STATUSES = 401, 403  # a server with a key is ready too
TAIL_BYTES = 200_000  # of a server's output, that are searched for what it died of
TAIL_LINES = 6
FAULT = re.compile(r"[\w.]*(?:Error|Exception|error|fatal): .*")  # in a line that says why
LOGGER = logging.getLogger(__name__)
STOP_SECONDS = 5.0  # seconds; less than the time that a stopped worker itself has


@dataclass(frozen=True, slots=True)
class Started:
    """A server that was started here; what it prints goes to ``log``."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise PartialError, with the last lines that tell why, if the server has ended."""
        if self.process.poll() is None:
            return
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = [line for text in file.read().decode(errors="replace").splitlines() if (line := text.strip())]
        faults = (FAULT.search(line) for line in lines if "WARNING" not in line)
        said = [*dict.fromkeys(fault[0] for fault in faults if fault)] or lines
        last = " | ".join(line[:300] for line in said[-TAIL_LINES:]) or "it printed nothing"
        raise PartialError(
            f"the server started by rollout.engine.command ended with exit code {self.process.returncode}: {last}; "
            f"see its output in {self.log}. Finished work is kept: fix the command, then rerun the same command"
        )


@contextmanager
def serving(command: str, model: str, dtype: str) -> Iterator[Started]:
    """Yield a server for ``model`` that ``command`` starts.

    In the command ``{model}``, ``{port}``, ``{dtype}`` and ``{seed}`` are filled in, with a new seed at every start:
    otherwise vLLM starts with the same random stream, and later samples would repeat earlier ones. The command runs
    without a shell and is stopped afterwards with all processes that it started. On Linux the server also ends with
    this thread, so that a run that was killed leaves the GPU's memory to the next. What it prints goes to a file that
    stays only if the server fails. Raises ConfigError if the command cannot be started, PartialError if the server ends
    or does not answer within half an hour. What this process keeps of a GPU's memory for later is given back first.
    """
    free_memory()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # is free
    values = {"{model}": model, "{port}": str(port), "{dtype}": dtype, "{seed}": str(secrets.randbelow(2**31))}
    words = [reduce(lambda text, name: text.replace(name, values[name]), values, w) for w in shlex.split(command)]
    with tempfile.NamedTemporaryFile(prefix="infalign-server-", suffix=".log", delete=False) as output:
        try:
            process = subprocess.Popen(
                words, stdout=output, stderr=output, start_new_session=True, preexec_fn=_end_with_parent
            )
        except OSError as error:
            Path(output.name).unlink()
            raise ConfigError(f"rollout.engine.command: cannot start {words[0]}: {error.strerror}") from error
    started = Started(f"http://127.0.0.1:{port}", process, Path(output.name))
    LOGGER.warning("starting %s, which may take minutes; its output goes to %s", words[0], started.log)
    try:
        _wait_until_ready(started)
        yield started
    finally:
        well = process.poll() is None and not isinstance(sys.exception(), PartialError)
        _stop(process)
        if well:
            started.log.unlink()


_libc = ctypes.CDLL(None)  # loaded here, as a forked process must not load anything


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)  # also kills processes that the server left running
    process.wait()


def _wait_until_ready(started: Started) -> None:
    import httpx2

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        started.check()
        try:
            answer = httpx2.get(f"{started.url}/v1/models", timeout=5.0, trust_env=False)  # no proxy
            if answer.is_success or answer.status_code in KEY_STATUSES:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.5)
    raise PartialError(
        f"the server at {started.url} did not answer within {START_SECONDS / 60:.0f} minutes; see {started.log}"
    )
