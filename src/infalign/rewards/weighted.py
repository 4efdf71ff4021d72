"""A reward that is the weighted sum of several functions, as TRL adds them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infalign.method.by_name import ByName, UserReward
from infalign.rewards.base import checked_rewards


@dataclass(frozen=True)
class WeightedSum(UserReward):
    """Σ_i w_i·r_i of functions; one that returns None for a response adds nothing to it, and None of all stays None.

    With ``leaves_out`` a prompt is left out as soon as one function returns None for one response to it.
    """

    parts: tuple[tuple[ByName, float], ...]
    leaves_out: bool = False

    def __call__(self, prompts: list[Any], responses: Sequence[str], *rest: Any, **more: Any) -> list[float | None]:
        """Return the sum for each response; takes what `ByName` takes, and raises as `checked_rewards`."""
        terms = []
        for function, weight in self.parts:
            values, about = function(prompts, responses, *rest, **more), f"of {function.name}"
            found = checked_rewards(values, prompts, first=0, name=about, of_function=True)
            terms.append([weight * float(value) for value in found])
        if self.leaves_out:
            left = [prompt for prompt, *of_row in zip(prompts, *terms, strict=True) if any(map(math.isnan, of_row))]
            terms = [[math.nan if p in left else term for p, term in zip(prompts, of, strict=True)] for of in terms]
        given = [[term for term in of_row if not math.isnan(term)] for of_row in zip(*terms, strict=True)]
        return [math.fsum(of_row) if of_row else None for of_row in given]
