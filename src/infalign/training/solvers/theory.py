"""What theory says of a method: the law of its optimal policy, and the β that gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.shapings import Shaping, budget_beta, rank_transform
from infalign.theory.law import Law, aligned_law, law_at_kl
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

    def law(self, procedure: Served) -> Law | None:
        """Return the law of an unrestricted policy at the budget or β; None where there is none."""
        if self.kl_budget is not None:
            return self.law_at(procedure, self.kl_budget)
        transform = rank_transform(self.shaping)
        return None if transform is None else aligned_law(transform, beta=self.beta or 0.0)

    def law_at(self, procedure: Served, kl: float) -> Law | None:
        """Return the law at a KL of ``kl`` nats; None where there is none, or the method cannot spend that KL."""
        transform = rank_transform(self.shaping)
        try:
            return None if transform is None else law_at_kl(transform, kl=kl)
        except ConfigError:
            return None

    def raw_beta(self, procedure: Served, references: References) -> float:
        """Return the β of the law; without a law, the β that spends the budget on the stored rollouts."""
        if (law := self.law(procedure)) is not None:
            return law.beta
        if self.beta is not None:
            return self.beta
        assert self.kl_budget is not None
        shaped_PK = np.stack([self.shaping(references_K, references_K) for references_K in references()])
        return budget_beta(shaped_PK, self.kl_budget)

    def kl(self, procedure: Served) -> float | None:
        """Return the KL in nats that a policy is to spend: its budget or that of its law; None for neither."""
        law = self.law(procedure) if self.kl_budget is None else None
        return law.kl if law is not None else self.kl_budget


@dataclass(frozen=True, slots=True)
class ProcedureTheory(MethodTheory):
    """The optimum for the procedure, at a KL budget or a β."""

    @property
    def objective_name(self) -> str:
        """The name of the optimum."""
        return "optimum"

    def law(self, procedure: Served) -> Law:
        """Return the law at the budget or β."""
        return optimal(procedure, kl=self.kl_budget, beta=self.beta).law

    def law_at(self, procedure: Served, kl: float) -> Law | None:
        """Return the law at ``kl`` nats; None if the procedure cannot spend it."""
        try:
            return optimal(procedure, kl=kl).law
        except ConfigError:
            return None


@dataclass(frozen=True, slots=True)
class NoTheory(MethodTheory):
    """A method without an objective but its next step, whose KL term has the weight ``beta``."""

    def law(self, procedure: Served) -> None:
        """Return None."""

    def law_at(self, procedure: Served, kl: float) -> None:
        """Return None."""
