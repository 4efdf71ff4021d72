"""Signals reach the command also where a library's code, or Python's own, would make another error of them."""

import signal
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
