"""How much a run computes: rows and tokens of its texts, sizes of its models, and from both the cost of its units."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from infalign.core.errors import InfalignError
from infalign.models.settings import Fit, Scratch

TRAINED, ADAPTED, READ, DRAWN = 6, 4, 2, 5  # FLOPs per parameter and token: drawing, token by token, is less efficient
ROLLOUTS_PER_PROMPT = 8  # that an offline training reads together, so that it computes their prompt once
WEIGHT_BYTES, TRAINING_BYTES = (
    4,
    24,
)  # of a parameter in float32; in the best and the last checkpoint, with Adam's moments
TOKEN_BYTES, RESPONSE_BYTES = 8, 100  # in tables of responses: id and text of a token; prompt id, index and the like


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
    sample: tuple[tuple[int, int, int], ...] = ()  # tokens of a row's prompt, chosen and longest response

    def within(self, most: int) -> "Counts":
        """Return the counts of rows of at most so many tokens; longer ones are not trained on."""
        if not self.sample:
            return self
        short = [row for row in self.sample if row[0] + row[2] <= most]
        left = {name: round(count * len(short) / len(self.sample)) for name, count in self.rows.items()}
        prompts, responses = ([row[part] for row in short] or [0] for part in (0, 1))
        return replace(self, rows=left, prompt=fmean(prompts), response=fmean(responses))

    def count(self, table: str) -> int:
        """Return the rows of a table of the stage data. Raises UnknownSizeError where only the hub knows them."""
        if table not in self.rows:
            raise UnknownSizeError("the number of rows on the hub")
        return self.rows[table]

    def prompts(self, wanted: int, split: str) -> int:
        """Return how many of the ``wanted`` prompts of a split there are, all where that is not known."""
        return min(wanted, self.rows.get(f"{split}_prompts", wanted))

    def parameters(self, models: Iterable[Scratch | str]) -> float:
        """Return the parameters of several models together."""
        return sum(self.shape(model).parameters for model in models)

    def drawing(self, parameters: float, prompts: float, k: int, most: int) -> Cost:
        """Return the cost of K responses of at most so many tokens to each prompt."""
        tokens = prompts * k * self.drawn
        flops = parameters * (DRAWN * tokens + READ * prompts * self.prompt)
        return Cost(tokens, flops, disk=prompts * k * (most * TOKEN_BYTES + RESPONSE_BYTES))

    def reading(self, parameters: float, prompts: float, k: int, response: float | None = None) -> Cost:
        """Return the cost of a pass over K responses to each prompt, as long as drawn ones unless given."""
        tokens = prompts * (self.prompt + k * (self.drawn if response is None else response))
        return Cost(tokens, READ * parameters * tokens)

    def training(self, parameters: float, fit: Fit, rows: float, length: float, *, frozen: float = 0.0) -> Cost:
        """Return the cost of training on rows of so many tokens, which ``frozen`` parameters read too."""
        steps = max(fit.epochs * rows, fit.batch_size) / fit.batch_size
        tokens, whole = steps * fit.batch_size * length, fit.lora is None
        flops = tokens * ((TRAINED if whole else ADAPTED) * parameters + READ * frozen)
        return Cost(tokens, flops, steps, parameters * (WEIGHT_BYTES + TRAINING_BYTES * whole))
