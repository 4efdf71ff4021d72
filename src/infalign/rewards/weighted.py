"""A reward that is the weighted sum of several functions, as TRL adds them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infalign.method.by_name import ByName, UserReward
from infalign.rewards.base import checked_rewards


@dataclass(frozen=True)
class WeightedSum(UserReward):
    """Σ_i w_i·r_i of functions; one that returns None for a response adds nothing to it, and None of all stays None."""

    parts: tuple[tuple[ByName, float], ...]

    def __call__(self, prompts: list[Any], responses: Sequence[str], *rest: Any, **more: Any) -> list[float | None]:
        """Return the sum for each response; takes what `ByName` takes, and raises as `checked_rewards`."""
        terms = []
        for function, weight in self.parts:
            values, about = function(prompts, responses, *rest, **more), f"of {function.name}"
            found = checked_rewards(values, prompts, first=0, name=about, may_leave_out=True)
            terms.append([weight * float(value) for value in found])
        given = [[term for term in of_row if not math.isnan(term)] for of_row in zip(*terms, strict=True)]
        return [math.fsum(of_row) if of_row else None for of_row in given]
