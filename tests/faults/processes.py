"""Processes are killed, stopped, short of memory or talk to a closed pipe; the locale is odd."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

import micro
import torch
from rich.console import Console

from faults.lab import KILLED, Lab, Seen, tables, told, undo
from faults.registry import fault
from infalign.core.progress import ProgressDisplay
from infalign.pipeline.ownership import HOLDER, MARKER
from infalign.pipeline.records import records
from infalign.pipeline.workers import Task, Workers, run_tasks

TRAINING = ("train-aware", "train-online", "train-plain")
SEED, KILLS = 20, 20  # of the loop: how long each run lives, and how many die at most


@contextmanager
def command(root: Path, *until: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``infalign run``, or up to a stage, in a run directory; it and its workers are gone in the end."""
    path = micro.write(root.parent / "recipe.yaml", micro.settings(root) | micro.WORKERS)
    run = subprocess.Popen(
        [micro.COMMAND, "run", path, *until],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored below a background job
    )
    try:
        yield run
    finally:
        run.kill()
        run.communicate(timeout=60)  # returns when no process holds the pipes any more


def workers(run: subprocess.Popen[str]) -> list[int]:
    """Return the worker processes of a run."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ended(run: subprocess.Popen[str]) -> Seen:
    """Return how a run ended, which it must, without a process that is left, and with one sentence at most."""
    _, said = run.communicate(timeout=600)
    assert said.count("\n") <= 1, said
    return Seen(run.returncode if run.returncode >= 0 else 128 - run.returncode, said.removeprefix("infalign: "))


def while_training(lab: Lab, harm: Callable[[subprocess.Popen[str]], object]) -> Seen:
    """Harm a run that trains policies, and finish it."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root, "--until", "train") as run:
        while not (root / "stages" / "train-online.started").exists():
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        harm(run)
        seen = ended(run)
    lab.ends_well(root)
    return seen


def interrupt_twice(run: subprocess.Popen[str]) -> None:
    """Interrupt a run whose clean-up waits for a worker once more."""
    stuck = workers(run)
    for pid in stuck:
        os.kill(pid, signal.SIGSTOP)
    run.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    run.wait(timeout=600)
    for pid in stuck:
        os.kill(pid, signal.SIGCONT)  # it notices that its parent is gone


def send(number: signal.Signals) -> Callable[[subprocess.Popen[str]], object]:
    """Return what sends a signal to a run."""
    return lambda run: run.send_signal(number)


@fault(130, {"once": send(signal.SIGINT), "twice": interrupt_twice})
def interrupted(lab: Lab, harm: Callable[[subprocess.Popen[str]], object]) -> Seen:
    """Ctrl-C (SIGINT) during training, once or twice → How to resume; twice ends at once."""
    return while_training(lab, harm)


@fault(143)
def terminated(lab: Lab) -> Seen:
    """SIGTERM during training → How to resume."""
    return while_training(lab, send(signal.SIGTERM))


@fault(KILLED)
def command_killed(lab: Lab) -> Seen:
    """SIGKILL of the command during training → Nothing; its workers end, and the lock is free."""
    return while_training(lab, send(signal.SIGKILL))


@fault(1)
def worker_killed(lab: Lab) -> Seen:
    """SIGKILL of a worker process, as when memory runs out → Within seconds: the step whose process was killed."""
    return while_training(lab, lambda run: os.kill(workers(run)[0], signal.SIGKILL))


@fault(
    1,
    {
        "torch": lambda **_: torch.empty(1 << 50, dtype=torch.uint8),  # a RuntimeError
        "Python": lambda **_: bytearray(1 << 60),  # a MemoryError
    },
    brief=True,
)
def memory(lab: Lab, ask: Callable[..., object]) -> Seen:
    """A step asks for more memory than there is → The step that ran out of memory."""
    with ProgressDisplay(Console(file=StringIO())) as display:
        task = [Task("rollout-0", ask)]
        seen = told(lambda: run_tasks(task, Workers(1, 1), display=display, on_done=lambda *_: None))
    assert "rollout-0 ran out of memory" in seen.said
    return seen


@fault(0)
def locale(lab: Lab) -> Seen:
    """A locale that is not UTF-8 → `?` for what it cannot print; files are UTF-8."""
    root = lab.copy()
    undo(root, *TRAINING)
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root) | micro.WORKERS)
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run([micro.COMMAND, "run", path], env=plain, capture_output=True, check=False)
    assert b"? train-aware" in run.stdout
    assert tables(root) == tables(lab.finished)
    return Seen(run.returncode, run.stderr.decode())


@fault(141)
def closed_stdout(lab: Lab) -> Seen:
    """Stdout of a run is closed, as by `head` → The output was closed; how to resume."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root) as run:
        assert run.stdout
        assert run.stderr
        run.stdout.readline()
        run.stdout.close()
        said = run.stderr.read()
        code = run.wait(timeout=600)
    lab.ends_well(root)
    return Seen(code, said)


def at_work(root: Path, run: subprocess.Popen[str], since: float) -> bool:
    """Wait until a run that was started at ``since`` changes something, and return whether it goes on."""
    said = {HOLDER, ".lock", MARKER, "recipe.yaml", "digests.json"}
    while run.poll() is None:
        for path in root.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file() and path.name not in said and path.stat().st_mtime > since:
                    return True
        time.sleep(0.02)
    return False


@fault(KILLED)
def kill_loop(lab: Lab) -> Seen:
    """SIGKILL of a run with two workers, again and again → Nothing; a rerun repeats the unfinished steps."""
    recipe = micro.settings(lab.folder / "run") | micro.WORKERS
    assert recipe["policies"]["online"]["solver"] == "rloo"
    root, draw = lab.folder / "run", random.Random(SEED)
    took = {name: record["seconds"] for name, record in records(lab.finished).items()}
    kills, going = 0, True
    while going:
        since = time.time()
        with command(root) as run:
            if going := at_work(root, run, since):
                left = [name for name in took if not (root / "stages" / f"{name}.json").exists()]
                time.sleep(draw.uniform(0.0, took[left[0]] if left else 0.0))
            if kills == KILLS:
                run.communicate(timeout=600)
            if going := run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                kills += 1
    assert run.returncode == 0
    assert kills > KILLS / 2
    assert tables(root) == tables(lab.finished)
    return Seen(KILLED)
