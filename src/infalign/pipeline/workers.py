"""Tasks that depend on each other, in worker processes."""

import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from infalign.core.errors import ConfigError, InfalignError, StoppedError
from infalign.core.memory import out_of_memory, trim_heap
from infalign.core.progress import OnProgress, ProgressDisplay
from infalign.core.signals import raise_outside

REPORT_EVERY = 0.2  # seconds between progress reports of a worker
STOP_WITHIN = 10.0  # seconds until a worker that does not stop is killed
LESS_MEMORY = "lower compute.processes or the batch sizes, then rerun the same command to resume"


@dataclass(frozen=True)
class Task:
    """A function that is called with ``on_progress=`` as soon as the tasks it ``needs`` are done.

    A task that is ``alone``, beside which no other ever runs, has the threads of all processes.
    """

    name: str
    function: Callable[..., Any]
    needs: frozenset[str] = frozenset()
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Workers:
    """How many processes work at a time, and how many threads torch has in each; None lets torch decide.

    A process without a task imports ``needed``, the module whose libraries take seconds to import.
    """

    processes: int
    threads: int | None
    needed: str = "infalign"

    def threads_of(self, task: Task) -> int | None:
        """Return the number of threads for a task."""
        return self.threads * self.processes if self.threads and task.alone else self.threads


def run_tasks(
    tasks: Sequence[Task], workers: Workers, *, display: ProgressDisplay, on_done: Callable[[str, Any, float], None]
) -> None:
    """Run the tasks, as many at a time as there are processes; call ``on_done(name, result, seconds)`` here after each.

    A task starts when all of its ``needs`` among ``tasks`` are done; ready tasks start in the order of ``tasks``.
    With one process everything runs in this process. An InfalignError of a task is raised here as one of the classes of
    `infalign.core.errors`; any other failure, including a killed worker, becomes an InfalignError that names the task.
    The other workers are stopped first.
    """
    by_name = {task.name: task for task in tasks}
    position = {name: i for i, name in enumerate(by_name)}.__getitem__
    order = TopologicalSorter({task.name: task.needs & by_name.keys() for task in tasks})
    order.prepare()
    ready: list[str] = []

    def done(name: str, result: Any, seconds: float) -> None:
        display.finish(name)
        on_done(name, result, seconds)
        order.done(name)

    if workers.processes == 1:
        while order.is_active():
            ready = sorted([*ready, *order.get_ready()], key=position)
            name = ready.pop(0)
            display.start(name)
            done(name, *call(by_name[name], partial(display.update, name), workers.threads_of(by_name[name])))
        return
    with closing(_Pool(workers)) as pool:
        while order.is_active():
            ready = sorted([*ready, *order.get_ready()], key=position)
            while ready and len(pool.busy) < workers.processes:
                task = by_name.pop(ready.pop(0))
                display.start(task.name)
                pool.start(task)
            if by_name and len(pool.busy) < workers.processes:
                pool.idle()  # it imports what the tasks that are left need
            for name, message in pool.messages():
                match message:
                    case ("progress", *numbers):
                        display.update(name, *numbers)
                    case ("done", result, seconds):
                        done(name, result, seconds)


class _Pool:
    """Worker processes, started when they are needed and stopped, busy or not, when it is closed.

    Each worker has its own pipe and shares nothing: no semaphore can leak, and a closed pipe tells which worker died.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._processes: dict[Connection, BaseProcess] = {}
        self.busy: dict[Connection, str] = {}

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_WITHIN
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def idle(self) -> Connection:
        """Return the idle worker that was started last, which has imported most, or a new one."""
        return next((c for c in reversed(self._processes) if c not in self.busy), None) or self._new()

    def start(self, task: Task) -> None:
        connection = self.idle()
        self.busy[connection] = task.name
        try:
            connection.send((task, self._workers.threads_of(task)))
        except OSError:
            raise self._died(connection) from None

    def _new(self) -> Connection:
        context = get_context("spawn")  # a fork would copy locks that torch's threads hold
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._workers))  # it may start others
        # Ctrl-C reaches the whole process group; a worker that starts leaves it to us, until it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # only the worker keeps this end open, so its death closes the pipe
        self._processes[ours] = process
        return ours

    def messages(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Wait for messages of busy workers and yield them with the names of their tasks; raise the failures."""
        for connection in wait(list(self.busy)):
            assert isinstance(connection, Connection)
            name = self.busy[connection]
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._died(connection) from None
            if message[0] == "failed":
                _, kind, text, trace = message
                error: InfalignError = kind(text)
                error.add_note(f"In the worker process:\n{trace}")
                raise error
            if message[0] == "done":
                del self.busy[connection]
            yield name, message

    def _died(self, connection: Connection) -> InfalignError:
        process = self._processes[connection]
        process.join(STOP_WITHIN)
        code, name = process.exitcode, self.busy[connection]
        ending = f"exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"
        return InfalignError(f"the worker process of {name} ended ({ending}); if it ran out of memory, {LESS_MEMORY}")


def _work(connection: Connection, workers: Workers) -> None:
    """Run tasks one after the other until the parent dies or stops this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which was held back so far; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    last = 0.0

    def on_progress(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if done == total or time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            send("progress", done, total, note)

    def send(*message: Any) -> None:
        try:
            connection.send(message)
        except OSError:  # the parent process has died
            sys.exit(1)

    prepare_process(workers.threads)
    while True:
        try:
            if not connection.poll():
                with suppress(Exception):  # which the task that needs it reports
                    import_module(workers.needed)
            task, threads = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            send("done", *call(task, on_progress, threads))
        except InfalignError as error:
            # Sent as text: exceptions with several arguments, or with references to local objects, cannot be pickled.
            kind = next(c for c in type(error).__mro__ if c.__module__ == InfalignError.__module__)
            send("failed", kind, str(error), "".join(traceback.format_exception(error)))


def _stop(_: int, frame: FrameType | None) -> None:
    """Raise, so that `finally` blocks run, even if both the parent and `_stop_with_parent` signal this process.

    It says no more: where C++ calls Python, or threads of C++ are left at the end, the exception aborts the process.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    raise_outside(StoppedError, frame)


def _stop_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def call(task: Task, on_progress: OnProgress, threads: int | None) -> tuple[Any, float]:
    """Return the task's result and the seconds it took; raises only InfalignError."""
    started = time.monotonic()
    try:
        prepare_process(threads)
        return task.function(on_progress=on_progress), time.monotonic() - started
    except InfalignError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{task.name} needs a library that is not installed ({error}); pip install 'infalign[all]'"
        ) from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        if out_of_memory(error):
            raise InfalignError(f"{task.name} ran out of memory ({said}); {LESS_MEMORY}") from error
        raise InfalignError(f"{task.name} failed unexpectedly: {said}; rerun with --debug to see where") from error
    finally:
        trim_heap()


def prepare_process(threads: int | None) -> None:
    """Silence the libraries, whose progress bars and notices would garble the display, and set the thread count."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        # A thread that waits for others spins, by default so long that it keeps them from working on a busy machine.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger().setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|trl|datasets|accelerate|peft|infalign)\b")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # without its warning per retry
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Libraries read these variables when they are imported, so none is imported here that a task may not need.
    if threads is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
