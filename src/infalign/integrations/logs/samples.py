"""What every reader of a log gives."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infalign.core.errors import ConfigError, DataError

Note = Callable[[str], None]
ANY = "*"  # score, where a checker takes its place


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of ``model`` to ``prompt``, which identifies a prompt; no ``reward`` is no score.

    Without a ``number`` responses to a prompt count as they come. ``asked`` is the prompt as a checker takes it, text
    or messages, and ``about`` holds further fields of the log.
    """

    prompt: str
    model: str
    reward: float | None
    number: int | None = None
    text: str | None = None
    answer: str | None = None
    error: str | None = None
    asked: Any = ""
    about: Mapping[str, Any] = field(default_factory=dict)


def number(value: object) -> float | None:
    """Return a score as a number, None for none and NaN. Raises DataError for infinity and for what is no number."""
    if value is None or value != value:
        return None
    if not isinstance(value, int | float) or math.isinf(value):
        raise DataError(f"the score {value!r} is not a finite number; correct it, or name another score")
    return float(value)


def choose(names: Sequence[str], score: str | None, usual: str | None = None) -> str:
    """Return ``score``; without one the usual or only name, for `ANY` also the first, or "".

    Raises ConfigError with all names.
    """
    if score in (None, ANY):
        if usual is not None and usual in names:
            return usual
        if score == ANY or (usual is None and len(names) == 1):
            return next(iter(names), "")
    if score is None or score not in names:
        missing = "there are several" if len(names) > 1 else f"there is no {usual or 'number'}"
        problem = missing if score is None else f"{score!r} is not one of them"
        raise ConfigError(f"name one score: {problem} ({' or '.join(names) or 'the log has none'})")
    return score
