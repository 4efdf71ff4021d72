"""Procedures of the user's own: a class or an instance in a file or a module, spelled FILE.py:NAME."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.core.user_code import function_name, imported, is_file, source_file, user_code
from infalign.method.calibration import Array
from infalign.method.procedures.base import Ask, Draws, RankProcedure, Serving, checked_samples, weights_from_counts
from infalign.method.quadrature import adapted, graded

SPELLINGS = ("FILE.py:NAME (your own)",)
TOLERANCE = 1e-3  # of a distortion, whose density may jump


@dataclass(frozen=True, slots=True)
class Own:
    """A procedure with `weights` and `serving`, equal to any with its spelling. Raises ConfigError for bad numbers."""

    spelling: str
    made: Any = field(repr=False, compare=False)
    asks: ClassVar[Any] = Ask

    @property
    def name(self) -> str:
        """The spelling without the folder: ``mine.py:Mine``."""
        return function_name(self.spelling)

    def __reduce__(self) -> tuple[Any, ...]:  # another process imports it anew
        return parse, (self.spelling,)

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Return its weights, if they are probabilities."""
        weights = self._values("weights", checked_samples(rewards_PM, 1, self.name))
        if weights.min() < -1e-9 or not np.allclose(weights.sum(axis=1), 1.0):
            raise self._wrong(f"weights of {weights.shape[1]} samples must be probabilities that sum to 1")
        return weights

    def serving(self, rng: np.random.Generator) -> Serving:
        """Serve as it does: it asks as others do, and returns the index of a draw or of the next one."""
        drawn, answer, serving = 0, None, self.made.serving(rng)
        while True:
            with self._running("serving"):
                try:
                    ask = serving.send(answer)
                except StopIteration as ended:
                    if ended.value not in range(drawn + 1):
                        raise ValueError(f"it returns {ended.value!r} after {drawn} draws") from None
                    return int(ended.value)
                if not isinstance(ask, self.asks):
                    raise TypeError(f"it yields {getattr(self.asks, '__name__', self.asks)}, found {ask!r}")
                drawn += getattr(ask, "number", 0)
            answer = yield ask

    def _values(self, method: str, given: Array) -> Array:
        with self._running(method):
            values = np.asarray(getattr(self.made, method)(given.copy()), float)
        if values.shape != given.shape or not np.isfinite(values).all():
            returned = values.shape if values.shape != given.shape else values[~np.isfinite(values)][0]
            raise self._wrong(f"{method} must return one finite number for each of {given.shape}, found {returned}")
        return values

    def _running(self, method: str) -> AbstractContextManager[None]:
        return user_code(f"procedure {self.name}: {method} raised", ConfigError)

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"procedure {self.name}: {what}")


@dataclass(frozen=True, slots=True)
class OwnByRank(Own):
    """One that only looks at ranks: it has a distortion, and its density, which are checked."""

    asks = Draws

    def __post_init__(self) -> None:
        p = np.linspace(0.0, 1.0, 1001)
        h = self.distortion(p)
        falls = np.diff(h).min() < -1e-9
        if falls or not np.allclose(h[[0, -1]], (0.0, 1.0), atol=1e-9):
            course = f"{h[0]:g} to {h[-1]:g}{', falling between' if falls else ''}"
            raise self._wrong(f"distortion must rise from h(0) = 0 to h(1) = 1, found {course}")
        panels, _ = adapted(graded(), lambda panels: (self.density(panels.u),))
        if (off := np.abs(panels.integral_to(self.density(panels.u), p) - h)).max() > TOLERANCE:
            raise self._wrong(f"density must be the derivative of distortion; up to {p[off.argmax()]:g} it is not")

    def distortion(self, p: ArrayLike) -> Array:
        return self._values("distortion", np.asarray(p, float))

    def density(self, p: ArrayLike) -> Array:
        return self._values("density", np.asarray(p, float))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        """Return its weights of distinct ranks, shared evenly within ties."""
        rewards = checked_samples(rewards_PM, 1, self.name)
        of_ranks = super(OwnByRank, self).weights(np.arange(rewards.shape[1])[None])[0]
        return weights_from_counts(rewards, np.append(0.0, np.cumsum(of_ranks)))


def parse(name: str) -> RankProcedure | None:
    """Return the procedure that a file or a module defines under ``name``, whose code runs; None for another spelling.

    A class is called without arguments. One without distortion and density, which only has the type, is refused by
    `looks_at_ranks` where it matters. Raises ConfigError for what is not there or does not keep to the protocol.
    """
    place, _, last = name.rpartition(":")
    if not last.isidentifier() or not (is_file(name) or (place and source_file(name))):
        return None
    spelling = f"{Path(place).absolute()}:{last}" if is_file(name) else name
    made = imported(spelling, "procedure")
    if isinstance(made, type):
        with user_code(f"procedure {name!r}: {last}() raised", ConfigError):
            made = made()
    has_law = hasattr(made, "distortion") or hasattr(made, "density")
    for method in ("weights", "serving", *(("distortion", "density") if has_law else ())):
        if not callable(getattr(made, method, None)):
            problem = f"{last} has no method {method}" if made is not None else f"{place} has no {last}"
            raise ConfigError(f"procedure {name!r}: {problem}")
    return cast(RankProcedure, (OwnByRank if has_law else Own)(spelling, made))
