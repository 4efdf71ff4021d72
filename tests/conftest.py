"""What several test files use."""

import signal
import sys
from typing import Any

import pytest

from infalign import cli


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command line in this process and returns exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["infalign", *map(str, words)])
        before = signal.getsignal(signal.SIGTERM)
        try:
            cli.main()
            code: Any = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        finally:
            signal.signal(signal.SIGTERM, before)
        return code, *capsys.readouterr()

    return run
