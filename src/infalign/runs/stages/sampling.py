"""The stages rollout and score: responses drawn from a model, and their rewards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infalign.data.examples import Message
from infalign.method.calibration import Array
from infalign.models.pretrained import load_policy, load_tokenizer
from infalign.progress import OnProgress
from infalign.runs.layout import Layout, Summary, parts
from infalign.runs.recipe import Recipe
from infalign.runs.stages.models import device, load_reward, model_path, score_maker
from infalign.sampling.engine import Engine, Prompt, Sampling
from infalign.sampling.rollouts import Drawn, find_rollouts
from infalign.sampling.rollouts import draw as draw_to
from infalign.sampling.server import ServerEngine
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine
from infalign.sequences import Lazy, in_blocks, token_lists
from infalign.storage import read_table, write_table


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in the order of their table: identity, conversation, tokens; the last two are made when asked for."""

    prompt_ids: list[str]
    conversations: Sequence[list[Message]]
    token_ids: Sequence[list[int]]

    @classmethod
    def read(cls, path: Path, first: int, every: slice = slice(None)) -> "Prompts":
        """Return ``every`` of the ``first`` prompts of a table."""
        table = read_table(path)
        table = table.take(np.arange(min(first, table.num_rows))[every])

        conversations = in_blocks(table.num_rows, 64, lambda start: listed(table.slice(start, 64), "prompt"))
        return cls(listed(table, "prompt_id"), conversations, token_lists(table["token_ids"]))


def train_prompts(recipe: Recipe, root: Path, part: int) -> Prompts:
    """Return one part of the training prompts."""
    every = slice(part, None, parts(recipe))
    return Prompts.read(Layout(root).data / "train_prompts.parquet", recipe.rollout.prompts, every)


def draw_rollouts(recipe: Recipe, root: Path, part: int, *, on_progress: OnProgress) -> Summary:
    """Draw K responses from the reference policy for one part of the training prompts."""
    prompts, model = train_prompts(recipe, root, part), model_path(recipe.policy, "reference", root)
    draw(recipe, model, prompts, recipe.rollout.k, Layout(root).rollouts(part), recipe.seed, on_progress)
    return {"responses": len(prompts.prompt_ids) * recipe.rollout.k}


def draw(
    recipe: Recipe, model: str, prompts: Prompts, k: int, folder: Path, seed: int, on_progress: OnProgress
) -> None:
    """Draw ``k`` responses to each prompt from ``model`` into ``folder``."""
    rows = Lazy(len(prompts.prompt_ids), lambda i: Prompt(prompts.prompt_ids[i], prompts.token_ids[i]))
    with open_engine(recipe, model, Sampling(recipe.rollout.max_new_tokens, seed=seed), rows[0]) as engine:
        draw_to(engine, rows, k, folder, on_progress=lambda done, total: on_progress(done, total, "responses"))


@contextmanager
def open_engine(recipe: Recipe, model: str, sampling: Sampling, probe: Prompt) -> Iterator[Engine]:
    """Yield the engine that draws from ``model``, with its server started and stopped if the recipe gives a command.

    A server is first checked on the prompt ``probe``.
    """
    from infalign.sampling.launch import serving

    settings = recipe.rollout.engine
    if settings.kind != "server":
        loaded, tokenizer = load_policy(model, device=device(recipe))
        kind = SharedPrefixEngine if settings.kind == "shared-prefix" else TransformersEngine
        yield kind(loaded, tokenizer, sampling)
        return
    tokenizer = load_tokenizer(model)
    with serving(settings.command, model, settings.url) as url:
        engine = ServerEngine(url, model, tokenizer, sampling, api_key_env=settings.api_key_env)
        engine.check(probe.token_ids)
        yield engine


def rollouts_so_far(recipe: Recipe, root: Path, part: int) -> str:
    """Return how many rollouts of one part of the training prompts are there: ``30 of 72 responses``, "" for none."""
    return so_far(train_prompts(recipe, root, part), recipe.rollout.k, Layout(root).rollouts(part))


def scores_so_far(folder: Path) -> str:
    """Return how many distinct responses the shards of a folder have rewards of, "" for none."""
    scored = sum(read_table(shard, ["reward"]).num_rows for shard in folder.glob("part-*.parquet"))
    return f"{scored:,} responses scored" if scored else ""


def so_far(prompts: Prompts, k: int, folder: Path) -> str:
    """Return how many of ``k`` responses to each prompt a folder has: ``30 of 72 responses``, "" for none."""
    wanted, drawn = set(prompts.prompt_ids), 0
    for shard in folder.glob("part-*.parquet"):
        table = read_table(shard, ["prompt_id", "index"])
        rows = zip(listed(table, "prompt_id"), listed(table, "index"), strict=True)
        drawn += sum(prompt_id in wanted and index < k for prompt_id, index in rows)
    return f"{drawn:,} of {len(wanted) * k:,} responses" if drawn else ""


def score_rollouts(recipe: Recipe, root: Path, part: int, *, on_progress: OnProgress) -> Summary:
    """Score one part of the rollouts with the reward."""
    layout, prompts, k = Layout(root), train_prompts(recipe, root, part), recipe.rollout.k
    rollouts = find_rollouts(layout.rollouts(part), prompts.prompt_ids, k)
    folder = layout.scores(part).with_suffix("")
    rewards = score(recipe, root, "reward", prompts, rollouts, folder, on_progress)
    write_table(layout.scores(part), numbered(prompts.prompt_ids, k).append_column("reward", pa.array(rewards)))
    return {"responses": len(rollouts), "cut_off": cut_off(rollouts)}


def score(
    recipe: Recipe, root: Path, name: str, prompts: Prompts, rollouts: Drawn, folder: Path, on_progress: OnProgress
) -> Array:
    """Return the rewards of rollouts by the source ``name``, continuing with those that are in ``folder``."""
    from infalign.rewards.scores import score_to

    k = len(rollouts) // len(prompts.prompt_ids)
    return score_to(
        folder,
        load_reward(recipe, root, name),
        Lazy(len(rollouts), lambda i: prompts.conversations[i // k]),
        rollouts.values("text"),
        name=name,
        made_by=score_maker(recipe, root, name),
        on_progress=lambda done, total: on_progress(done, total, f"scores by {name}"),
    )


def numbered(prompt_ids: list[str], k: int) -> pa.Table:
    """Return the columns prompt_id and index of ``k`` responses to each prompt."""
    repeated_ids = pa.array(prompt_ids, pa.string()).take(
        pa.array(np.repeat(np.arange(len(prompt_ids)), k), pa.int64())
    )
    return pa.table({"prompt_id": repeated_ids, "index": np.tile(np.arange(k, dtype=np.int32), len(prompt_ids))})


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Return each value ``times`` times in a row, as the rows of rollouts repeat their prompt."""
    return [value for value in values for _ in range(times)]


def listed(table: pa.Table, column: str) -> list[Any]:
    """Return the values of a column."""
    return table[column].to_pylist()


def cut_off(rollouts: Drawn) -> float:
    """Return the share of rollouts that reached the limit of new tokens before they ended."""
    return sum(listed(table, "finish").count("length") for table in rollouts.tables(["finish"])) / len(rollouts)
