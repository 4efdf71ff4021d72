"""Processes are killed, stopped, doubled, short of memory or talk to a closed pipe; clock and locale are odd."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import psutil
import torch
from rich.console import Console

from faults.registry import Lab, Seen, again, fault, tables
from faults.storage import KILLED, refused, undo
from infalign.core.progress import OnProgress, ProgressDisplay
from infalign.core.storage import remove
from infalign.pipeline.lock import HOLDER, held, holder
from infalign.pipeline.ownership import MARKER
from infalign.pipeline.records import records
from infalign.pipeline.workers import Task, run_tasks
from infalign.recipe.reading import load_recipe
from infalign.steps import STAGES
from infalign.steps.status import status

TRAINING = ("train-aware", "train-online", "train-plain")
SEED, KILLS = 20, 20  # of the loop: how long each run lives, and how many die at most


@contextmanager
def command(root: Path, name: str = "run") -> Iterator[subprocess.Popen[str]]:
    """Start ``infalign run``, or up to a stage, in a run directory; it and its workers are gone in the end."""
    path = micro.write(root.parent / "recipe.yaml", micro.settings(root) | micro.WORKERS)
    with started([micro.COMMAND, name, path]) as run:
        yield run


@contextmanager
def started(words: list[Any]) -> Iterator[subprocess.Popen[str]]:
    """Start a command; it and its workers are gone in the end."""
    run = subprocess.Popen(
        words,
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


def wait_for(path: Path, run: subprocess.Popen[str]) -> None:
    """Wait until a file is there."""
    while not path.exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)


def workers(run: subprocess.Popen[str]) -> list[int]:
    """Return the worker processes of a run."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ended(run: subprocess.Popen[str]) -> Seen:
    """Return how a run ended, which it must, without a process that is left, and with one sentence at most."""
    _, said = run.communicate(timeout=600)
    assert said.count("\n") <= 1, said
    return Seen(run.returncode if run.returncode >= 0 else 128 - run.returncode, said.removeprefix("infalign: "))


def finishes(root: Path, lab: Lab) -> None:
    """Check that the same command ends with the tables of an undisturbed run."""
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)


# Signals


def signalled(lab: Lab, number: signal.Signals) -> Seen:
    """Send a signal to a run that trains two policies, and finish it."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root, "train") as run:
        wait_for(root / "stages" / "train-online.started", run)
        run.send_signal(number)
        seen = ended(run)
    finishes(root, lab)
    return seen


@fault("SIGINT (Ctrl-C) while policies are trained")
def interrupted(lab: Lab) -> Seen:
    """One sentence says how to go on."""
    seen = signalled(lab, signal.SIGINT)
    assert seen.code == 130
    return seen


@fault("SIGTERM while policies are trained")
def terminated(lab: Lab) -> Seen:
    """One sentence says how to go on."""
    seen = signalled(lab, signal.SIGTERM)
    assert seen.code == 143
    return seen


@fault("a second SIGINT while the first one's clean-up waits for a worker")
def interrupted_twice(lab: Lab) -> Seen:
    """The command ends at once."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root, "train") as run:
        wait_for(root / "stages" / "train-online.started", run)
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
        seen = ended(run)
    assert seen.code == 130
    finishes(root, lab)
    return seen


@fault("SIGKILL of the command while policies are trained")
def command_killed(lab: Lab) -> Seen:
    """Its workers end by themselves, and nothing holds the run directory."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root, "train") as run:
        wait_for(root / "stages" / "train-online.started", run)
        run.kill()
        seen = ended(run)
    assert holder(root) is None
    finishes(root, lab)
    return seen


@fault("SIGKILL of a worker process, as the kernel does when memory runs out")
def worker_killed(lab: Lab) -> Seen:
    """An error within seconds names the job."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root, "train") as run:
        wait_for(root / "stages" / "train-online.started", run)
        os.kill(workers(run)[0], signal.SIGKILL)
        seen = ended(run)
    assert seen.code == 1
    finishes(root, lab)
    said = re.sub(r"process of \S+", "process of train-aware", seen.said)  # or of another: both are under way
    return Seen(seen.code, said)


def do(work: list[Task], processes: int) -> None:
    """Run tasks."""
    with ProgressDisplay(Console(file=StringIO())) as display:
        run_tasks(work, processes=processes, threads=1, display=display, on_done=lambda *_: None)


def give_pid(*, on_progress: OnProgress) -> int:
    """Return the process that does this task."""
    return os.getpid()


@fault("SIGKILL of a worker process that has nothing to do")
def idle_worker_killed(lab: Lab) -> Seen:
    """The next job for it is named within seconds."""
    pids: list[int] = []

    def done(name: str, result: int, seconds: float) -> None:
        os.kill(result, signal.SIGKILL)
        while Path(f"/proc/{result}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        pids.append(result)

    work = [Task("rollout-0", give_pid), Task("score-0", give_pid, frozenset(["rollout-0"]))]
    with ProgressDisplay(Console(file=StringIO())) as display:
        said = refused(lambda: run_tasks(work, processes=2, threads=1, display=display, on_done=done))
    assert len(pids) == 1
    return Seen(said.exit_code, str(said))


# Memory


def take(bytes_: int, *, on_progress: OnProgress) -> None:
    """Ask torch for memory."""
    torch.empty(bytes_, dtype=torch.uint8)


def out(*, on_progress: OnProgress) -> None:
    """Ask Python for memory."""
    bytearray(1 << 60)


@fault("a job asks for more memory than there is", brief=True)
def memory(lab: Lab) -> Seen:
    """Torch raises a RuntimeError, Python a MemoryError; both are said alike."""
    said = refused(lambda: do([Task("rollout-0", out)], 1))
    assert "rollout-0 ran out of memory (MemoryError" in str(said)
    said = refused(lambda: do([Task("rollout-0", partial(take, 1 << 50))], 1))
    return Seen(said.exit_code, str(said))


# Two at once, and what a dead one leaves


HOLD = """
import sys
from pathlib import Path
from infalign.pipeline.lock import held
with held(Path(sys.argv[1])): input()
"""


@contextmanager
def other(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let another process hold a run directory."""
    run = subprocess.Popen([sys.executable, "-c", HOLD, root], stdin=subprocess.PIPE)
    while holder(root) is None:
        assert run.poll() is None
        time.sleep(0.02)
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


@fault("a second process on one run directory", brief=True)
def two_processes(lab: Lab) -> Seen:
    """It is told who is there."""
    root = lab.copy()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.*")}
    with other(root):
        said = refused(lambda: again(root))
    (root / "again.yaml").unlink()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.*") if path.name != HOLDER} == {
        path: then for path, then in before.items() if path.name != HOLDER
    }
    return Seen(said.exit_code, str(said))


def stray(lab: Lab, **environment: str) -> Seen:
    """A run with odd variables of a cluster takes the lock, does its work and ends, as one without them."""
    root = lab.copy()
    undo(root, "calibrate")
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root) | micro.WORKERS)
    words = [micro.COMMAND, "run", path, "--until", "calibrate"]
    options = {"env": os.environ | environment, "capture_output": True, "text": True, "check": False}
    with held(root):
        second = subprocess.run(words, **options)
        assert (second.returncode, "in use by process" in second.stderr) == (1, True)
    run = subprocess.run(words, timeout=300, **options)
    assert run.returncode == 0, run.stderr
    assert tables(root) == tables(lab.finished)
    return Seen(run.returncode, run.stderr)


fault("a pod of a cluster sets RANK=1 and nothing else")(partial(stray, RANK="1"))
fault("RANK is no number")(partial(stray, RANK="abc", WORLD_SIZE="2"))
fault("RANK is not below WORLD_SIZE")(partial(stray, RANK="2", WORLD_SIZE="2"))
fault("WORLD_SIZE is set and RANK is not")(partial(stray, WORLD_SIZE="8"))
fault("RANK=1 and WORLD_SIZE=2 are set, and no place where processes meet")(partial(stray, RANK="1", WORLD_SIZE="2"))
fault("RANK is negative")(partial(stray, RANK="-1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"))
fault("a batch system numbers the run's process SLURM_PROCID=3 of 4, and its local rank 3")(
    partial(stray, SLURM_PROCID="3", SLURM_NTASKS="4", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3")
)


@fault("the lock of a process that was killed", brief=True)
def stale_lock(lab: Lab) -> Seen:
    """It locks nobody out."""
    root = lab.copy()
    with other(root):
        pass
    assert (root / HOLDER).exists()
    assert holder(root) is None
    assert again(root) == []
    return Seen(0, "")


@fault("the lock of a process whose number another process has now", brief=True)
def recycled_pid(lab: Lab) -> Seen:
    """The number alone is not believed: status says that nobody is there, and a run takes over."""
    root = lab.copy()
    with held(root):
        found = json.loads((root / HOLDER).read_text())
    (root / HOLDER).write_text(json.dumps(found | {"began": found["began"] - 1}))
    assert status(load_recipe(root / "recipe.yaml", [f"run_dir={root}"])).held_by is None
    assert again(root) == []
    return Seen(0, "")


# Where it runs


@fault("a locale that is not UTF-8")
def locale(lab: Lab) -> Seen:
    """What it cannot print is replaced, and what is written is UTF-8."""
    root = lab.copy()
    undo(root, *TRAINING)
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root) | micro.WORKERS)
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run([micro.COMMAND, "run", path], env=plain, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    assert b"? train-aware" in run.stdout
    assert tables(root) == tables(lab.finished)
    return Seen(run.returncode, run.stderr.decode())


@fault("a clock that goes back a day in the middle of a training")
def clock(lab: Lab) -> Seen:
    """Times of change that lie in the future, and times that run backwards, decide nothing."""
    root = lab.copy()
    undo(root, *TRAINING)
    now, calls = time.time, iter(range(10**9))
    with patch("time.time", lambda: now() - (86400 if next(calls) > 20 else 0)):
        again(root, until="train")
    for path in root.rglob("*"):
        os.utime(path, (now() + 86400, now() + 86400))
    finishes(root, lab)
    assert again(root, until="evaluate") == []
    return Seen(0, "")


@fault("stdout of a run is closed, as by `head`")
def closed_stdout(lab: Lab) -> Seen:
    """The run stops, says so, and continues."""
    root = lab.copy()
    undo(root, *TRAINING)
    with command(root) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr is not None
        said = run.stderr.read()
        code = run.wait(timeout=600)
    assert code == 141
    finishes(root, lab)
    return Seen(code, said.removeprefix("infalign: "))


@fault("stdout is closed while JSON is printed to it")
def closed_json(lab: Lab) -> Seen:
    """No traceback, and no exit code of success."""
    words = ["curve", "--procedure", "best-of-4", "--transform", "exp:10", "--transform", "log", "--sweep", "--json"]
    run = subprocess.Popen([micro.COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    said = run.stderr.read()
    return Seen(run.wait(timeout=600), said.removeprefix("infalign: "))


# The loop


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


@fault("SIGKILL of a run with two worker processes and on-policy training, again and again")
def kill_loop(lab: Lab) -> Seen:
    """Each time at most a unit or two get done; the end is that of an undisturbed run, bit for bit."""
    recipe = micro.settings(lab.folder / "run") | micro.WORKERS
    assert recipe["policies"]["online"]["solver"] == "rloo"
    root, draw = lab.folder / "run", random.Random(SEED)
    took = {name: record["seconds"] for name, record in records(lab.finished).items()}
    hit: set[str] = set()
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
                begun = {path.stem for path in root.glob("stages/*.started")}
                hit |= {name for name in begun if not (root / "stages" / f"{name}.json").exists()}
    assert run.returncode == 0
    assert kills > KILLS / 2
    assert tables(root) == tables(lab.finished)
    stage = {name: record["stage"] for name, record in records(root).items()}
    stages_hit = [name for name in STAGES if name in {stage[unit] for unit in hit}]
    return Seen(KILLED, f"{kills} kills, of units of {', '.join(stages_hit)}")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "infalign", "train"]


@fault("SIGKILL of an on-policy training by two processes under torchrun, again and again")
def distributed_kill_loop(lab: Lab) -> Seen:
    """Whenever both die, the next two go on from a checkpoint or start anew, and end with the same policy."""
    draw = random.Random(SEED)
    fit = micro.FIT | {"batch_size": 8}
    changes = {
        "policies": {"online": {"kl_budget": 0.5, "solver": "rloo", "generations": 4, "fit": fit}},
    }

    def train(root: Path, most: int) -> int:
        """Train with at most so many kills, each a while after the training began or was continued."""
        path, kills = micro.write(root.with_suffix(".yaml"), micro.settings(root) | changes), 0
        while True:
            since = time.time()
            with started([*TORCHRUN, path]) as run:
                if kills < most and at_work(root, run, since):
                    time.sleep(draw.uniform(0.0, 4.0))
                    if run.poll() is None:
                        for process in (*psutil.Process(run.pid).children(recursive=True), run):
                            process.kill()  # torchrun's workers are in sessions of their own
                        kills += 1
                        continue
                out, said = run.communicate()
                assert run.returncode == 0, out + said
                return kills

    weights = []
    for name, most in (("undisturbed", 0), ("run", 3)):
        root = lab.copy(name)
        undo(root, *TRAINING)
        remove(root / "models" / "online")
        kills = train(root, most)
        weights.append((root / "models" / "online" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert kills
    return Seen(KILLED, f"{kills} kills")
