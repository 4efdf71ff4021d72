"""Procedures drawn at random."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.core.spelling import spelling
from infalign.method.calibration import Array
from infalign.method.procedures.base import Procedure, RankProcedure, Serving, check_probabilities, looks_at_ranks


@dataclass(frozen=True, slots=True)
class Mixture:
    """Serve by a procedure drawn at random, for example when N is random or unknown: h = Σ_i w_i·h_i.

    ``parts`` are (probability, procedure) pairs; every answer, also of the base, draws anew. Mixtures among the parts
    are unfolded. Raises ConfigError unless the probabilities are non-negative and sum to 1, and for Rewind-and-Repeat.

    >>> Mixture(((0.5, BestOfN(2)), (0.5, BestOfN(4)))).name
    '0.5*best-of-2+0.5*best-of-4'
    """

    parts: tuple[tuple[float, RankProcedure], ...]

    def __post_init__(self) -> None:
        check_probabilities("a mixture", tuple(weight for weight, _ in self.parts))
        parts = [
            (weight * inner, ranked(part))
            for weight, whole in self.parts
            for inner, part in (whole.parts if isinstance(whole, Mixture) else ((1.0, whole),))
        ]
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def name(self) -> str:
        """``0.5*best-of-2+0.5*standard``."""
        return "+".join(f"{weight:.15g}*{part.name}" for weight, part in self.parts)

    @property
    def spelling(self) -> str:
        """The name, with the folders of the user's own procedures."""
        return "+".join(f"{weight:.15g}*{spelling(part)}" for weight, part in self.parts)

    def distortion(self, p: ArrayLike) -> Array:
        return np.asarray(sum(weight * part.distortion(p) for weight, part in self.parts))

    def density(self, p: ArrayLike) -> Array:
        return np.asarray(sum(weight * part.density(p) for weight, part in self.parts))

    def weights(self, rewards_PM: ArrayLike, thresholds_P: ArrayLike | None = None) -> Array:
        return np.asarray(sum(weight * part.weights(rewards_PM) for weight, part in self.parts))

    def serving(self, rng: np.random.Generator) -> Serving:
        _, part = self.parts[rng.choice(len(self.parts), p=[weight for weight, _ in self.parts])]
        return part.serving(rng)


def ranked(part: Procedure) -> RankProcedure:
    """Return a procedure that may be part of a mixture. Raises ConfigError for one that does not only look at ranks."""
    if not looks_at_ranks(part):
        raise ConfigError(f"a mixture cannot contain {part.name}, which does not only look at ranks")
    return part


def spelled_parts(name: str) -> list[tuple[str, str]]:
    """Return what spells the shares and the parts, ``0.5*best-of-2+0.5*standard``; nothing for another name."""
    parts = [part.partition("*") for part in re.split(r"\+(?=[^*+]+\*)", name)]  # a folder's name may have a +
    return [(share, part) for share, _, part in parts] if re.match(r"[-+.e\d]+\*", name) else []


def respelled(name: str, change: Callable[[str], str]) -> str:
    """Return the spelling of a procedure with a ``change`` of its own or of its parts'."""
    return "+".join(f"{share}*{change(part)}" for share, part in spelled_parts(name)) or change(name)
