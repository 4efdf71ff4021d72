"""Distillation: one plain language model that follows another policy of the run, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, PrivateAttr

from infalign.core.display import COLOURS
from infalign.core.settings import Name
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.shapings import Shaping
from infalign.theory.law import Law
from infalign.training.solvers.base import Offline, Solver, States, states_below


class Settings(Solver):
    """Σ_t KL(π_teacher ‖ π) over the whole vocabulary, on the rollouts that the teacher was trained on.

    What theory says of the teacher holds for it.
    """

    colour: ClassVar[str] = COLOURS[2]

    solver: Literal["distil"]
    teacher: Name = Field(description="the offline policy of this recipe that it follows, such as one with a guide")
    _teacher: Offline = PrivateAttr()

    def meet(self, policies: Mapping[str, Solver]) -> None:
        """Find its teacher. Raises ValueError if there is none of that name, or it is not an offline policy."""
        teacher = policies.get(self.teacher)
        if not isinstance(teacher, Offline):
            offline = ", ".join(name for name, other in policies.items() if isinstance(other, Offline))
            raise ValueError(
                f"teacher is {self.teacher}, which is no offline policy of this recipe ({offline or 'none'})"
            )
        self._teacher = teacher

    @property
    def followed(self) -> Offline:
        """The settings of its teacher."""
        return self._teacher

    @property
    def needs(self) -> tuple[str, ...]:
        """Its teacher."""
        return (self.teacher,)

    @property
    def states(self) -> States | None:
        """Those below the layers that it trains."""
        return states_below(self.fit)

    @property
    def teacher_states(self) -> States | None:
        """Those that its teacher's guide reads; without a guide the teacher is another model than the reference."""
        return self._teacher.states if self._teacher.guide is not None else None

    @property
    def shaping(self) -> Shaping:
        """Its teacher's."""
        return self._teacher.shaping

    @property
    def method(self) -> str:
        """``exp:10 (qrpo guided), distilled``."""
        return f"{self._teacher.method}, distilled"

    @property
    def aim(self) -> str:
        """Its teacher's."""
        return self._teacher.aim

    @property
    def budget(self) -> float | None:
        """Its teacher's."""
        return self._teacher.budget

    def spends(self, *, more: bool) -> str:
        """Return the knob that brings it nearer to its teacher, whose budget it has."""
        return f"{super().spends(more=more)}, if {self.teacher} spends its own"

    def law(self, procedure: Served) -> Law | None:
        """Return its teacher's."""
        return self._teacher.law(procedure)

    def law_at(self, procedure: Served, kl: float) -> Law | None:
        """Return its teacher's."""
        return self._teacher.law_at(procedure, kl)

    def raw_beta(self, procedure: Served, references: Callable[[], Array]) -> float:
        """Return its teacher's."""
        return self._teacher.raw_beta(procedure, references)
