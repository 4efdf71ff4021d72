"""Work on a file in a process with limits: what it does to that process, and what it says of the file."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infalign.confined import GIGABYTES, SECONDS, BombError, rehearse
from infalign.core.errors import ConfigError, DataError


def harmless(path: str) -> Iterator[str]:
    """Read a file."""
    yield "its text"
    Path(path).read_text()


def wrong(path: str) -> Iterator[str]:
    """Find an error of ours."""
    yield "its text"
    raise DataError(f"{path} is wrong")


def foreign(path: str) -> Iterator[str]:
    """Find an error of a library."""
    yield "its text"
    raise KeyError(path)


def panic(path: str) -> Iterator[str]:
    """Raise what no `except Exception` catches."""
    yield "its text"
    raise GeneratorExit("at byte\n7")


def crash(path: str) -> Iterator[str]:
    """End the process as a fault in a library does."""
    yield "its text"
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(path: str) -> Iterator[str]:
    """End the process without a word."""
    yield "its text"
    os._exit(3 + 6)


def endless(path: str) -> Iterator[str]:
    """Take time for ever."""
    yield "its text"
    while True:
        pass


def hungry(path: str) -> Iterator[str]:
    """Take memory for ever, in parts that code of C takes at once."""
    yield "its head"
    held = []
    yield "its text"
    while True:
        held.append(b"x" * 10**8)


def counted(path: str) -> Iterator[str]:
    """Leave a mark next to the file."""
    yield "its text"
    with Path(f"{path}.marks").open("a") as marks:
        marks.write("x")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file."""
    path = tmp_path / "file"
    path.write_text("text")
    return path


@pytest.mark.parametrize("work", [harmless, foreign])
def test_what_ends_within_the_limits_is_no_finding(file: Path, work: Callable[[str], Iterator[str]]) -> None:
    """Nor is another library's error: whoever does the work for its result says what is wrong."""
    rehearse(work, file)


def test_an_error_of_ours_comes_back(file: Path) -> None:
    """With its class and words."""
    with pytest.raises(DataError) as raised:
        rehearse(wrong, file)
    assert str(raised.value) == f"{file} is wrong"


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (panic, "its text fails: GeneratorExit: at byte 7"),
        (crash, "its text ends the process that reads it (SIGSEGV)"),
        (leave, "its text ends the process that reads it (exit code 9)"),
        (endless, f"its text asks for more than 3 s of processor time; if it is to, raise {SECONDS}"),
        (hungry, f"its text asks for more than 1 GB of memory; if it is to, raise {GIGABYTES}"),
    ],
)
def test_a_bomb_is_named_by_what_was_read_last(
    file: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[str], Iterator[str]], said: str
) -> None:
    """No process is left."""
    monkeypatch.setenv(GIGABYTES, "1")
    monkeypatch.setenv(SECONDS, "3")
    with pytest.raises(BombError) as raised:
        rehearse(work, file)
    assert str(raised.value) == said
    assert not [child for child in psutil.Process().children() if "infalign.confined" in child.cmdline()]


@pytest.mark.parametrize("value", ["", "much", "0", "-1", "nan", "inf"])
def test_a_limit_is_a_positive_number(file: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The variable and what it holds are named."""
    monkeypatch.setenv(GIGABYTES, value)
    with pytest.raises(ConfigError, match=f"{GIGABYTES} is a number of 1 or more; found {value}"):
        rehearse(harmless, file)


def test_a_file_that_passed_is_not_read_again_until_it_changes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with the limits that it passed; one that failed is read again."""
    marks = Path(f"{file}.marks")
    for _ in range(2):
        rehearse(counted, file)
    assert marks.read_text() == "x"
    file.write_text("another text")
    rehearse(counted, file)
    assert marks.read_text() == "xx"
    monkeypatch.setenv(SECONDS, "50")
    rehearse(counted, file)
    assert marks.read_text() == "xxx"
    for _ in range(2):
        with pytest.raises(DataError):
            rehearse(wrong, file)
