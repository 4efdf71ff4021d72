"""One process at a time in a run directory: who holds it, what a dead one leaves, who takes no lock."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import micro
import pytest

from infalign.core.distributed import is_first, processes
from infalign.core.errors import InfalignError
from infalign.pipeline.ownership import HOLDER, MARKER, held

HOLD = """
import sys
from pathlib import Path
from infalign.pipeline.ownership import held
with held(Path(sys.argv[1])):
    print('held', flush=True)
    input()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return another process, which holds the run directory ``run``."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def recipe(tmp_path: Path) -> str:
    """Return the path of a recipe that runs in the folder ``run``."""
    return micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run"))


def test_a_second_process_says_who_holds_the_directory(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """It ends with exit code 1 and one sentence with pid and command of the first, and has written nothing."""
    err = micro.refusal("run", recipe(tmp_path), code=1)
    assert err.startswith(f"infalign: the run directory {tmp_path / 'run'} is in use by process {other.pid} on ")
    assert "(-c " in err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", HOLDER, MARKER}


def test_looking_takes_no_lock(main: Any, tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """`status` and `--dry-run` answer while another process works."""
    code, _, err = main("status", recipe(tmp_path))
    assert (code, err) == (4, "")
    assert micro.answer("run", recipe(tmp_path), "--dry-run")


def test_a_dead_process_holds_nothing(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """After SIGKILL the next process takes the directory and the name of the holder; a block may be nested."""
    other.kill()
    other.communicate()
    with held(tmp_path / "run"):
        with held(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / HOLDER).read_text().startswith(f"process {os.getpid()} on ")


def test_of_a_distributed_run_only_the_first_process_takes_the_lock(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others work in a directory that is held, and leave the holder's name alone."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with held(tmp_path / "run"):
        assert (tmp_path / "run" / HOLDER).read_text().startswith(f"process {other.pid} on ")


@pytest.mark.parametrize(
    "environment",
    [
        *({"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "1"}, {"RANK": "2", "WORLD_SIZE": "2"}),
        *({"RANK": "abc", "WORLD_SIZE": "2"}, {"RANK": "", "WORLD_SIZE": ""}, {"RANK": "-1", "WORLD_SIZE": "2"}),
        *({"RANK": "1", "WORLD_SIZE": "2.0"}, {"RANK": "1", "WORLD_SIZE": "-2"}),
        *({"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"}),
    ],
)
def test_stray_variables_make_no_distributed_run(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Without a rank below a number of processes this is the only process."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_first(), processes()) == (True, 1)


def test_a_directory_that_is_moved_meanwhile_is_named(tmp_path: Path) -> None:
    """Instead of the file that somebody did not find."""
    with pytest.raises(InfalignError, match=f"{tmp_path / 'run'} was moved or deleted; rerun"), held(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "other")
