"""Signals reach the command also where a library's code, or Python's own, would make another error of them."""

import signal
import subprocess
import sys
import time

import pytest

from infalign.core.signals import raise_outside


def test_a_signal_while_a_class_is_made_is_no_error_of_the_class() -> None:
    """Python 3.11 makes a RuntimeError of what `__set_name__` raises, as of Ctrl-C while a library is imported."""

    class Slow:
        def __set_name__(self, owner: type, name: str) -> None:
            raise_outside(KeyboardInterrupt, sys._getframe())

    before = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(KeyboardInterrupt):
            time.sleep(len(type("Made", (), {"slow": Slow()}).__name__))  # the signal comes once the class is made
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback() -> None:
    """The signal comes while the first library is imported, as it does within a second of the start."""
    interrupt = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    interrupt += "class Slow:\n    def find_spec(self, name, path, target=None):\n"
    interrupt += "        name == 'cyclopts' and os.kill(os.getpid(), signal.SIGINT)\n"
    start = "sys.meta_path.insert(0, Slow())\nfrom infalign.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", interrupt + start], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
