"""How much a run computes: rows and tokens of its texts, sizes of its models, and from both the cost of its units.

The functions that give a cost take the counts last, so that a unit can hold one as a ``partial``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infalign.core.errors import InfalignError
from infalign.models.settings import Fit, Scratch
from infalign.sampling.prompts import PromptTable
from infalign.steps.samples import Samples

TRAINED, ADAPTED, READ, DRAWN = 6, 4, 2, 5  # FLOPs per parameter and token: drawing, token by token, is less efficient
WEIGHT_BYTES, TRAINING_BYTES = 4, 24  # of a parameter in float32; in the best and the last checkpoint, with Adam's
TOKEN_BYTES, RESPONSE_BYTES = 8, 100  # in tables of responses: id and text of a token; prompt id, index and the like

Models = Iterable[Scratch | str]


class UnknownSizeError(InfalignError):
    """Rows or a model whose size cannot be found here; the text names them."""


class Cost(NamedTuple):
    """Tokens that go through models, FLOPs, optimizer steps, and bytes on disk at most."""

    tokens: float = 0.0
    flops: float = 0.0
    steps: float = 0.0
    disk: float = 0.0


def summed(costs: Iterable[Cost]) -> Cost:
    """Return the cost of several parts together.

    >>> summed([Cost(tokens=3), Cost(tokens=4, steps=2)])
    Cost(tokens=7.0, flops=0.0, steps=2.0, disk=0.0)
    """
    return Cost(*map(sum, zip(Cost(), *costs, strict=True)))


class Shape(NamedTuple):
    """Parameters, layers and width of a model; the last two are 0 where only the first is known."""

    parameters: float
    layers: int = 0
    width: int = 0

    def share(self, last: int) -> float:
        """Return the share of the parameters that the last layers have, all where the number of layers is not known."""
        return min(1.0, last / self.layers) if self.layers else 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by table, mean lengths in tokens of the data's texts and of drawn responses, and the shape of each model."""

    rows: Mapping[str, int]  # empty where only the hub knows them
    prompt: float
    response: float
    drawn: float
    shape: Callable[[Scratch | str], Shape]  # raises UnknownSizeError

    def count(self, table: str) -> int:
        """Return the rows of a table of the stage data. Raises UnknownSizeError where only the hub knows them."""
        if table not in self.rows:
            raise UnknownSizeError("the number of rows on the hub")
        return self.rows[table]

    def prompts(self, table: PromptTable) -> int:
        """Return how many of the wanted prompts there are, all where that is not known."""
        there = min(table.first, self.rows.get(table.path.stem, table.first))
        return len(range(table.start, there, table.step))

    def parameters(self, models: Models) -> float:
        """Return the parameters of several models together."""
        return sum(self.shape(model).parameters for model in models)


def drawing(models: Models, samples: Samples, most: int, counts: Counts) -> Cost:
    """Return the cost of drawing responses of at most so many tokens."""
    prompts, parameters = counts.prompts(samples.table), counts.parameters(models)
    tokens = prompts * samples.each * counts.drawn
    disk = prompts * samples.each * (most * TOKEN_BYTES + RESPONSE_BYTES)
    return Cost(tokens, parameters * (DRAWN * tokens + READ * prompts * counts.prompt), disk=disk)


def reading(models: Models, samples: Samples, counts: Counts) -> Cost:
    """Return the cost of a pass over drawn responses, each prompt once."""
    tokens = counts.prompts(samples.table) * (counts.prompt + samples.each * counts.drawn)
    return Cost(tokens, READ * counts.parameters(models) * tokens)


def reading_rows(models: Models, rows: float, counts: Counts) -> Cost:
    """Return the cost of a pass over prompts of the data with one response each."""
    tokens = rows * (counts.prompt + counts.response)
    return Cost(tokens, READ * counts.parameters(models) * tokens)


def training(fit: Fit, tokens: float, rows: float, parameters: float, frozen: float = 0.0) -> Cost:
    """Return the cost of training on rows of so many tokens each, which ``frozen`` parameters read too."""
    steps = max(fit.epochs * rows, fit.batch_size) / fit.batch_size
    total, whole = steps * fit.batch_size * tokens, fit.lora is None
    flops = total * ((TRAINED if whole else ADAPTED) * parameters + READ * frozen)
    return Cost(total, flops, steps, parameters * (WEIGHT_BYTES + TRAINING_BYTES * whole))
