"""The kinds of faults: what injects each, in every instance, and its row of the table."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from faults.lab import Lab, Seen

HEAD = """\
# Faults and what a user sees of them

`make test-faults` injects each of these into a real run and checks what follows: every file that was finished is
intact, none under its final name is partial, and the same command, run again, ends with the tables of an undisturbed
run, bit for bit. Exit code 0 means that the run continues by itself.

| fault | exit code | what the user sees |
| --- | --: | --- |
"""


@dataclass(frozen=True)
class Fault:
    """A kind of fault. Each instance injects it into a lab; the ``brief`` ones are part of ``make test``."""

    what: str
    code: int
    seen: str
    instances: Mapping[str, Callable[[Lab], Seen | None]]
    brief: frozenset[str]

    @property
    def row(self) -> str:
        """The row of the table."""
        return f"| {self.what} | {self.code} | {self.seen} |"


FAULTS: list[Fault] = []
Injects = Callable[..., Seen | None]


def fault(
    code: int, cases: Mapping[str, Any] | None = None, *, brief: bool | tuple[str, ...] = False
) -> Callable[[Injects], Injects]:
    """Add the kind that the decorated function injects, given the arguments of each of the ``cases``, if there are any.

    The docstring is its row of the table: the fault → what the user sees, who gets the exit code ``code``. The function
    returns what is seen, or None if the run continues by itself.
    """

    def add(inject: Injects) -> Injects:
        instances: dict[str, Callable[[Lab], Seen | None]] = {"": inject}
        if cases is not None:
            instances = {name: partial(_inject, inject, arguments) for name, arguments in cases.items()}
        chosen = frozenset(instances if brief is True else brief or ())
        assert chosen <= set(instances)
        what, _, seen = " ".join((inject.__doc__ or "").split()).partition(" → ")
        FAULTS.append(Fault(what, code, seen, instances, chosen))
        return inject

    return add


def _inject(inject: Callable[..., Seen | None], arguments: Any, lab: Lab) -> Seen | None:
    return inject(lab, *(arguments if isinstance(arguments, tuple) else (arguments,)))


def faults() -> list[Fault]:
    """Return the kinds of all modules of this package."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__package__}.{module.name}")
    return FAULTS


def page() -> str:
    """Return docs/faults.md."""
    return HEAD + "".join(f"{kind.row}\n" for kind in faults())
