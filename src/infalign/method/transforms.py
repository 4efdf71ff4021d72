"""Transformations Φ of the calibrated reward: values that know their name and their scale.

A transformation returns a *normalized* Φ (for training: raw e^{10u} gives gradient norms of 10⁵). What users type and
read as β belongs to the paper's raw Φ = ``scale`` × Φ_normalized; divided by ``scale`` it goes with the normalized Φ.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlog1py

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean
from infalign.method.calibration import Array, calibrate

LARGEST_T = 500.0  # e^{700} is the end of floating-point numbers
LARGEST_M = 1e6  # beyond it no node of a quadrature sees the power
LARGEST_VALUE = 1e150  # the largest in a table, so that differences and products stay finite

T = TypeVar("T")


@runtime_checkable
class Transformation(Protocol):
    """A function on [0, 1] with a name; the paper's raw Φ is ``scale`` times its value."""

    @property
    def name(self) -> str:
        """The spelling for the command line and reports."""

    @property
    def scale(self) -> float:
        """Raw Φ divided by normalized Φ."""

    def __call__(self, u: ArrayLike) -> Array:
        """Return the normalized Φ at calibrated rewards ``u``."""

    def drop(self, v: ArrayLike) -> Array:
        """Return Φ(1 − v) − Φ(1), normalized, with full relative accuracy where 1 − v rounds to 1."""

    @property
    def edges(self) -> Array:
        """The 1 − u between which it is smooth."""

    @property
    def is_rounded(self) -> bool:
        """Whether it has no digits of 1 − u near u = 1."""


def at_ranks(transform: Transformation, u: ArrayLike, rollouts: int) -> Array:
    """Return Φ(u) for ranks ``u`` among ``rollouts`` references, finite everywhere.

    A response worse than all K has rank 0, where log is −∞; there Φ is taken at 1/(2K), the worst rollout's mid-rank.
    Raises ConfigError where Φ is not finite otherwise.
    """
    u = np.asarray(u, float)
    u = np.where((u == 0) & (transform(u) == -np.inf), 0.5 / rollouts, u)
    phi = np.asarray(transform(u))
    bad = ~np.isfinite(phi)
    if bad.any():
        raise ConfigError(
            f"the transformation {transform.name} is {phi[bad][0]:g} at rank {u[bad][0]:g}; it must be finite at "
            "every rank above 0, and finite or −∞ at 0"
        )
    return phi


@dataclass(frozen=True, slots=True)
class Ranked:
    """Φ(Ĉ), a transformation of the calibrated reward; its name and scale are the transformation's."""

    transform: Transformation

    @property
    def name(self) -> str:
        return self.transform.name

    @property
    def scale(self) -> float:
        return self.transform.scale

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        """Return the normalized Φ(Ĉ); raises ConfigError too, where Φ is not finite."""
        return at_ranks(self.transform, calibrate(rewards, reference_rewards_K), np.size(reference_rewards_K))


class ByRank:
    """Base of the transformations: smooth inside, and with all digits of 1 − u."""

    __slots__ = ()
    is_rounded: ClassVar[bool] = False

    @property
    def edges(self) -> Array:
        """None besides 0 and 1."""
        return np.empty(0)


@dataclass(frozen=True, slots=True)
class Identity(ByRank):
    """Φ(u) = u: the expected win rate itself, the objective of IPO."""

    name = "identity"
    scale = 1.0

    def __call__(self, u: ArrayLike) -> Array:
        return np.array(u, float)

    def drop(self, v: ArrayLike) -> Array:
        return -np.asarray(v, float)


@dataclass(frozen=True, slots=True)
class Log(ByRank):
    """Φ(u) = log u: the objective of best-of-N distillation (BOND, vBoN); −∞ at u = 0."""

    name = "log"
    scale = 1.0

    def __call__(self, u: ArrayLike) -> Array:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.asarray(u, float)))

    def drop(self, v: ArrayLike) -> Array:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log1p(-np.asarray(v, float)))


@dataclass(frozen=True, slots=True)
class Exponential(ByRank):
    """Φ_t(u) = sign(t)·e^{tu}, normalized to a maximum modulus of 1; t > 0 favors the top, t < 0 spares the bottom.

    >>> Exponential(10)([0.5, 1.0]).round(4)
    array([0.0067, 1.    ])
    """

    t: float

    def __post_init__(self) -> None:
        if not 0 < abs(self.t) <= LARGEST_T:
            raise ConfigError(f"exp:t needs a finite t with 0 < |t| ≤ {LARGEST_T:g}, found {self.t:g}")

    @property
    def name(self) -> str:
        """``exp:10`` for t = 10."""
        return f"exp:{self.t:.15g}"

    @property
    def scale(self) -> float:
        """e^t for t > 0, where the normalized form is e^{t(u−1)}; 1 for t < 0."""
        return float(np.exp(max(self.t, 0.0)))

    def __call__(self, u: ArrayLike) -> Array:
        return np.asarray(np.sign(self.t) * np.exp(self.t * np.asarray(u, float) - max(self.t, 0.0)))

    def drop(self, v: ArrayLike) -> Array:
        return np.asarray(np.sign(self.t) * np.exp(min(self.t, 0.0)) * np.expm1(-self.t * np.asarray(v, float)))


@dataclass(frozen=True, slots=True)
class Power(ByRank):
    """Φ(u) = u^m for m > 0 and −(1−u)^|m| for m < 0, its mirror.

    With m = 2N−1, or −(2N−1), it is the limit of the optimal transformation for Best-of-N, or Worst-of-N, at small KL.
    """

    m: float

    def __post_init__(self) -> None:
        if not 0 < abs(self.m) <= LARGEST_M:
            raise ConfigError(f"power:M needs a finite M with 0 < |M| ≤ {LARGEST_M:g}, found {self.m:g}")

    @property
    def name(self) -> str:
        return f"power:{self.m:.15g}"

    scale = 1.0

    def __call__(self, u: ArrayLike) -> Array:
        u = np.asarray(u, float)
        return np.asarray(u**self.m if self.m > 0 else -((1.0 - u) ** -self.m))

    def drop(self, v: ArrayLike) -> Array:
        v = np.asarray(v, float)
        if self.m < 0:
            return np.asarray(-(v**-self.m))
        with np.errstate(divide="ignore"):
            return np.asarray(np.expm1(xlog1py(self.m, -v)))


@dataclass(frozen=True, eq=False)
class Tabulated(ByRank):
    """A transformation given by its values, for example a solved optimum, saved as JSON.

    ``v`` = 1 − u ascends from 0 to 1 (ranks counted from the top, where an optimum has its fine structure), ``phi`` is
    the paper's raw Φ there, ``slope`` its derivative by v; between the knots it is the cubic that agrees with both.
    Two neighboring knots make a jump. Raises ConfigError for an invalid table.

    >>> line = Tabulated("line", np.array([0.0, 1.0]), np.array([0.0, -2.0]), np.array([-2.0, -2.0]))
    >>> line([0.0, 0.5, 1.0]), line.scale
    (array([-1. , -0.5,  0. ]), 2.0)
    """

    name: str
    v: Array = field(repr=False)
    phi: Array = field(repr=False)
    slope: Array = field(repr=False)

    def __post_init__(self) -> None:
        for column, values in (("v", self.v), ("phi", self.phi), ("slope", self.slope)):
            if values.ndim != 1 or values.shape != self.v.shape or not (np.abs(values) <= LARGEST_VALUE).all():
                raise ConfigError(
                    f"{self.name}: {column} must be a list of finite numbers (at most {LARGEST_VALUE:g}), as long as v"
                )
        if len(self.v) < 2 or self.v[0] != 0 or self.v[-1] != 1 or (np.diff(self.v) <= 0).any():
            raise ConfigError(f"{self.name}: v must increase strictly from 0 to 1")
        if np.ptp(self.phi) == 0:
            raise ConfigError(f"{self.name}: phi is constant, so there is nothing to learn")

    @property
    def edges(self) -> Array:
        """The knots, between which it is one polynomial each."""
        return self.v

    @property
    def scale(self) -> float:
        """The range of raw Φ."""
        return float(np.ptp(self.phi))

    def __call__(self, u: ArrayLike) -> Array:
        return self.drop(1.0 - np.asarray(u, float)) + float(self.phi[0]) / self.scale

    def drop(self, v: ArrayLike) -> Array:
        v = np.asarray(v, float)
        k = np.clip(np.searchsorted(self.v, v, side="right") - 1, 0, len(self.v) - 2)
        start, end = ((self.phi[at] - self.phi[0]) / self.scale for at in (k, k + 1))
        width, rise = self.v[k + 1] - self.v[k], end - start
        x = (v - self.v[k]) / width  # in each piece's own coordinate: knots may be 1e-200 apart
        first, last = self.slope[k] / self.scale * width, self.slope[k + 1] / self.scale * width
        return np.asarray(start + x * (first + x * (3.0 * rise - 2.0 * first - last + x * (first + last - 2.0 * rise))))

    def to_json(self) -> str:
        """Return the text of a file that ``parse_transform`` reads, and so every recipe accepts."""
        columns = {column: getattr(self, column).tolist() for column in ("v", "phi", "slope")}
        return json.dumps({"name": self.name, **columns}) + "\n"


@dataclass(frozen=True)
class Function(ByRank):
    """Any function of the calibrated reward as a transformation: ``Function("sqrt", np.sqrt)``.

    ``phi`` works on arrays in [0, 1]; it is taken as it is (``scale`` 1). Close to u = 1 its values are rounded, so
    theory certifies laws with it only up to a KL of some 15 nats.

    >>> Function("sqrt", np.sqrt)([0.25, 1.0])
    array([0.5, 1. ])
    """

    name: str
    phi: Callable[[Array], ArrayLike]
    scale = 1.0
    is_rounded = True

    def __call__(self, u: ArrayLike) -> Array:
        u = np.asarray(u, float)
        with np.errstate(all="ignore"):  # theory refuses what is NaN or +∞
            return np.full(u.shape, np.asarray(self.phi(u), float))

    def drop(self, v: ArrayLike) -> Array:
        """Return Φ(1 − v) − Φ(1), or Φ(1 − v) where Φ is infinite at 1."""
        top = self(1.0)
        return self(1.0 - np.asarray(v, float)) - np.where(np.isfinite(top), top, 0.0)


def parse_transform(name: str) -> Transformation:
    """Return the transformation that ``name`` spells, or that the JSON file of that name holds.

    ``identity``, ``log``, ``exp:10``, ``exp:-10``, ``power:7``, ``power:-7``, ``some/table.json``. Raises ConfigError
    for another name and for a file that is no table.

    >>> parse_transform("exp:10")
    Exponential(t=10.0)
    """
    if name.endswith(".json"):
        return read_table(Path(name))
    if transform := spelled_by(SPELLINGS, name):
        return transform
    raise ConfigError(
        f"unknown transformation {name!r}; known: {', '.join(SPELLINGS)}, and a table's FILE.json"
        f"{did_you_mean(name, SPELLINGS, after='; ')}"
    )


SPELLINGS: dict[str, Callable[..., Transformation]] = {
    "identity": Identity,
    "log": Log,
    "exp:T (for example exp:10 or exp:-10)": Exponential,
    "power:M": Power,
}


def spelled_by(spellings: Mapping[str, Callable[..., T]], name: str) -> T | None:
    """Return what ``name`` spells: a kind and, after a colon, the number that its spelling names; None if nothing."""
    kind, colon, argument = name.partition(":")
    with suppress(ValueError):  # of what is no number
        for spelling, make in spellings.items():
            if kind == spelling.partition(":")[0] and bool(colon) == (":" in spelling):
                return make(float(argument)) if colon else make()
    return None


def read_table(path: Path, name: str | None = None) -> Transformation:
    """Return the table that a file holds, under a ``name`` or its own, or what a file with a name alone spells.

    Raises ConfigError for another file.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if list(table) == ["name"] and (spelled := spelled_by(SPELLINGS, str(table["name"]))):
            return spelled
        columns = (np.array(table[column], float) for column in ("v", "phi", "slope"))
        return Tabulated(name or str(table["name"]), *columns)
    except OSError as error:
        raise ConfigError(f"cannot read the transformation {path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path} was not written by `infalign choose`: {error!r}") from error
