"""The disk fails, fills up, flips a bit or loses a file: at every call, at every byte, in every kind of file."""

import errno
import io
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import micro
import pyarrow as pa
from rich.console import Console

from faults.registry import Lab, Seen, again, fault, tables
from infalign.core.errors import InfalignError
from infalign.core.storage import hash_file, read_record, read_table, remove, write_record, write_table
from infalign.models.pretrained import load_policy
from infalign.pipeline.pending import pending, reasons
from infalign.pipeline.records import FORMAT, records
from infalign.recipe.fingerprints import Digests
from infalign.recipe.reading import load_recipe
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.steps.status import status
from infalign.training.checkpoints import SEAL
from infalign.training.common import save_model

Work = Callable[[], object]
KILLED = 128 + signal.SIGKILL  # what a shell sees


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


def broken(number: int) -> Work:
    """Return what a failing call does: it raises an OSError."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def refusal(work: Work) -> str | None:
    """Return what ``work`` says when it ends with an error of ours, None if it ends well."""
    try:
        work()
    except InfalignError as error:
        return str(error)
    return None


Harm = Callable[[int, Work], str | None]  # what is said when work is harmed for the k-th time, None if it passes


def raising(number: int) -> Callable[..., Any]:
    """Return a function that raises an OSError."""

    def act(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return act


def error(number: int) -> Harm:
    """Return the harm of an OSError at the k-th call."""

    def harm(k: int, work: Work) -> str | None:
        with failing(k, raising(number)) as made:
            said = refusal(work)
        assert said is not None or len(made) < k  # what failed was said
        assert said is None or os.strerror(number) in said
        return said

    return harm


def death(k: int, work: Work) -> str | None:
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
    return "" if code else None


def full(step: int) -> Harm:
    """Return the harm of a disk that takes k times ``step`` bytes of a file and no more."""

    def harm(k: int, work: Work) -> str | None:
        with room(k * step):
            return refusal(work)

    return harm


def everywhere(harm: Harm, work: Work, *, before: Work = int, after: Work, first: int = 1) -> str:
    """Harm ``work`` for the first, second, … time until it passes, with ``after`` each time; return what is said."""
    said = None
    for k in range(first, 10_000):
        before()
        now = harm(k, work)
        after()
        if now is None:
            assert said is not None
            return said
        said = now
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


def refused(work: Work) -> InfalignError:
    """Return the error that ``work`` must end with."""
    try:
        work()
    except InfalignError as error:
        return error
    raise AssertionError("nothing was said")


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Lose the last tenth of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 9 // 10])


# A file under its final name is the old one or the whole new one


OLD, NEW = pa.table({"reward": [1.0, 2.0]}), pa.table({"reward": [float(i) for i in range(500)]})


def written(lab: Lab, harm: Harm, *, first: int = 1) -> str:
    """Replace a table under a harm; it must be the old one or the new one, and nothing but hidden files beside it."""
    path = lab.folder / "rewards.parquet"

    def whole() -> None:
        found = read_table(path)
        assert found.equals(OLD) or found.equals(NEW)
        assert [file for file in path.parent.iterdir() if not file.name.startswith(".")] == [path]
        assert harm is death or list(path.parent.iterdir()) == [path]

    return everywhere(
        harm, lambda: write_table(path, NEW), before=lambda: write_table(path, OLD), after=whole, first=first
    )


@fault("EIO at any fsync or rename while a table is written", brief=True)
def table_eio(lab: Lab) -> Seen:
    """What Arrow opens and writes by itself, a full disk and a flipped bit are about."""
    return Seen(InfalignError.exit_code, written(lab, error(errno.EIO)))


@fault("SIGKILL at any fsync or rename while a table is written", brief=True)
def table_killed(lab: Lab) -> Seen:
    """A process that is killed leaves a hidden file at most."""
    return Seen(KILLED, written(lab, death))


@fault("the disk is full at any byte of a table", brief=True)
def table_full(lab: Lab) -> Seen:
    """In steps of 61 bytes."""
    return Seen(InfalignError.exit_code, written(lab, full(61), first=0))


@fault("ENOSPC at any open, fsync or rename while the record of a unit is written", brief=True)
def record_full(lab: Lab) -> Seen:
    """A record that cannot be replaced stays."""
    path = lab.folder / "record.json"

    def whole() -> None:
        assert read_record(path)["key"] in ("old", "new")
        assert list(path.parent.iterdir()) == [path]

    said = everywhere(
        error(errno.ENOSPC),
        lambda: write_record(path, {"key": "new"}),
        before=lambda: write_record(path, {"key": "old"}),
        after=whole,
    )
    return Seen(InfalignError.exit_code, said)


# Whatever failed in a unit, the same command ends as an undisturbed run


def undo(root: Path, *units: str) -> None:
    """Remove what the run knows of units and what they made: they are to be done from the start."""
    for name in units:
        record = root / "stages" / f"{name}.json"
        for made in read_record(record)["output"] if record.exists() else ():
            (root / made).unlink(missing_ok=True)
        for path in (record, record.with_suffix(".started")):
            path.unlink(missing_ok=True)
        remove(root / name.replace("score-", "scores/part-"))
        if name.startswith("samples-"):
            remove(root / "evaluation" / name.removeprefix("samples-") / "scores")
    remove(root / "checkpoints")


def unit_harmed(lab: Lab, unit: str, harm: Harm) -> str:
    """Do a unit under a harm; after each time no table is partial, and the same command ends as an undisturbed run."""
    root = lab.copy()
    expected = tables(root)
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root))
    recipe = load_recipe(path, ["compute.processes=1"])
    until = read_record(root / "stages" / f"{unit}.json")["stage"]

    def work() -> None:
        whole_run.run_recipe(recipe, until=until, console=Console(quiet=True))

    def after() -> None:
        assert all(rows == expected[name] for name, rows in tables(root).items())
        work()
        assert tables(root) == expected

    said = everywhere(harm, work, before=lambda: undo(root, unit), after=after)
    assert again(root, until="evaluate") == []
    return said


@fault("EIO at any open, fsync or rename while prompts are calibrated")
def calibration_eio(lab: Lab) -> Seen:
    """From the recipe over the table to the record of the unit."""
    return Seen(InfalignError.exit_code, unit_harmed(lab, "calibrate", error(errno.EIO)))


@fault("SIGKILL at any open, fsync or rename while prompts are calibrated")
def calibration_killed(lab: Lab) -> Seen:
    """Between any two calls the process may vanish."""
    return Seen(KILLED, unit_harmed(lab, "calibrate", death))


@fault("ENOSPC at any open, fsync or rename while rollouts are drawn")
def rollouts_full(lab: Lab) -> Seen:
    """A shard is there whole or not at all, and drawn again bit for bit."""
    return Seen(InfalignError.exit_code, unit_harmed(lab, "rollout-0", error(errno.ENOSPC)))


@fault("SIGKILL at any open, fsync or rename while rollouts are drawn")
def rollouts_killed(lab: Lab) -> Seen:
    """Also between a shard and the record of its unit."""
    return Seen(KILLED, unit_harmed(lab, "rollout-0", death))


@fault("SIGKILL at any open, fsync or rename while rollouts are scored")
def scores_killed(lab: Lab) -> Seen:
    """Rewards that came in are kept; the table of the unit is there whole or not at all."""
    return Seen(KILLED, unit_harmed(lab, "score-0", death))


# Models and checkpoints


def quiet(done: int, total: int, note: str) -> None:
    """Report to nobody."""


def model_harmed(lab: Lab, harm: Harm, *, first: int = 1) -> str:
    """Save a model as a training does, under a harm: the folder has its final name when all of it is there."""
    root = lab.copy()
    run = Run.of(load_recipe(root / "recipe.yaml", [f"run_dir={root}"]))
    layout, target = run.layout, run.target("plain")
    model, tokenizer = load_policy(layout.model("plain"))

    def names() -> set[str]:
        return {path.name for path in layout.model("plain").iterdir()} - {layout.card("plain").name}  # comes afterwards

    saved = names()

    def work() -> None:
        with target.job(quiet) as (_, folder):
            save_model(model, tokenizer, folder)

    def whole() -> None:
        if layout.model("plain").exists():
            assert names() == saved
            load_policy(layout.model("plain"))

    return everywhere(harm, work, after=whole, first=first)


@fault("EIO at any open, fsync or rename while a model is saved")
def model_eio(lab: Lab) -> Seen:
    """The weights are written by safetensors, which the full disk is about."""
    return Seen(InfalignError.exit_code, model_harmed(lab, error(errno.EIO)))


@fault("SIGKILL at any open, fsync or rename while a model is saved")
def model_killed(lab: Lab) -> Seen:
    """What a killed process leaves has another name and is removed by the next one."""
    return Seen(KILLED, model_harmed(lab, death))


@fault("the disk is full at any byte of a model")
def model_full(lab: Lab) -> Seen:
    """In steps of 2,000 bytes: configuration, weights, tokenizer."""
    return Seen(InfalignError.exit_code, model_harmed(lab, full(2000), first=0))


class StoppedError(Exception):
    """The training was stopped."""


def stopped_training(lab: Lab) -> tuple[Path, Path]:
    """Return the root of a run that was stopped while it trained a policy, and the newer of two checkpoints."""
    root = lab.copy()
    undo(root, "train-plain")
    run = Run.of(load_recipe(root / "recipe.yaml", [f"run_dir={root}"]))
    (training,) = (unit for unit in whole_run.units(run) if unit.name == "train-plain")
    folder, kept = run.layout.checkpoints("plain"), lab.folder / "kept"

    def stop_after_two(done: int, total: int, note: str) -> None:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.copytree(checkpoint, kept / checkpoint.name, dirs_exist_ok=True)
        if kept.exists() and len(list(kept.iterdir())) == 2:
            raise StoppedError

    with suppress(StoppedError):
        training.work(on_progress=stop_after_two)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    started = "stages/train-plain.started"
    shutil.copyfile(lab.finished / started, root / started)
    return root, max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def resumed(lab: Lab, tear: Callable[[Path], object]) -> Seen:
    """Tear the newer checkpoint; the run goes on from the one before and says so."""
    root, newest = stopped_training(lab)
    tear(newest)
    assert "train-plain" in again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    said = records(root)["train-plain"]["summary"]["resumed"]
    assert newest.name in said
    return Seen(0, said)


@fault("the weights of the newest checkpoint are cut off")
def checkpoint_cut(lab: Lab) -> Seen:
    """As after a copy that was broken off."""
    return resumed(lab, lambda checkpoint: cut(checkpoint / "model.safetensors"))


@fault("a bit of the newest checkpoint's optimizer is flipped")
def checkpoint_flipped(lab: Lab) -> Seen:
    """Torch itself would read it."""
    return resumed(lab, lambda checkpoint: flip(checkpoint / "optimizer.pt"))


@fault("optimizer.pt of the newest checkpoint is missing")
def optimizer_missing(lab: Lab) -> Seen:
    """The trainer itself would go on without it."""
    return resumed(lab, lambda checkpoint: (checkpoint / "optimizer.pt").unlink())


@fault("SIGKILL before the newest checkpoint is sealed")
def checkpoint_unsealed(lab: Lab) -> Seen:
    """Whatever a checkpoint without its seal holds, it does not count."""
    return resumed(lab, lambda checkpoint: (checkpoint / SEAL).unlink())


@fault("the disk is full while a checkpoint is written")
def checkpoint_full(lab: Lab) -> Seen:
    """Weights fit, the optimizer does not; with room again the run ends as an undisturbed one."""
    root = lab.copy()
    undo(root, "train-plain")
    with room(40_000):
        said = refused(lambda: again(root, until="train"))
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return Seen(said.exit_code, str(said))


# What was whole is damaged later


def damaged(lab: Lab, name: str, harm: Callable[[Path], object], *after: str) -> Seen:
    """Damage a file of a run whose units ``after`` are not done: it is refused and, once deleted, made again."""
    root = lab.copy()
    undo(root, *after)
    harm(root / name)
    said = refused(lambda: again(root, until="evaluate"))
    assert name in str(said)
    assert not (root / "evaluation" / "plain" / "scores.parquet").exists() or not after
    if (root / name).exists():
        (root / name).unlink()
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return Seen(said.exit_code, str(said))


ROLLOUTS, SCORES = "rollouts/part-0/part-00000.parquet", "scores/part-0.parquet"


@fault("a bit of a shard of rollouts is flipped")
def shard_flipped(lab: Lab) -> Seen:
    """Before the policies are trained on it."""
    return damaged(lab, ROLLOUTS, flip, "train-plain", *micro.evaluation("plain"))


@fault("a shard of rollouts is cut off")
def shard_cut(lab: Lab) -> Seen:
    """As after a copy that was broken off."""
    return damaged(lab, ROLLOUTS, cut, "train-plain", *micro.evaluation("plain"))


@fault("a bit of a table of scores is flipped")
def scores_flipped(lab: Lab) -> Seen:
    """A reward that is another number would be a rank that is another."""
    return damaged(lab, SCORES, flip, "train-plain", *micro.evaluation("plain"))


@fault("a bit of calibrated.parquet is flipped")
def calibrated_flipped(lab: Lab) -> Seen:
    """The policies are trained on it."""
    return damaged(lab, "calibrated.parquet", flip, "train-plain", *micro.evaluation("plain"))


@fault("a bit of a model's weights is flipped")
def model_flipped(lab: Lab) -> Seen:
    """The evaluation would measure another policy and say nothing: safetensors have no checksum."""
    return damaged(lab, "models/plain/model.safetensors", flip, *micro.evaluation("plain"))


@fault("a model's weights are cut off")
def model_cut(lab: Lab) -> Seen:
    """As after a copy that was broken off."""
    return damaged(lab, "models/reference/model.safetensors", cut, *micro.evaluation("plain"))


@fault("a bit of a record in stages/ is flipped")
def record_flipped(lab: Lab) -> Seen:
    """It might tell of settings that nothing was made with."""
    return damaged(lab, "stages/score-1.json", flip)


@fault("a record in stages/ is cut off")
def record_cut(lab: Lab) -> Seen:
    """As after a copy that was broken off."""
    return damaged(lab, "stages/score-1.json", cut)


@fault("a bit of the numbers in results.json is flipped", brief=True)
def results_flipped(lab: Lab) -> Seen:
    """The table that a finished run prints would tell another number."""
    return damaged(lab, "results.json", flip)


@fault("a file of a model is missing")
def model_file_missing(lab: Lab) -> Seen:
    """The folder alone is no sign that a model is there: it is made again, and the run says why."""
    root = lab.copy()
    (root / "models" / "plain" / "model.safetensors").unlink()
    run = Run.of(load_recipe(root / "recipe.yaml", [f"run_dir={root}"]))
    said = reasons(pending(whole_run.units(run), run.layout.root))[0]
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return Seen(0, said)


@fault("a bit of any hash in digests.json is flipped", brief=True)
def digests_flipped(lab: Lab) -> Seen:
    """Were it believed, a model or a data set would seem to have changed, and all that depends on it would go."""
    root = lab.copy()
    again(root, "policy={model: " + str(lab.finished / "models" / "reference") + "}", until="data")
    whole = (root / "digests.json").read_bytes()
    file = lab.finished / "models" / "reference" / "model.safetensors"
    for place in range(0, len(whole), 5):
        content = bytearray(whole)
        content[place] ^= 1
        (root / "digests.json").write_bytes(content)
        assert Digests(root / "digests.json")(file) == hash_file(file)
    return Seen(0, "")


@fault("the temporary file of a killed process is left among the shards", brief=True)
def temporary_left(lab: Lab) -> Seen:
    """It is hidden, partial and never read."""
    root = lab.copy()
    shard = root / ROLLOUTS
    shard.with_name(f".{'0' * 32}-{shard.name}").write_bytes(shard.read_bytes()[:100])
    assert again(root) == []
    assert tables(root) == tables(lab.finished)
    return Seen(0, "")


# The place to write to


@fault("a file stands where the run directory should be", brief=True)
def file_for_run(lab: Lab) -> Seen:
    """Before anything is computed."""
    (lab.folder / "run").touch()
    recipe = micro.write(lab.folder / "recipe.yaml", micro.settings(lab.folder / "run"))
    said = refused(lambda: whole_run.run_recipe(load_recipe(recipe), console=Console(quiet=True)))
    return Seen(said.exit_code, str(said))


@fault("a file stands where the folder of a stage should be", brief=True)
def file_for_stage(lab: Lab) -> Seen:
    """The stage names it."""
    root = lab.copy()
    undo(root, "calibrate")
    shutil.rmtree(root / "stages")
    (root / "stages").touch()
    said = refused(lambda: again(root))
    return Seen(said.exit_code, str(said))


@fault("the file system of the run directory is read-only", brief=True)
def read_only(lab: Lab) -> Seen:
    """Nothing is computed that could not be kept; what is there can still be looked at."""
    root = lab.copy()
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root))
    with patch("os.open", raising(errno.EROFS)):
        said = refused(lambda: whole_run.run_recipe(load_recipe(path), console=Console(quiet=True)))
    assert status(load_recipe(path)).done
    return Seen(said.exit_code, str(said))


@fault("the run directory was made by a newer version", brief=True)
def newer_version(lab: Lab) -> Seen:
    """Its records may mean something else, so nothing is touched."""
    root = lab.copy()
    record = read_record(root / "stages" / "data.json")
    record |= {"format": FORMAT + 1, "versions": record["versions"] | {"infalign": "9.0"}}
    write_record(root / "stages" / "data.json", record)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet")}
    said = refused(lambda: again(root))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet")} == before
    return Seen(said.exit_code, str(said))


@fault("the disk is full somewhere in a whole run")
def run_full(lab: Lab) -> Seen:
    """The command says what it could not write, and with room again it ends as an undisturbed run."""
    root = lab.folder / "run"
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root))
    ended = subprocess.run(
        [micro.COMMAND, "run", path],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)),
    )
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return Seen(ended.returncode, ended.stderr.removeprefix("infalign: "))
