"""The stage score: the rewards of the rollouts."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from infalign.core.progress import OnProgress
from infalign.core.storage import write_table
from infalign.pipeline.units import Summary, Unit
from infalign.rewards.sources import Scorer
from infalign.sampling.prompts import repeated, rollout_keys
from infalign.steps.run import READ, Pass, Run
from infalign.steps.samples import StoredSamples, cut_off, scored_so_far


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the rollouts."""
    rollout, scorer = run.recipe.rollout, run.scorer("reward")
    for number, samples in enumerate(run.stored.parts):
        table = run.layout.scores(number)
        kept = table.with_suffix("")
        yield Unit(
            "score",
            "score",
            str(number),
            inputs=(samples.folder, *run.reward_inputs("reward")),
            settings=run.key("reward") | run.precision,
            extent={"rollout": {"prompts": rollout.prompts, "k": rollout.k}},
            output=table,
            work=partial(score_rollouts, scorer, samples, table),
            workspace=kept,
            so_far=partial(scored_so_far, samples, [kept]),
            passes=[Pass.over(READ, run.scoring_networks("reward"), samples.table, rollout.k)],
        )


def score_rollouts(scorer: Scorer, samples: StoredSamples, table: Path, *, on_progress: OnProgress) -> Summary:
    """Score one part of the rollouts with the reward."""
    prompts, drawn = samples.read()
    rewards = scorer.score(samples.rows(prompts, drawn), table.with_suffix(""), on_progress)
    scores = rollout_keys(prompts.prompt_ids, samples.each)
    scores = scores.append_column("reward", pa.array(rewards, from_pandas=True))  # NaN, of a prompt left out, is null
    write_table(table, scores.append_column("columns", pa.array(repeated(prompts.columns, samples.each), pa.string())))
    return {"responses": len(drawn), "cut_off": cut_off(drawn)}
