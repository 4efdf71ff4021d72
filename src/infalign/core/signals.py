"""Signals as exceptions that arrive: some code of libraries catches everything."""

import signal
from types import FrameType

SWALLOWING = {"datasets.fingerprint"}  # modules that call other code in a bare `try: … except:`
AGAIN = 0.02  # seconds


def raise_outside(error: type[BaseException], frame: FrameType | None) -> None:
    """Raise ``error`` in a signal's handler, which was given ``frame``; inside of what would swallow it, once out."""
    place = frame
    while place is not None:
        if place.f_globals.get("__name__") in SWALLOWING:
            signal.signal(signal.SIGALRM, lambda _, later: raise_outside(error, later))
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            return
        place = place.f_back
    raise error
