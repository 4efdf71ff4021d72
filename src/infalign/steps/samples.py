"""Responses of a model to some prompts, as many to each, in a folder; and the rollouts of a run with their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infalign.core.progress import NOTHING, OnProgress, SoFar
from infalign.core.sequences import Lazy, chained, token_lists_on_disk
from infalign.core.storage import column_values, read_table
from infalign.method.calibration import Array
from infalign.pipeline.units import Summary
from infalign.recipe.layout import Layout
from infalign.rewards.base import Batch
from infalign.rewards.scores import count_scored
from infalign.sampling.prompts import Prompts, PromptTable, Sampler, repeated
from infalign.sampling.rollouts import Drawn, count_drawn, find_rollouts
from infalign.training.solvers.guide import States


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """As many responses to each of some prompts: the first ones in a folder that may hold more."""

    table: PromptTable
    each: int
    folder: Path

    def read(self) -> tuple[Prompts, Drawn]:
        """Return the prompts, and the responses that are drawn to them."""
        prompts = self.table.read()
        return prompts, find_rollouts(self.folder, prompts.prompt_ids, self.each)

    def rows(self, prompts: Prompts, drawn: Drawn) -> Batch:
        """Return the responses with their prompts, as rewards take them."""
        asked = Lazy(len(drawn), lambda i: prompts.conversations[i // self.each])
        return Batch(asked, drawn.values("text"), repeated(prompts.columns, self.each))


@dataclass(frozen=True, slots=True)
class StoredRollouts:
    """K rollouts of each training prompt, in the parts in which they were drawn and scored."""

    layout: Layout
    parts: tuple[StoredSamples, ...]
    k: int

    def texts(self, part: int) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
        """Return the token ids of the prompts of one part, and of their responses, which are read on access."""
        prompts, drawn = self.parts[part].read()
        columns = (table["token_ids"] for table in drawn.tables(["token_ids"]))
        return prompts.token_ids, token_lists_on_disk(columns, self.layout.root)

    def all_texts(self) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
        """Return the token ids of the prompts of all rollouts, one each, and of their responses."""
        asked, responses = (chained(column) for column in zip(*map(self.texts, range(len(self.parts))), strict=True))
        return Lazy(len(responses), lambda i: asked[i // self.k]), responses

    def states(self, which: States) -> Sequence[Any]:
        """Return what is stored of the reference at each rollout (`models.states`)."""
        from infalign.models.states import stored_states

        folders, has_top = (self.layout.states(str(which), i) for i in range(len(self.parts))), which.top_tokens > 0
        return chained([stored_states(*self.texts(i), path, top_tokens=has_top) for i, path in enumerate(folders)])

    def all_rewards(self) -> Array:
        """Return the rewards of all rollouts, in the order of `rows`; those of a prompt that is left out are NaN."""
        tables = (read_table(self.layout.scores(part), ["reward"]) for part in range(len(self.parts)))
        return np.concatenate([table["reward"].to_numpy() for table in tables])

    def rewards_by_prompt(self) -> Array:
        """Return the rewards (P, K) in the order of the table of training prompts."""
        drawn_PK, parts = self.all_rewards().reshape(-1, self.k), len(self.parts)
        places = np.concatenate([np.arange(part, len(drawn_PK), parts) for part in range(parts)])
        return drawn_PK[np.argsort(places)]

    def rows(self) -> Sequence[dict[str, Any]]:
        """Return all rollouts, prompt by prompt, with their rewards and the log-probabilities that the engine gave.

        Rows are built on access; token ids are not held in memory (`sequences.token_lists_on_disk`).
        """
        k, (prompts, drawn) = self.k, zip(*(part.read() for part in self.parts), strict=True)
        prompt_ids, asked_ids = chained([p.prompt_ids for p in prompts]), chained([p.token_ids for p in prompts])
        columns = (table["token_ids"] for d in drawn for table in d.tables(["token_ids"]))
        completion_ids = token_lists_on_disk(columns, self.layout.root)
        logprobs = np.concatenate([t["logprob"].to_numpy() for d in drawn for t in d.tables(["logprob"])])
        rewards = self.all_rewards()

        def row(i: int) -> dict[str, Any]:
            return {
                "prompt_id": prompt_ids[i // k],
                "prompt_ids": asked_ids[i // k],
                "completion_ids": completion_ids[i],
                "reference_logprob": float(logprobs[i]),
                "reward": float(rewards[i]),
            }

        return Lazy(len(rewards), row)


def draw_samples(sampler: Sampler, samples: StoredSamples, seed: int, *, on_progress: OnProgress) -> Summary:
    """Draw those responses that are missing."""
    prompts = samples.table.read()
    sampler.draw(prompts, samples.each, samples.folder, seed=seed, on_progress=on_progress)
    return {"responses": len(prompts.prompt_ids) * samples.each}


def drawn_so_far(samples: StoredSamples) -> SoFar:
    """Return how many of the responses are drawn: ``30 of 72 responses``."""
    prompt_ids = samples.table.read().prompt_ids
    drawn, total = count_drawn(samples.folder, prompt_ids, samples.each), len(prompt_ids) * samples.each
    return SoFar(f"{drawn:,} of {total:,} responses", drawn / total) if drawn else NOTHING


def scored_so_far(samples: StoredSamples, folders: Sequence[Path]) -> SoFar:
    """Return how many distinct responses are scored in each folder, which has the name of the reward if not alone."""
    every = len(samples.table.read().prompt_ids) * samples.each
    scored = {folder.name: count_scored(every, folder) for folder in folders}
    words = [so_far.said + f" by {name}" * (len(scored) > 1) for name, so_far in scored.items() if so_far.said]
    return SoFar(", ".join(words), sum(so_far.share for so_far in scored.values()) / len(folders))


def cut_off(responses: Drawn) -> float:
    """Return the share of responses that reached ``max_new_tokens`` without an EOS."""
    cut = sum(column_values(table, "finish").count("length") for table in responses.tables(["finish"]))
    return cut / len(responses)
