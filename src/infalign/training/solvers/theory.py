"""What theory says of a method: the law of its optimal policy, and the β that gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array, tied_prompts
from infalign.method.optimum import Objective, Optimal, Optimum, optimum
from infalign.method.procedures import Served, rewinds
from infalign.method.shapings import Shaping, rank_transform
from infalign.theory.aims import stored_beta
from infalign.theory.law import RankLaw, aligned_law, law_at_kl
from infalign.theory.optimum import optimal

References = Callable[[], Array]
"""Gives the sorted rewards of the stored rollouts, (P, K)."""


@dataclass(frozen=True, slots=True)
class MethodTheory:
    """π_ref·e^{Φ/β}/Z at a KL budget in nats or a β; there is a law if Φ shapes the rank."""

    kl_budget: float | None
    shaping: Shaping
    beta: float | None = None  # for the paper's raw Φ

    @property
    def objective_name(self) -> str:
        """The name of the method's curve in figures: its shaping, or the optimum for the procedure."""
        return self.shaping.name

    def law(self, procedure: Served) -> RankLaw | None:
        """Return the law of an unrestricted policy at the budget or β; None where there is none."""
        if self.kl_budget is not None:
            return self.law_at(procedure, self.kl_budget)
        return self._law(procedure, beta=self.beta)

    def law_at(self, procedure: Served, kl: float) -> RankLaw | None:
        """Return the law at a KL of ``kl`` nats; None where there is none, or the method cannot spend that KL."""
        try:
            return self._law(procedure, kl=kl)
        except ConfigError:
            return None

    def raw_beta(self, procedure: Served, references: References) -> float:
        """Return its β, or the one that spends its budget on the stored rewards. Raises ConfigError if none does."""
        if self.beta is not None:
            return self.beta
        assert self.kl_budget is not None
        return self._budget_beta(procedure, references(), self.kl_budget)

    def _budget_beta(self, procedure: Served, rewards_PK: Array, kl: float) -> float:
        return stored_beta(self.shaping, rewards_PK, kl)

    def kl(self, procedure: Served, references: References | None = None) -> float | None:
        """Return the KL in nats that a policy is to spend: its budget or that of its law; None for neither.

        A law of continuous ranks is none where more than half of the stored rewards equal the next one.
        """
        if self.kl_budget is not None or (references is not None and (np.diff(references()) == 0).mean() > 0.5):
            return self.kl_budget
        law = self.law(procedure)
        return None if law is None else law.kl

    def _law(self, procedure: Served, *, kl: float | None = None, beta: float | None = None) -> RankLaw | None:
        if (transform := rank_transform(self.shaping)) is None:
            return None
        return law_at_kl(transform, kl=kl) if kl is not None else aligned_law(transform, beta=beta or 0.0)


@dataclass(frozen=True, slots=True)
class OptimumTheory(MethodTheory):
    """The optimum for the procedure on the stored rewards, at a KL budget or a β."""

    objective: Objective | None = None

    @property
    def objective_name(self) -> str:
        """The name of the optimum."""
        return "optimum"

    def stored_optimum(self, procedure: Served, rewards_PK: Array) -> Optimum:
        """Return the optimum, with half a success more than each prompt has among 0/1 rewards."""
        assert not rewinds(procedure)
        return optimum(rewards_PK, procedure, kl=self.kl_budget, beta=self.beta, objective=self.objective)

    def _budget_beta(self, procedure: Served, rewards_PK: Array, kl: float) -> float:
        known = self.shaping if isinstance(self.shaping, Optimal) else self.stored_optimum(procedure, rewards_PK)
        return known.beta


@dataclass(frozen=True, slots=True)
class ProcedureTheory(OptimumTheory):
    """The same for the win rate; where no rewards tie its β is that of continuous ranks."""

    def _budget_beta(self, procedure: Served, rewards_PK: Array, kl: float) -> float:
        if tied_prompts(rewards_PK).any():
            return super(ProcedureTheory, self)._budget_beta(procedure, rewards_PK, kl)
        return optimal(procedure, kl=kl).beta

    def _law(self, procedure: Served, *, kl: float | None = None, beta: float | None = None) -> RankLaw:
        return optimal(procedure, kl=kl, beta=beta).law


@dataclass(frozen=True, slots=True)
class NoTheory(MethodTheory):
    """A method without an objective but its next step, whose KL term has the weight ``beta``."""

    def _law(self, procedure: Served, *, kl: float | None = None, beta: float | None = None) -> None:
        return None
