"""What a unit costs: the passes of texts through models that it makes, from which a dry run counts FLOPs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from infalign.models.settings import Scratch
from infalign.sampling.prompts import PromptTable

TRAINED, READ, DRAWN = 6, 2, 5  # FLOPs per parameter and token: drawing, token by token, is less efficient


@dataclass(frozen=True, slots=True)
class Pass:
    """Texts that go through models: the prompts of some rows of a data table, and their responses."""

    flops: float  # per parameter and token
    models: Sequence[Scratch | str]
    table: str
    rows: float = math.inf  # at most
    responses: float = 1.0

    @classmethod
    def over(cls, flops: float, models: Sequence[Scratch | str], prompts: PromptTable, each: float) -> Self:
        """Return the pass of ``each`` responses to these prompts."""
        return cls(flops / prompts.step, models, prompts.path.stem, prompts.first, each)
