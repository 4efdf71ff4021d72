"""Transformations Φ of the calibrated reward: values that know their name and their scale.

A transformation returns a *normalised* Φ (for training: raw e^{10u} gives gradient norms of 10⁵). What users type and
read as β belongs to the paper's raw Φ = ``scale`` × Φ_normalised; :func:`normalised_beta` is the one conversion.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from infalign.calibration import Array
from infalign.errors import ConfigError

LARGEST_T = 500.0  # e^{700} is the end of floating-point numbers


class Transformation(Protocol):
    """A function on [0, 1] with a name; the paper's raw Φ is ``scale`` times its value."""

    @property
    def name(self) -> str:
        """The spelling for the command line and reports."""

    @property
    def scale(self) -> float:
        """Raw Φ divided by normalised Φ."""

    def __call__(self, u: ArrayLike) -> Array:
        """Return the normalised Φ at calibrated rewards ``u``."""


def normalised_beta(transform: Transformation, beta: float) -> float:
    """Convert the paper's β, which weighs KL against raw Φ, to the β that goes with the normalised Φ."""
    return beta / transform.scale


@dataclass(frozen=True, slots=True)
class Identity:
    """Φ(u) = u: the expected win rate itself, the objective of IPO."""

    name = "identity"
    scale = 1.0

    def __call__(self, u: ArrayLike) -> Array:
        """Return u."""
        return np.array(u, float)


@dataclass(frozen=True, slots=True)
class Log:
    """Φ(u) = log u: the objective of best-of-N distillation (BOND, vBoN); −∞ at u = 0."""

    name = "log"
    scale = 1.0

    def __call__(self, u: ArrayLike) -> Array:
        """Return log u."""
        with np.errstate(divide="ignore"):
            phi: Array = np.log(np.asarray(u, float))
        return phi


@dataclass(frozen=True, slots=True)
class Exponential:
    """Φ_t(u) = sign(t)·e^{tu}, normalised to a maximum modulus of 1; t > 0 favours the top, t < 0 spares the bottom."""

    t: float

    def __post_init__(self) -> None:
        if not 0 < abs(self.t) <= LARGEST_T:
            raise ConfigError(f"exp:t needs a finite t with 0 < |t| ≤ {LARGEST_T:g}, found {self.t:g}")

    @property
    def name(self) -> str:
        """``exp:10`` for t = 10."""
        return f"exp:{self.t:g}"

    @property
    def scale(self) -> float:
        """e^t for t > 0, where the normalised form is e^{t(u−1)}; 1 for t < 0."""
        return float(np.exp(max(self.t, 0.0)))

    def __call__(self, u: ArrayLike) -> Array:
        """Return the normalised sign(t)·e^{tu}."""
        phi: Array = np.sign(self.t) * np.exp(self.t * np.asarray(u, float) - max(self.t, 0.0))
        return phi


def parse_transform(name: str) -> Transformation:
    """Return the transformation that ``name`` spells: ``identity``, ``log``, ``exp:10``, ``exp:-10``."""
    kind, _, argument = name.partition(":")
    if name == "identity":
        return Identity()
    if name == "log":
        return Log()
    if kind == "exp":
        try:
            return Exponential(float(argument))
        except ValueError:
            pass
    raise ConfigError(f"unknown transformation {name!r}; known: identity, log, exp:T (for example exp:10 or exp:-10)")
