"""What several commands share: options, the functions that read them, and where they write to."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter, Token
from cyclopts.validators import Number
from rich.console import Console

from infalign.core.distributed import is_first
from infalign.core.errors import ConfigError
from infalign.core.spelling import nearest
from infalign.recipe.built_in import ENDINGS, built_in

if TYPE_CHECKING:
    from infalign.recipe.settings import Recipe


def _whole(_: type, tokens: Sequence[Token]) -> int:
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"it takes a whole number; found {text!r}") from None


WHOLE = Parameter(converter=_whole)  # cyclopts alone would read 1.5 as 2
Overrides = Annotated[
    list[str] | None, Parameter(name="--set", help="Change a setting, e.g. --set rollout.k=16. Repeatable.")
]
AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON and nothing else.")]
Host = Annotated[str, Parameter(help="The address to listen on.")]
Port = Annotated[int, WHOLE, Parameter(help="The port to listen on.", validator=Number(gte=1, lte=65535))]
BaseName = Annotated[str | None, Parameter(help="How the base policy is served, if not the same way.")]


def read_recipe(path: str, overrides: list[str] | None, skip_invalid: bool = False) -> "Recipe":
    """Return the recipe with the changes of ``--set`` and ``--skip-invalid``."""
    from infalign.recipe.reading import load_recipe
    from infalign.steps.time_estimate import within_minutes

    return within_minutes(load_recipe(path, [*(overrides or []), *["data.skip_invalid=true"] * skip_invalid]))


def read_run_or_recipe(name: str, overrides: list[str] | None, skip_invalid: bool = False) -> "Recipe":
    """Return the recipe of the last run in a folder, or else the recipe itself."""
    from infalign.steps.status import recorded_recipe

    path, names = Path(name), built_in()
    if path.is_dir():
        return recorded_recipe(path, overrides)
    if path.suffix in ENDINGS or name in names or path.is_file():
        return read_recipe(name, overrides, skip_invalid)
    runs = {folder.parent.name: str(folder.parent) for folder in path.parent.glob("*/recipe.yaml")}
    known = runs | ({word: word for word in names} if name == path.name else {})
    near = nearest(path.name, known)
    cure = f"did you mean {known[near]}?" if near else "give a run_dir or a recipe"
    raise ConfigError(f"no run directory and no recipe is named {name}; {cure}")


def new_file(path: Path, *endings: str) -> Path:
    """Return the path of a file that can be written. Raises ConfigError for another ending or a missing folder."""
    if path.suffix not in endings:
        raise ConfigError(f"the file name {path} must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path.name}: the folder {path.parent} does not exist")
    return path


class _Piped(Console):
    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError; rich would end with exit code 1 and say nothing


def open_console(file: TextIO | None = None) -> Console:
    """Return the console for stdout, silent in all but the first process of a distributed training."""
    return _Piped(file=file, quiet=not is_first(), emoji=False)  # `:rewind:` is a procedure, no emoji


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
