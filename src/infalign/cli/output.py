"""Where commands write to: a console, or JSON on stdout."""

import json
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


def print_json(record: Any) -> None:
    """Print a record as JSON on stdout."""
    print(json.dumps(record, indent=2))
