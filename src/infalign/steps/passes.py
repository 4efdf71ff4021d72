"""What units of work compute: passes of models over texts. From them a dry run tells time, tokens and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Protocol

from infalign.core.errors import InfalignError
from infalign.models.settings import Fit, Scratch
from infalign.training.solvers.base import Guide


@dataclass(frozen=True, slots=True)
class Aside:
    """A guide on what is stored of a model, which is in memory beside it; with its trunk if that reads tokens."""

    model: Scratch | str
    guide: Guide
    trunk: Scratch | str | None = None


@dataclass(frozen=True, slots=True)
class Last:
    """The last layers of a model, which start from stored states."""

    model: Scratch | str
    layers: int


Architecture = Scratch | str | Aside | Last
"""A model from nothing, that of a folder, GGUF or hub id, or a part of one."""


class UnknownSizeError(InfalignError):
    """A model or table whose size cannot be told here; the text names it."""


class Taken(NamedTuple):
    """What a pass takes: seconds, and the most bytes of memory at once."""

    seconds: float
    memory: float


class Speeds(Protocol):
    """How fast models are. Each method raises UnknownSizeError for a model of which too little is known."""

    def train(self, asked: Train) -> Taken:
        """Return what a training takes."""
        ...

    def draw(self, asked: Draw) -> Taken:
        """Return what drawing responses takes."""
        ...

    def read(self, asked: Read) -> Taken:
        """Return what a pass without gradients takes."""
        ...


class Pass(Protocol):
    """Texts that go through a model in one way."""

    @property
    def tokens(self) -> float:
        """Number of tokens."""
        ...

    def at(self, speeds: Speeds) -> Taken:
        """Return what it takes."""
        ...


@dataclass(frozen=True, slots=True)
class Train:
    """Optimiser steps over ``rows`` texts each, of which ``each`` share a prompt that is computed once."""

    model: Architecture
    fit: Fit
    steps: float
    rows: int
    each: int
    prompt: float
    response: float

    @property
    def tokens(self) -> float:
        """Number of tokens."""
        return self.steps * self.rows * (self.prompt / self.each + self.response)

    def at(self, speeds: Speeds) -> Taken:
        """Return what it takes."""
        return speeds.train(self)


@dataclass(frozen=True, slots=True)
class Draw:
    """``k`` responses to each prompt, of so many prompts ``together``; ``most`` is the length of the longest.

    ``by_server`` says whether an inference server draws them, which is elsewhere and computes in bfloat16.
    """

    model: Architecture
    prompts: float
    k: int
    prompt: float
    response: float
    most: int
    together: int = 1
    by_server: bool = False

    @property
    def tokens(self) -> float:
        """Number of tokens that are drawn."""
        return self.prompts * self.k * self.response

    def at(self, speeds: Speeds) -> Taken:
        """Return what it takes."""
        return speeds.draw(self)


@dataclass(frozen=True, slots=True)
class Read:
    """A pass without gradients over ``prompts`` prompts, each with ``k`` responses.

    With a ``vocabulary`` it makes logits for each token of a response. It is as precise as draws and scores, or where
    there is a ``fit`` as this training.
    """

    model: Architecture
    prompts: float
    k: int
    prompt: float
    response: float
    vocabulary: bool = False
    fit: Fit | None = None

    @property
    def tokens(self) -> float:
        """Number of tokens."""
        return self.prompts * (self.prompt + self.k * self.response)

    def at(self, speeds: Speeds) -> Taken:
        """Return what it takes."""
        return speeds.read(self)


@dataclass(frozen=True, slots=True)
class Texts:
    """How much text a run has: rows by table, and mean lengths in tokens, of the data and of drawn responses."""

    rows: Mapping[str, int]  # empty where only the hub knows them
    prompt: float
    response: float
    drawn: float
    sample: tuple[tuple[int, int, int], ...] = ()  # tokens of a row's prompt, chosen and longest response

    def within(self, most: int) -> Texts:
        """Return the texts of at most so many tokens, of which pairs and demonstrations are trained on."""
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


def trained(model: Architecture, fit: Fit, rows: float, of: Texts, *, texts: int = 1) -> Iterator[Pass]:
    """Yield the training of a model on rows of the data, of ``texts`` texts each."""
    steps = max(round(fit.epochs * rows), fit.batch_size) / fit.batch_size
    yield Train(model, fit, steps, texts * fit.batch_size, 1, of.prompt, of.response)
