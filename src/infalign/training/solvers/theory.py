"""What theory says of a method: the law of its optimal policy, and the β that gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.shapings import Shaping, budget_beta, rank_transform, shape_rollouts
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
        return self._law(procedure, beta=self.beta)

    def law_at(self, procedure: Served, kl: float) -> Law | None:
        """Return the law at a KL of ``kl`` nats; None where there is none, or the method cannot spend that KL."""
        try:
            return self._law(procedure, kl=kl)
        except ConfigError:
            return None

    def raw_beta(self, procedure: Served, references: References) -> float:
        """Return the β of the law; without a law, the β that spends the budget on the stored rollouts."""
        if (law := self.law(procedure)) is not None:
            return law.beta
        if self.beta is not None:
            return self.beta
        assert self.kl_budget is not None
        return budget_beta(shape_rollouts(self.shaping, references()), self.kl_budget)

    def kl(self, procedure: Served) -> float | None:
        """Return the KL in nats that a policy is to spend: its budget or that of its law; None for neither."""
        law = self.law(procedure) if self.kl_budget is None else None
        return law.kl if law is not None else self.kl_budget

    def _law(self, procedure: Served, *, kl: float | None = None, beta: float | None = None) -> Law | None:
        if (transform := rank_transform(self.shaping)) is None:
            return None
        return law_at_kl(transform, kl=kl) if kl is not None else aligned_law(transform, beta=beta or 0.0)


@dataclass(frozen=True, slots=True)
class ProcedureTheory(MethodTheory):
    """The optimum for the procedure, at a KL budget or a β."""

    @property
    def objective_name(self) -> str:
        """The name of the optimum."""
        return "optimum"

    def _law(self, procedure: Served, *, kl: float | None = None, beta: float | None = None) -> Law:
        return optimal(procedure, kl=kl, beta=beta).law


@dataclass(frozen=True, slots=True)
class NoTheory(MethodTheory):
    """A method without an objective but its next step, whose KL term has the weight ``beta``."""

    def _law(self, procedure: Served, *, kl: float | None = None, beta: float | None = None) -> None:
        return None
