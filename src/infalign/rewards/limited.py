"""Reward functions with a time limit: each response is checked alone, in another process, which can be ended."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import update_wrapper
from importlib import import_module
from inspect import isawaitable, signature
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from infalign.core.errors import InfalignError
from infalign.core.user_code import import_function, user_code
from infalign.method.by_name import OWN, TRL, VERL, ByName, awaited, unlogged
from infalign.method.reward import one_for_each

LOGGER = logging.getLogger(__name__)
SECONDS = 5.0  # for a response, by default: comparing two numbers may need more digits than there is memory
START_WITHIN = 300.0  # seconds until the other process has imported the function
LATE = object()  # what is found where there was no answer
PROGRAM = """\
import sys
sys.path[:] = {path!r}
from infalign.rewards import limited
limited.work({spec!r}, {needs!r}, {pipe})
"""


@dataclass(eq=False)
class Limited:
    """A reward function that has ``seconds`` for each response, in a process that imports it as ``spec``.

    A response that takes longer, or that ends the process, gets the reward 0; a warning says how many do. The
    process imports ``needs`` before the time counts, and what it prints goes to stderr. Raises what the function
    raises, as InfalignError.
    """

    function: Callable[..., Any]
    spec: str
    seconds: float
    needs: str = __name__

    def __post_init__(self) -> None:
        update_wrapper(self, self.function)
        self._lock, self._owner = threading.Lock(), 0

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Return what the function gives."""
        given = dict(zip(signature(self).parameters, values, strict=False)) | named
        given |= {name: unlogged for name, value in given.items() if callable(value)}  # TRL's log is in this process
        rows, number = [given], 1
        if VERL not in given:
            number = len(given[TRL] if TRL in given else given[OWN])
            lists = {name: value for name, value in given.items() if isinstance(value, list) and len(value) == number}
            rows = [given | {name: [value[row]] for name, value in lists.items()} for row in range(number)]
        with self._lock:
            answers = [self._checked(row) for row in rows]
        if late := sum(one is LATE for one in answers):
            said = f"{late} of {number} responses took longer than {self.seconds:g} s or ended the process"
            LOGGER.warning("! %s: %s; they count as wrong", self.spec, said)
        rewards = [0.0 if one is LATE else one for one in answers]
        return rewards[0] if VERL in given else rewards

    def _checked(self, given: dict[str, Any]) -> Any:
        if self._owner != os.getpid():  # a fork starts its own
            self._start()
        self._connection.send((given, self.seconds))
        return self._answer(self.seconds)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        pipe = theirs.fileno()
        program = PROGRAM.format(path=sys.path, spec=self.spec, needs=self.needs, pipe=pipe)
        popen = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=2, pass_fds=[pipe], start_new_session=True
        )
        theirs.close()
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, popen, self._connection, self._owner)
        if self._answer(START_WITHIN) is LATE:
            raise InfalignError(f"the process of the reward function {self.spec} did not start")

    def _answer(self, seconds: float) -> Any:
        """Return what the process sends, or `LATE`; without an answer, as after a signal, it is ended."""
        answer: Any = LATE
        try:
            with suppress(EOFError, OSError):
                answer = self._connection.recv() if self._connection.poll(seconds) else LATE
        finally:
            if answer is LATE:
                self._owner = 0
                self._end()
        if isinstance(answer, InfalignError):
            raise answer
        return answer


def limited(seconds: float, needs: str) -> Callable[[Callable[..., Any]], Limited]:
    """Return a decorator that makes a function of a module a `Limited` one."""
    return lambda function: Limited(function, f"{function.__module__}:{function.__name__}", seconds, needs=needs)


def _end(popen: "subprocess.Popen[bytes]", connection: Connection, owner: int) -> None:
    """End the process with all that it started."""
    connection.close()
    if os.getpid() == owner:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def work(spec: str, needs: str, pipe: int) -> None:
    """Answer what comes through a pipe with what the function ``spec`` gives, until it is closed."""
    os.set_inheritable(pipe, False)
    connection = Connection(pipe)
    with suppress(ImportError):  # which the function reports
        import_module(needs)
    function = import_function(spec)
    function = function.function if isinstance(function, Limited) else function
    name = ByName(function).name
    connection.send(None)
    with suppress(EOFError):
        while True:
            given, seconds = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)  # ends this process if its parent cannot
            try:
                with user_code(f"{name} raised"):
                    value = function(**given)
                    value = asyncio.run(awaited(value)) if isawaitable(value) else value
                    connection.send(value if VERL in given else one_for_each(value, 1, name)[0])
            except InfalignError as error:
                connection.send(type(error)(str(error)))
            signal.setitimer(signal.ITIMER_REAL, 0)
