"""Where commands write to: a console, or JSON on stdout."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console

from infalign.core.distributed import is_first


class _Piped(Console):
    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError; rich would end with exit code 1 and say nothing


def open_console(file: TextIO | None = None) -> Console:
    """Return the console for stdout, silent in all but the first process of a distributed training."""
    quiet = not is_first()
    return _Piped(file=file, quiet=quiet, emoji=False)  # `:rewind:` is a procedure, no emoji


@contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Yield stdout; what others print meanwhile, a user's code, C or processes that are started, goes to stderr."""
    whole = sys.__stdout__
    if whole is None or whole is not sys.stdout or sys.stderr is None:  # closed, or redirected
        yield sys.stdout
        return
    with os.fdopen(os.dup(1), "w", encoding=whole.encoding, errors="replace") as own:
        os.dup2(2, 1)
        try:
            with redirect_stdout(sys.stderr):
                yield own
        finally:
            os.dup2(own.fileno(), 1)


def print_json(record: Any) -> None:
    """Print a record as JSON on stdout."""
    print(json.dumps(record, indent=2))
