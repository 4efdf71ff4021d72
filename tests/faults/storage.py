"""The disk fails, fills up, flips a bit or loses a file: at every call, at every byte, in every kind of file."""

import errno
import io
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import pyarrow as pa
from rich.console import Console

from faults.lab import KILLED, Lab, Seen, again, refused, tables, told, undo, untouched
from faults.registry import fault
from infalign.core.errors import InfalignError
from infalign.core.storage import read_record, read_table, remove, write_record, write_table
from infalign.models.pretrained import load_policy
from infalign.pipeline.records import FORMAT
from infalign.recipe.reading import load_recipe
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.steps.status import status
from infalign.training.common import save_model

Work = Callable[[], object]
Harm = Callable[[int, Work], Seen | None]  # what is seen when work is harmed for the k-th time, None if it passes


# The means: a disk that fails at the k-th call or byte, and what must hold afterwards


@contextmanager
def failing(k: int, act: Work) -> Iterator[list[str]]:
    """Do ``act`` before the k-th opening for writing, waiting for the disk or renaming; yield the calls so far."""
    made: list[str] = []

    def counted(function: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if writes(*arguments, **options):
                made.append(function.__name__)
                if len(made) == k:
                    act()
            return function(*arguments, **options)

        return call

    def always(*_: Any, **__: Any) -> bool:
        return True

    def opens(file: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
        return mode[0] in "wax" and file != os.devnull

    with (
        patch("os.fsync", counted(os.fsync, always)),
        patch("os.replace", counted(os.replace, always)),
        patch("io.open", counted(io.open, opens)),
        patch("builtins.open", counted(open, opens)),
    ):
        yield made


def attempt(work: Work) -> Seen | None:
    """Return what is seen when ``work`` ends with an error of ours, None if it ends well."""
    try:
        work()
    except InfalignError as error:
        return Seen(error.exit_code, str(error))
    return None


def raising(number: int) -> Callable[..., Any]:
    """Return a function that raises an OSError."""

    def act(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return act


def error(number: int) -> Harm:
    """Return the harm of an OSError at the k-th call."""

    def harm(k: int, work: Work) -> Seen | None:
        with failing(k, raising(number)) as made:
            seen = attempt(work)
        assert seen is not None or len(made) < k  # what failed was said
        assert seen is None or os.strerror(number) in seen.said
        return seen

    return harm


def death(k: int, work: Work) -> Seen | None:
    """Do ``work`` in a process of its own that is killed at the k-th call."""
    child = os.fork()
    if not child:
        code = 1
        try:
            with failing(k, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return Seen(KILLED) if code else None


def full(step: int) -> Harm:
    """Return the harm of a disk that takes k - 1 times ``step`` bytes of a file and no more."""

    def harm(k: int, work: Work) -> Seen | None:
        with room((k - 1) * step):
            return attempt(work)

    return harm


def everywhere(harm: Harm, work: Work, *, before: Work = int, after: Work) -> Seen:
    """Harm ``work`` for the first, second, … time until it passes, with ``after`` each time; return what is seen."""
    seen = None
    for k in range(1, 10_000):
        before()
        now = harm(k, work)
        after()
        if now is None:
            assert seen is not None
            return seen
        seen = now
    raise AssertionError("it never passes")


@contextmanager
def room(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip(path: Path, place: int | None = None) -> None:
    """Flip a bit in the middle of a file, or at a place."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Lose the last tenth of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 9 // 10])


# A disk that fails while something is written: under its final name is the old one or the whole new one

OLD, NEW = pa.table({"reward": [1.0, 2.0]}), pa.table({"reward": [float(i) for i in range(500)]})


def file_harmed(lab: Lab, harm: Harm, name: str, write: Callable[..., Any], read: Callable[[Path], Any]) -> Seen:
    """Replace a file under a harm; it must be the old one or the new one, and nothing but hidden files beside it."""
    path = lab.folder / name
    old, new = (OLD, NEW) if write is write_table else ({"key": "old"}, {"key": "new"})

    def whole() -> None:
        assert read(path) in (old, new)
        assert [file for file in path.parent.iterdir() if not file.name.startswith(".")] == [path]
        assert harm is death or list(path.parent.iterdir()) == [path]

    return everywhere(harm, lambda: write(path, new), before=lambda: write(path, old), after=whole)


TABLE, RECORD = ("rewards.parquet", write_table, read_table), ("record.json", write_record, read_record)


def model_harmed(lab: Lab, harm: Harm) -> Seen:
    """Save a model as a training does, under a harm: the folder has its final name when all of it is there."""
    root = lab.copy()
    run = Run.of(load_recipe(root / "recipe.yaml", [f"run_dir={root}"]))
    layout, target = run.layout, run.target("plain")
    model, tokenizer = load_policy(layout.model("plain"))

    def names() -> set[str]:
        return {path.name for path in layout.model("plain").iterdir()} - {layout.card("plain").name}  # comes afterwards

    saved = names()

    def work() -> None:
        with target.job(lambda done, total, note: None) as job:
            save_model(model, tokenizer, job.model_dir)

    def whole() -> None:
        if layout.model("plain").exists():
            assert names() == saved
            load_policy(layout.model("plain"))

    return everywhere(harm, work, after=whole)


def unit_harmed(lab: Lab, harm: Harm, unit: str) -> Seen:
    """Do a unit under a harm; after each time no table is partial, and the same command ends as an undisturbed run."""
    root = lab.copy()
    expected = tables(root)
    recipe = load_recipe(lab.recipe(), ["compute.processes=1"])
    until = read_record(root / "stages" / f"{unit}.json")["stage"]

    def work() -> None:
        whole_run.run_recipe(recipe, until=until, console=Console(quiet=True))

    def after() -> None:
        assert all(rows == expected[name] for name, rows in tables(root).items())
        work()
        assert tables(root) == expected

    seen = everywhere(harm, work, before=lambda: undo(root, unit), after=after)
    assert again(root, until="evaluate") == []
    return seen


@fault(
    InfalignError.exit_code,
    {
        "EIO: table": (file_harmed, error(errno.EIO), *TABLE),
        "EIO: model": (model_harmed, error(errno.EIO)),
        "EIO: calibration": (unit_harmed, error(errno.EIO), "calibrate"),
        "ENOSPC: record": (file_harmed, error(errno.ENOSPC), *RECORD),
        "ENOSPC: rollouts": (unit_harmed, error(errno.ENOSPC), "rollout-0"),
        "full: table": (file_harmed, full(61), *TABLE),
        "full: model": (model_harmed, full(2000)),
    },
    brief=("EIO: table", "ENOSPC: record", "full: table"),
)
def write_fails(lab: Lab, harmed: Callable[..., Seen], harm: Harm, *what: Any) -> Seen:
    """The disk fails or is full at any call or byte of a write → The file and the reason; the old file stays."""
    return harmed(lab, harm, *what)


@fault(
    KILLED,
    {
        "table": (file_harmed, *TABLE),
        "model": (model_harmed,),
        "calibration": (unit_harmed, "calibrate"),
        "rollouts": (unit_harmed, "rollout-0"),
        "scores": (unit_harmed, "score-0"),
    },
    brief=("table",),
)
def write_killed(lab: Lab, harmed: Callable[..., Seen], *what: Any) -> Seen:
    """SIGKILL at any open, fsync or rename of a write → Nothing; the file is the old or the new one."""
    return harmed(lab, death, *what)


@fault(1)
def checkpoint_full(lab: Lab) -> Seen:
    """The disk is full while a checkpoint is written → The file; with room, a rerun resumes."""
    root = lab.copy()
    undo(root, "train-plain")
    with room(40_000):
        seen = told(lambda: again(root, until="train"))
    lab.ends_well(root)
    return seen


EVALUATION = tuple(micro.evaluation("plain"))
ROLLOUTS = "rollouts/part-0/part-00000.parquet"


@fault(
    3,
    {
        "rollouts, bit": (ROLLOUTS, flip, "train-plain", *EVALUATION),
        "rollouts, end": (ROLLOUTS, cut, "train-plain", *EVALUATION),
        "scores, bit": ("scores/part-0.parquet", flip, "train-plain", *EVALUATION),
        "calibrated, bit": ("calibrated.parquet", flip, "train-plain", *EVALUATION),
        "policy, bit": ("models/plain/model.safetensors", flip, *EVALUATION),
        "reference, end": ("models/reference/model.safetensors", cut, *EVALUATION),
        "record, bit": ("stages/score-1.json", flip),
        "record, end": ("stages/score-1.json", cut),
        "results, bit": ("results.json", flip),
    },
    brief=("results, bit",),
)
def damaged(lab: Lab, name: str, harm: Callable[[Path], object], *after: str) -> Seen:
    """A bit of a finished file is flipped, or its end is lost → The file; delete it, and a rerun makes it again."""
    root = lab.copy()
    undo(root, *after)
    harm(root / name)
    seen = told(lambda: again(root, until="evaluate"))
    assert name in seen.said
    assert not (root / "evaluation" / "plain" / "scores.parquet").exists() or not after
    (root / name).unlink(missing_ok=True)
    lab.ends_well(root)
    return seen


def become(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return the harm of something else in the place of a file."""

    def harm(path: Path) -> None:
        path.unlink()
        make(path)

    return harm


ASK = "generate --policy plain --prompt Hello"
OPENERS = {
    "models/aware": ["run", "generate --prompt Hello"],
    "models/reference": ["run --until calibrate", ASK, "export --to trl --transform exp:10 --kl 0.1"],
    "models/reward": ["serve-reward --transform exp:10", ASK],
}


@fault(
    3,
    {
        "another run's": lambda path: path.write_bytes((path.parents[1] / "online" / path.name).read_bytes()),
        "4,000 bytes": lambda path: [flip(path, 9000 + place) for place in range(4000)],
        "a link": become(lambda path: path.symlink_to(path.parents[1] / "online" / path.name)),
        "a pipe": become(os.mkfifo),
        "a folder": become(Path.mkdir),
    },
    brief=("a pipe",),
)
def replaced(lab: Lab, harm: Callable[[Path], object]) -> Seen:
    """A finished model is not the one that was made: swapped, a link, a pipe → Whoever opens it names the file."""
    root = lab.copy()
    for folder, commands in OPENERS.items():
        weights = root / folder / "model.safetensors"
        kept = weights.read_bytes()
        harm(weights)
        states = [unit.state for unit in status(load_recipe(lab.recipe())).units]
        assert [state for state in states if state != "done"] == ["damaged"]
        for command, *words in map(str.split, commands):
            seen = refused(command, lab.recipe() if command == "run" else root, *words)
            assert (seen.code, f"{folder}/model.safetensors" in seen.said) == (3, True), seen
        remove(weights)
        weights.write_bytes(kept)
    return seen


@fault(0, brief=True)
def temporary_left(lab: Lab) -> None:
    """The temporary file of a killed process is left among the shards → Nothing; it is hidden and never read."""
    root = lab.copy()
    shard = root / ROLLOUTS
    shard.with_name(f".{'0' * 32}-{shard.name}").write_bytes(shard.read_bytes()[:100])
    assert again(root) == []
    assert tables(root) == tables(lab.finished)


@fault(2, brief=True)
def file_for_run(lab: Lab) -> Seen:
    """A file stands where the run directory should be → Its name, before any computation."""
    (lab.folder / "run").touch()
    return refused("run", lab.recipe())


@fault(2, brief=True)
def read_only(lab: Lab) -> Seen:
    """The file system of the run directory is read-only → The file system is read-only; `status` works."""
    lab.copy()
    recipe = load_recipe(lab.recipe())
    with patch("os.open", raising(errno.EROFS)):
        seen = told(lambda: whole_run.run_recipe(recipe, console=Console(quiet=True)))
    assert status(recipe).done
    return seen


@fault(2, brief=True)
def newer_version(lab: Lab) -> Seen:
    """The run directory was made by a newer version → Both versions; nothing is touched."""
    root = lab.copy()
    record = read_record(root / "stages" / "data.json")
    record |= {"format": FORMAT + 1, "versions": record["versions"] | {"infalign": "9.0"}}
    write_record(root / "stages" / "data.json", record)
    with untouched(root, "again.yaml", ".lock", ".holder", "recipe.yaml"):
        return told(lambda: again(root))
