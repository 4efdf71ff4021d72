"""Print the CPU-seconds of a run on a million rollouts with rewards that are all there, as a cluster leaves them.

    python benchmarks/taking_over.py [PROMPTS] [TOKENS]

Rows are made up, 100 a prompt; shards, their readers and what the stages rollout and score do with them are real.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from infalign.core.sequences import Lazy
from infalign.core.storage import listed, read_table, write_table
from infalign.data.messages import MESSAGES, prompt_id
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_shard, score_to
from infalign.sampling.engine import Engine, Response
from infalign.sampling.prompts import PromptTable
from infalign.sampling.rollouts import SHARD_PROMPTS, count_drawn, draw_shard, find_rollouts, shard_path

K = 100


class Noise(Engine):
    """An engine that says random words."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.rng = tokens, np.random.default_rng(0)

    def sample_together(self, draws: Sequence[object]) -> list[Response]:
        """Return a response of so many tokens to each."""
        rows = self.rng.integers(30_000, size=(len(draws), self.tokens)).tolist()
        return [Response(tuple(ids), " ".join(map(hex, ids)), "length", -1.0) for ids in rows]


def length(prompts: list[object], responses: list[str]) -> list[float]:
    """Return the length of each response."""
    return [float(len(text)) for text in responses]


@contextmanager
def timed(what: str, rows: int) -> Iterator[None]:
    """Print the processor's seconds a million rows."""
    begun = time.process_time()
    yield
    print(f"{what:<8} {1e6 * (time.process_time() - begun) / rows:5.1f} CPU-seconds a million rows")


def main(prompts: int = 4800, tokens: int = 8) -> None:
    """Write shards, and do what the stages do with them."""
    conversations = [[{"role": "user", "content": f"Tell me about number {i}, please."}] for i in range(prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        rollouts, scores, table = (Path(scratch) / name for name in ("rollouts", "scores", "prompts.parquet"))
        rollouts.mkdir()
        scores.mkdir()
        columns = {
            "prompt_id": list(map(prompt_id, conversations)),
            "prompt": pa.array(conversations, MESSAGES),
            "token_ids": pa.array([[1, 2, 3]] * prompts, pa.list_(pa.int32())),
        }
        write_table(table, pa.table(columns))
        found, reward = PromptTable(table, prompts).read(), NamedReward(length, "length", "length")
        asked, engine = list(found.asked()), Noise(tokens)
        for number, start in enumerate(range(0, prompts, SHARD_PROMPTS)):
            block = slice(start, start + SHARD_PROMPTS)
            draw_shard(engine, asked[block], K, shard_path(rollouts, number))
            said = listed(read_table(shard_path(rollouts, number), ["text"]), "text")
            of_prompts = [conversation for conversation in conversations[block] for _ in range(K)]
            score_shard(shard_path(scores, number), reward, Batch(of_prompts, said))
        rows = prompts * K
        with timed("rollout", rows):
            assert count_drawn(rollouts, found.prompt_ids, K) == rows
        with timed("score", rows):
            drawn = find_rollouts(rollouts, found.prompt_ids, K)
            each = Lazy(rows, lambda i: found.conversations[i // K])
            score_to(scores, reward, Batch(each, drawn.values("text")), on_progress=lambda *_: None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
