"""Prompts of a table, and responses drawn to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from infalign.core.progress import OnProgress
from infalign.core.sequences import Lazy, in_blocks, token_lists
from infalign.core.storage import column_values, read_table
from infalign.data.messages import Message, prompts_of
from infalign.models.policy import AnyModel
from infalign.models.settings import Compute
from infalign.sampling.engine import EngineSettings, OpenEngine, Prompt, Sampling
from infalign.sampling.rollouts import count_drawn, draw


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in the order of their table: id, conversation, tokens, and the other columns of their rows, as JSON.

    Conversations and tokens are decoded on access.
    """

    prompt_ids: list[str]
    conversations: Sequence[list[Message]]
    token_ids: Sequence[list[int]]
    columns: list[str]

    @classmethod
    def of(cls, table: pa.Table) -> Self:
        """Return the prompts of a table."""
        conversations = in_blocks(table.num_rows, 64, lambda start: prompts_of(table.slice(start, 64)))
        columns = column_values(table, "columns") if "columns" in table.column_names else ["{}"] * table.num_rows
        return cls(column_values(table, "prompt_id"), conversations, token_lists(table["token_ids"]), columns)

    def asked(self) -> Lazy[Prompt]:
        """Return the prompts in the form that engines take."""
        return Lazy(len(self.prompt_ids), lambda i: Prompt(self.prompt_ids[i], self.token_ids[i], self.columns[i]))


@dataclass(frozen=True, slots=True)
class PromptTable:
    """The ``first`` prompts of a table on disk, or of these every ``step``-th from number ``start``."""

    path: Path
    first: int
    start: int = 0
    step: int = 1

    def read(self) -> Prompts:
        """Return the prompts."""
        table = read_table(self.path)
        return Prompts.of(table.take(np.arange(self.start, min(self.first, table.num_rows), self.step)))


@dataclass(frozen=True, slots=True)
class Sampler:
    """A model, the engine that samples from it, and the maximum length of responses."""

    model: AnyModel
    engine: EngineSettings
    max_new_tokens: int
    compute: Compute

    def open(self, probe: Prompt, *, seed: int) -> OpenEngine:
        """Return a context that gives the engine, checked on a probe prompt."""
        return self.engine.open(self.model, Sampling(self.max_new_tokens, seed), self.compute, probe)

    def draw(self, prompts: Prompts, k: int, folder: Path, *, seed: int, on_progress: OnProgress) -> None:
        """Draw those of ``k`` responses to each prompt that are missing in ``folder`` into it.

        Where none is missing, the engine is not opened.
        """
        asked, total = prompts.asked(), len(prompts.prompt_ids) * k
        if count_drawn(folder, prompts.prompt_ids, k) == total:
            on_progress(total, total, "responses")
            return
        with self.open(asked[0], seed=seed) as engine:
            draw(engine, asked, k, folder, on_progress=on_progress)


def rollout_keys(prompt_ids: list[str], k: int) -> pa.Table:
    """Return the columns prompt_id and index of ``k`` responses to each prompt."""
    indices = np.tile(np.arange(k, dtype=np.int32), len(prompt_ids))
    return pa.table({"prompt_id": pa.array(repeated(prompt_ids, k), pa.string()), "index": indices})


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Return each value ``times`` times in a row, as rollouts repeat their prompt."""
    return [value for value in values for _ in range(times)]
