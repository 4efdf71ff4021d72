"""What a unit costs: the passes of texts through models that it makes, from which a dry run counts FLOPs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from infalign.models.settings import Fit, Scratch
from infalign.sampling.prompts import PromptTable

TRAINED, ADAPTED, READ, DRAWN = 6, 4, 2, 5  # FLOPs per parameter and token: drawing, token by token, is less efficient


@dataclass(frozen=True, slots=True)
class Pass:
    """Texts that go through models: of some rows of a table of the stage data the prompt, and so many responses."""

    flops: float  # per parameter and token
    models: Sequence[Scratch | str]
    table: str
    rows: float = math.inf  # at most
    responses: float = 1.0
    last_layers: int = 0  # of the models that do, 0 for all

    @classmethod
    def over(
        cls,
        flops: float,
        models: Sequence[Scratch | str],
        prompts: PromptTable,
        each: float,
        last_layers: int = 0,
    ) -> Self:
        """Return the pass of ``each`` responses to these prompts."""
        return cls(flops / prompts.step, models, prompts.path.stem, prompts.first, each, last_layers)


def training_flops(fit: Fit, *, adapter: bool = False) -> float:
    """Return the FLOPs per parameter and token of a training."""
    return fit.epochs * (ADAPTED if adapter or fit.lora is not None else TRAINED)
