"""Rollouts and rewards of a run on a Ray cluster, as a job of Ray Data (the ``ray`` extra).

Each actor holds the recipe's engine and reward and does one shard after another: some prompts with all of their
rollouts, and their rewards, each file whole or not there. Shards have the names and the form that the run itself would
give them, so a killed job resumes with those that are missing, and `infalign run` takes all as its own. What a killed
node still writes is the same shard under the same name. All nodes see the run directory under one path.
"""

import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from rich.console import Console

from infalign.core import errors
from infalign.core.display import say
from infalign.core.errors import ConfigError, InfalignError, PartialError, first_line
from infalign.core.progress import ProgressDisplay
from infalign.core.spelling import listed_names
from infalign.core.storage import column_values, read_table, writing
from infalign.pipeline.scheduler import Remaining, begin
from infalign.pipeline.units import identify
from infalign.pipeline.workers import LESS_MEMORY, Task, call
from infalign.recipe.settings import Recipe
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_shard
from infalign.sampling.engine import ConcurrentEngine, Engine
from infalign.sampling.prompts import PromptTable
from infalign.sampling.rollouts import SHARD_PROMPTS, draw_shard, shard_path
from infalign.steps.run import Run
from infalign.steps.whole_run import do_units, open_run, units, write_recipe

TRIES = 4  # of a shard whose actor dies, as when a node is lost; Ray would go on for ever


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the training prompts, and the folders of its rollouts and of their rewards."""

    table: PromptTable
    rollouts: Path
    scores: Path

    def missing(self, k: int) -> list[int]:
        """Return the numbers of the shards whose rollouts or rewards are to be made.

        Where another command drew some prompts of a shard, it stays theirs: `infalign run` draws the others. Raises
        ConfigError if prompts have fewer than ``k`` rollouts.
        """
        prompt_ids, shards = self.table.read().prompt_ids, sorted(self.rollouts.glob("part-*.parquet"))
        drawn = Counter(
            identity for shard in shards for identity in column_values(read_table(shard, ["prompt_id"]), "prompt_id")
        )
        if drawn and (fewer := min(drawn.values())) < k:
            raise ConfigError(
                f"{self.rollouts} has {fewer} rollouts for a prompt, but rollout.k is {k}; a cluster samples only "
                "whole shards: add the rest with `infalign run --until rollout`, or choose another run_dir"
            )
        names, missing = {shard.name for shard in shards}, list[int]()
        for number, start in enumerate(range(0, len(prompt_ids), SHARD_PROMPTS)):
            if shard_path(self.rollouts, number).name in names:
                to_do = not shard_path(self.scores, number).exists()
            else:
                to_do = drawn.keys().isdisjoint(prompt_ids[start : start + SHARD_PROMPTS])
            missing += [number] * to_do
        return missing


def parts_of(run: Run) -> list[Part]:
    """Return the parts of a run's training prompts."""
    numbered = enumerate(run.rollout_parts)
    return [Part(table, run.layout.rollouts(i), run.layout.scores(i).with_suffix("")) for i, table in numbered]


class Actor:
    """One engine and one reward of a run, which do shards of one ``job``; the run's paths start in ``folder``."""

    def __init__(self, run: Run, folder: str, job: str) -> None:
        self.run, self.folder, self.job, self.kept = run, folder, job, ExitStack()
        self.parts, self.scorer = parts_of(run), run.scorer("reward")
        self.prompts = cache(lambda part: self.parts[part].table.read())

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Do the one shard of a batch; return what was wrong with it: the class of an error and what it says, or "".

        An error is returned, because Ray would raise another one, without its cause.
        """
        part, shard = (int(batch[name][0]) for name in ("part", "shard"))
        kind = said = ""
        try:
            task = Task(f"shard {shard} of part {part}", lambda **_: self.do(part, shard))
            call(task, print, self.run.recipe.compute.threads)
        except InfalignError as error:
            kind = next(one.__name__ for one in type(error).__mro__ if one.__module__ == errors.__name__)
            said = str(error)
        return {"kind": np.array([kind]), "said": np.array([said])}

    def __del__(self) -> None:
        """Stop a server that the engine started."""
        self.kept.close()

    @cached_property
    def reward(self) -> NamedReward:
        """The reward, loaded when it is first needed."""
        return self.scorer.load()

    @cached_property
    def engine(self) -> Engine | ConcurrentEngine:
        """The engine, opened when it is first needed."""
        sampler, probe = self.run.sampler("reference", self.run.reference), self.prompts(0).asked()[0]
        return self.kept.enter_context(sampler.open(probe, seed=self.run.recipe.seed))

    def do(self, number: int, shard: int) -> None:
        """Draw and score what of a shard is not there."""
        os.chdir(self.folder)
        part, prompts = self.parts[number], self.prompts(number)
        drawn, scored = (shard_path(folder, shard) for folder in (part.rollouts, part.scores))
        begun = scored.with_name(f".{self.job}-{scored.name}")  # one byte for each process that died in the shard
        try:
            with writing(begun), begun.open("a") as file:
                file.write(".")
            if begun.stat().st_size > TRIES:
                raise InfalignError(f"{TRIES} actors died while making {scored}; if memory ran out, {LESS_MEMORY}")
            if not drawn.exists():
                asked = prompts.asked()[shard * SHARD_PROMPTS : (shard + 1) * SHARD_PROMPTS]
                draw_shard(self.engine, asked, self.run.recipe.rollout.k, drawn)
            if not scored.exists():
                table = read_table(drawn, ["prompt_id", "text", "columns"])
                # The run may have numbered its shards otherwise.
                conversation_of = dict(zip(prompts.prompt_ids, prompts.conversations, strict=True))
                conversations = [conversation_of[identity] for identity in column_values(table, "prompt_id")]
                rows = Batch(conversations, column_values(table, "text"), column_values(table, "columns"))
                score_shard(scored, self.reward, rows)
        finally:
            begun.unlink(missing_ok=True)


def on_cluster(recipe: Recipe, *, actors: int, gpus: float, cpus: int | None, console: Console) -> None:
    """Draw and score the rollouts of a recipe by ``actors`` with this many GPUs each.

    Ray is a cluster that it finds, as by RAY_ADDRESS, or one that is started here with ``cpus`` logical CPUs. Raises
    ConfigError if what rollouts need is not done, or the cluster is too small.
    """

    def sample(remaining: Remaining) -> None:
        by_name, ids = {unit.name: unit for unit in remaining.units}, identify(remaining.units)
        if before := [name for name in remaining.todo if by_name[name].stage not in ("rollout", "score")]:
            raise ConfigError(
                f"{listed_names(before)} must be done before sampling on a cluster; run `infalign run RECIPE "
                "--until reward-model` first"
            )
        if remaining.todo:
            with _cluster(actors, gpus, cpus):
                for name in remaining.todo:
                    begin(remaining.root, by_name[name], ids[name])
                _draw(run, actors, gpus, console)

    with open_run(recipe) as run:
        write_recipe(recipe, run.layout.root)
        do_units(run, units(run, until="score"), until="score", console=console, before_units=sample)


def _draw(run: Run, actors: int, gpus: float, console: Console) -> None:
    import ray

    parts, k = parts_of(run), run.recipe.rollout.k
    for part in parts:
        part.rollouts.mkdir(parents=True, exist_ok=True)
        part.scores.mkdir(parents=True, exist_ok=True)
    shards = [{"part": i, "shard": number} for i, part in enumerate(parts) for number in part.missing(k)]
    say(console, f"{len(shards):,} shards of {SHARD_PROMPTS} prompts × {k} rollouts left")
    if not shards:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    done = ray.data.from_items(shards, override_num_blocks=len(shards)).map_batches(
        Actor,
        fn_constructor_args=(run, str(Path.cwd()), uuid4().hex),
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(shards))),
        batch_size=1,
        num_cpus=1,
        num_gpus=gpus,
    )
    with ProgressDisplay(console) as display:
        display.start("shards")
        try:
            for number, row in enumerate(done.iter_rows(), 1):
                if row["kind"]:
                    raise getattr(errors, row["kind"])(row["said"])
                display.update("shards", number, len(shards))
        except ray.exceptions.RayError as error:
            raise InfalignError(f"Ray stopped ({first_line(error)}); rerun the same command to resume") from error
        display.finish("shards")


@contextmanager
def _cluster(actors: int, gpus: float, cpus: int | None) -> Iterator[None]:
    """Connect to Ray for as long as the block runs. Raises ConfigError if it is not installed or too small."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"sampling on a cluster needs Ray ({error}); pip install 'infalign[ray]'") from error
    address, on_signal = os.environ.get("RAY_ADDRESS", ""), signal.getsignal(signal.SIGTERM)
    host, _, port = address.rpartition(":")
    try:
        if address.startswith("ray://"):
            raise ValueError("Ray Data works on a node of the cluster, not through ray://")
        if port.isdigit():  # Ray itself would try a closed port for a quarter of an hour
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(num_cpus=cpus, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    except Exception as error:
        kind = ConfigError if isinstance(error, ValueError) else PartialError  # such as --ray-cpus for a cluster
        cure = f"start it, or correct RAY_ADDRESS ({address or 'not set'}) or --ray-cpus, and rerun"
        raise kind(f"cannot reach or start Ray ({first_line(error)}); {cure}") from error
    signal.signal(signal.SIGTERM, on_signal)  # Ray's handler would end this process without a word
    try:
        there = ray.cluster_resources()
        # Without a CPU for what reads the list of shards, Ray Data would wait for ever.
        for what, needed in (("CPU", actors + 1.0), ("GPU", actors * gpus)):
            if there.get(what, 0.0) < needed:
                raise ConfigError(
                    f"{actors} actors need {needed:g} {what}s, but Ray has {there.get(what, 0.0):g}; lower "
                    "--ray-actors or use a larger cluster"
                )
        if all(node["Resources"].get("GPU", 0.0) < gpus for node in ray.nodes() if node["Alive"]):
            raise ConfigError(f"an actor needs {gpus:g} GPUs of one node, but no node has as many; lower --ray-gpus")
        yield
    finally:
        ray.shutdown()
