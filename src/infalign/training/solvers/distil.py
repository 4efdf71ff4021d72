"""Distillation: one plain language model that follows another policy of the run, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PrivateAttr

from infalign.core.settings import Name
from infalign.method.shapings import Shaping
from infalign.training.solvers.base import DataNeeds, Solver
from infalign.training.solvers.offline import Offline, states_below
from infalign.training.solvers.theory import MethodTheory


class Settings(Solver):
    """Σ_t KL(π_teacher ‖ π) over the whole vocabulary, on the rollouts that the teacher was trained on.

    What theory says of the teacher holds for it.
    """

    solver: Literal["distil"]
    teacher: Name = Field(description="the offline policy of this recipe to distill, such as one with a guide")
    _teacher: Offline = PrivateAttr()

    def find_teacher(self, policies: Mapping[str, Solver]) -> None:
        """Find its teacher. Raises ValueError if there is none of that name, or it is not an offline policy."""
        teacher = policies.get(self.teacher)
        if not isinstance(teacher, Offline):
            offline = ", ".join(name for name, other in policies.items() if isinstance(other, Offline))
            raise ValueError(
                f"teacher is {self.teacher}, which is not an offline policy of this recipe ({offline or 'it has none'})"
            )
        self._teacher = teacher

    @property
    def teacher_settings(self) -> Offline:
        """The settings of its teacher."""
        return self._teacher

    @property
    def data_needs(self) -> DataNeeds:
        """Its teacher; the states below the layers that it trains, and those that its teacher's guide reads."""
        guided = self._teacher.guide is not None  # a teacher without a guide is another model than the reference
        return DataNeeds(self.teacher, states_below(self.fit), self._teacher.data_needs.states if guided else None)

    @property
    def shaping(self) -> Shaping:
        """Its teacher's."""
        return self._teacher.shaping

    @property
    def method(self) -> str:
        """``exp:10 (qrpo guided), distilled``."""
        return f"{self._teacher.method}, distilled"

    @property
    def theory(self) -> MethodTheory:
        """Its teacher's."""
        return self._teacher.theory
