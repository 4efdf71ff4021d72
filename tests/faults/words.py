"""What a dry run says of a recipe that cannot work, and what is said of odd files in a run directory."""

import os
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import micro
import torch

from faults.data import infalign
from faults.registry import Lab, Seen, again, fault, tables
from faults.rewards import calibrate_with, module, told
from infalign.core.storage import write_text
from infalign.pipeline.lock import HOLDER, holder


def dry_run(lab: Lab, setting: str, more: str = "seed=0") -> Seen:
    """Plan a run with a setting that cannot work: the plan is refused, and nothing is written."""
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(lab.folder / "run"))
    setting = setting.replace("FINISHED", str(lab.finished))
    code, _, said = infalign("run", path, "--dry-run", "--set", setting, "--set", more)
    assert code == 2, said
    assert not (lab.folder / "run").exists()
    return Seen(code, said.replace(str(lab.finished), "…"))


fault("the heads of a model from scratch do not divide its width", brief=True)(
    partial(dry_run, setting="policy.scratch.heads=3")
)
fault("a prompt and its response exceed the context of a model folder")(
    partial(
        dry_run,
        setting="policy={model: FINISHED/models/aware, fit: {max_length: 100}}",
        more="data.max_prompt_tokens=190",
    )
)


def warned(lab: Lab, setting: str, about: str) -> Seen:
    """Plan a run with a setting that may be a mistake: the plan has a warning."""
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(lab.folder / "run"))
    code, out, said = infalign("run", path, "--dry-run", "--set", setting)
    assert (code, said) == (0, "")
    (warning,) = (line for line in out.splitlines() if line.startswith("! ") and about in line)
    return Seen(code, warning)


@fault("compute.device is cuda where there is no GPU", brief=True)
def no_gpu(lab: Lab) -> Seen:
    """A dry run warns, since it may be for another machine; a run is refused before any worker starts."""
    root = lab.copy()
    with patch.object(torch.cuda, "is_available", lambda: False):
        assert "finds no GPU" in warned(lab, "compute.device=cuda", "GPU").said
        seen = told(lambda: again(root, "compute.device=cuda", "policies.aware.kl_budget=0.7"))
    assert (root / "models" / "aware").is_dir()
    return seen


fault("rollout.prompts is more than the data has")(
    partial(warned, setting="rollout.prompts=100000", about="rollout.prompts")
)


@fault("nobody listens at the URL of a recipe that is planned")
def dead_url(lab: Lab) -> Seen:
    """The dry run says so; the server may be started later."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        seen = warned(lab, f"reward={{url: 'http://127.0.0.1:{port}/get_reward'}}", port)
    return Seen(seen.code, seen.said.replace(port, "PORT"))


# In the run directory


def odd_holder(lab: Lab, content: str) -> Seen:
    """A holder's file that names nobody holds nobody up."""
    root = lab.copy()
    write_text(root / HOLDER, content)
    assert holder(root) is None
    assert infalign("status", root)[0] == 0
    assert again(root) == []
    return Seen(0, "")


fault("the file that names the lock's holder is torn", brief=True)(partial(odd_holder, content='{"pid": 1, "ho'))
fault("the file that names the lock's holder is a list", brief=True)(partial(odd_holder, content="[1]"))


def odd_record(lab: Lab, put: Callable[[Path], object]) -> Seen:
    """What is no record is named, nothing is touched, and without it the run goes on."""
    root = lab.copy()
    record = root / "stages" / "mine.json"
    put(record)
    code, _, said = infalign("status", root)
    assert code == 3
    assert told(lambda: again(root)).said == said.strip()
    record.unlink() if record.is_symlink() else record.rmdir()
    assert again(root) == []
    assert tables(root) == tables(lab.finished)
    return Seen(code, said)


fault("a directory lies among the records", brief=True)(partial(odd_record, put=Path.mkdir))
fault("a link to nowhere lies among the records", brief=True)(
    partial(odd_record, put=lambda path: path.symlink_to("nowhere"))
)


@fault("the disk has room and no inodes", brief=True)
def no_inodes(lab: Lab) -> Seen:
    """The message says which of the two is missing."""
    disk = SimpleNamespace(f_bavail=10**6, f_frsize=4096, f_files=10**6, f_favail=0)

    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    with patch("os.statvfs", lambda _: disk), patch("os.fsync", refuse):
        return told(lambda: write_text(lab.folder / "table.txt", "rows"))


@fault("a reward function gives 1e308 and -1e308", brief=True)
def huge(lab: Lab) -> Seen:
    """Their difference is no number, and the report would fail hours later."""
    source = "def reward(prompts, responses):\n    return [1e308 * (-1) ** len(r) for r in responses]\n"
    root = lab.copy()
    with module(lab, source, "huge"):
        return told(lambda: calibrate_with(root, "{function: 'huge:reward'}"))


@fault("an error repeats terminal escapes of a model folder", brief=True)
def escapes(lab: Lab) -> Seen:
    """They are shown, and colour nothing."""
    folder = lab.folder / "model"
    shutil.copytree(lab.finished / "models" / "reference", folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('\x1b[31mred\x1b]0;mine\x07') }}")
    seen = dry_run(lab, f"policy={{model: {folder}}}")
    assert "red" in seen.said
    assert seen.said.strip().isprintable()
    return seen
