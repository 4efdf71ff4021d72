"""Start an inference server from its own environment for as long as it is needed."""

import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce

from infalign.core.errors import ConfigError, PartialError
from infalign.core.memory import free_memory

START_SECONDS = 1800.0  # seconds; a large model takes minutes to load
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
KEY_STATUSES = 401, 403  # a server with a key is ready too
STOP_SECONDS = 5.0  # seconds; less than the time that a stopped worker itself has


@contextmanager
def serving(command: str | None, model: str, url: str) -> Iterator[str]:
    """Yield the URL of a server for ``model``: the one at ``url``, or one that ``command`` starts.

    In the command ``{model}``, ``{port}`` and ``{seed}`` are filled in, with a new seed at every start: otherwise vLLM
    starts with the same random stream, and later samples would repeat earlier ones. The command runs without a shell
    and is stopped afterwards with all processes that it started. On Linux the server also ends with this thread, so
    that a run that was killed leaves the GPU's memory to the next. Raises ConfigError if the command cannot be started,
    PartialError if the server ends or does not answer within half an hour. What this process keeps of a GPU's memory
    for later is given back first.
    """
    if command is None:
        yield url
        return
    free_memory()
    port = _free_port()
    values = {"{model}": model, "{port}": str(port), "{seed}": str(secrets.randbelow(2**31))}
    words = [reduce(lambda text, name: text.replace(name, values[name]), values, w) for w in shlex.split(command)]
    try:
        process = subprocess.Popen(words, start_new_session=True, preexec_fn=_end_with_parent)
    except OSError as error:
        raise ConfigError(f"rollout.engine.command: {words[0]} cannot be started: {error.strerror}") from error
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url)
        yield url
    finally:
        _stop(process)


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


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    import httpx2

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PartialError(
                f"the server ended with exit code {process.returncode} before it answered; see its output"
            )
        try:
            answer = httpx2.get(f"{url}/v1/models", timeout=5.0)
            if answer.is_success or answer.status_code in KEY_STATUSES:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.5)
    raise PartialError(f"the server at {url} did not answer within {START_SECONDS / 60:.0f} minutes")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
