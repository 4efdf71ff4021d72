"""The stored rollouts of a run with their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infalign.core.sequences import Lazy, chained, token_lists_on_disk
from infalign.core.storage import listed, read_table
from infalign.method.calibration import Array
from infalign.recipe.layout import Layout
from infalign.sampling.prompts import Prompts, PromptTable
from infalign.sampling.rollouts import Drawn, find_rollouts
from infalign.training.solvers.base import States


@dataclass(frozen=True, slots=True)
class StoredRollouts:
    """K rollouts of each training prompt, in the parts in which they were drawn and scored."""

    layout: Layout
    parts: tuple[PromptTable, ...]
    k: int

    def prompts(self) -> list[Prompts]:
        """Return the prompts of each part."""
        return [part.read() for part in self.parts]

    def drawn(self, part: int, prompts: Prompts) -> Drawn:
        """Return the rollouts of one part."""
        return find_rollouts(self.layout.rollouts(part), prompts.prompt_ids, self.k)

    def texts(self, part: int) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
        """Return the token ids of the prompts of one part, and of their responses, which are read on access."""
        prompts = self.parts[part].read()
        columns = (table["token_ids"] for table in self.drawn(part, prompts).tables(["token_ids"]))
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

    def rewards(self, part: int) -> Array:
        """Return the rewards of one part, prompts × K."""
        rewards: Array = read_table(self.layout.scores(part), ["reward"])["reward"].to_numpy()
        return rewards.reshape(-1, self.k)

    def all_rewards(self) -> Array:
        """Return the rewards of all rollouts, prompts × K."""
        return np.concatenate([self.rewards(part) for part in range(len(self.parts))])

    def rows(self) -> Sequence[dict[str, Any]]:
        """Return all rollouts, prompt by prompt, with their rewards and the log-probabilities that the engine gave.

        Rows are built on access; token ids are not held in memory (`sequences.token_lists_on_disk`).
        """
        k, prompts = self.k, self.prompts()
        drawn = [self.drawn(part, of_part) for part, of_part in enumerate(prompts)]
        prompt_ids, asked_ids = chained([p.prompt_ids for p in prompts]), chained([p.token_ids for p in prompts])
        columns = (table["token_ids"] for d in drawn for table in d.tables(["token_ids"]))
        completion_ids = token_lists_on_disk(columns, self.layout.root)
        logprobs = np.concatenate([t["logprob"].to_numpy() for d in drawn for t in d.tables(["logprob"])])
        rewards = np.concatenate([self.rewards(part).ravel() for part in range(len(drawn))])

        def row(i: int) -> dict[str, Any]:
            return {
                "prompt_id": prompt_ids[i // k],
                "prompt_ids": asked_ids[i // k],
                "completion_ids": completion_ids[i],
                "reference_logprob": float(logprobs[i]),
                "reward": float(rewards[i]),
            }

        return Lazy(len(rewards), row)


def cut_off(rollouts: Drawn) -> float:
    """Return the share of rollouts that reached ``max_new_tokens`` without an EOS."""
    return sum(listed(table, "finish").count("length") for table in rollouts.tables(["finish"])) / len(rollouts)
