"""Judges whose chances are known exactly."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from infalign.method.calibration import Array
from infalign.method.judge import normal_density
from infalign.method.procedures import RankProcedure

NODES = np.linspace(-9.0, 9.0, 91)


@dataclass(frozen=True)
class GaussianJudge:
    """Reward and judge are jointly normal with correlation ``rho``; the base is served by ``base``."""

    rho: float
    base: RankProcedure

    @cached_property
    def served(self) -> Array:
        """The chance of each of NODES to be the normal score of what the base serves."""
        chance: Array = self.base.density(ndtr(NODES)) * normal_density(NODES) * (NODES[1] - NODES[0])
        return chance

    def ahead(self, score: Array) -> Array:
        """How far the judge puts a score above each of NODES, in units of its own spread."""
        return np.asarray(self.rho * (np.ravel(score)[:, None] - NODES) / np.sqrt(2.0 * (1.0 - self.rho**2)))

    def chance(self, score: Array) -> Array:
        """E N(ρ(s − Z)/√(2(1 − ρ²)))."""
        return np.asarray(ndtr(self.ahead(score)) @ self.served)

    def slope(self, score: Array) -> Array:
        """Its derivative."""
        steepness = self.rho / np.sqrt(2.0 * (1.0 - self.rho**2))
        return np.asarray(steepness * normal_density(self.ahead(score)) @ self.served)


@dataclass(frozen=True)
class RewardAsJudge:
    """The judge is the reward itself: A = h₀."""

    base: RankProcedure

    def chance(self, score: Array) -> Array:
        """h₀(u)."""
        return self.base.distortion(ndtr(score))

    def slope(self, score: Array) -> Array:
        """h₀'(u)·du/ds."""
        return self.base.density(ndtr(score)) * normal_density(score)


@dataclass(frozen=True)
class TurningJudge:
    """It likes the normal score ``peak`` best: A = 0.8·e^{−(s − peak)²/2}."""

    peak: float

    def chance(self, score: Array) -> Array:
        """A bell around the peak."""
        return np.asarray(0.8 * np.exp(-0.5 * (score - self.peak) ** 2))

    def slope(self, score: Array) -> Array:
        """Its derivative."""
        return np.asarray(-(score - self.peak) * self.chance(score))
