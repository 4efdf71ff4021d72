"""The stage score: the rewards of the rollouts."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from infalign.core.progress import OnProgress, SoFar
from infalign.core.sequences import Lazy
from infalign.core.storage import write_table
from infalign.pipeline.units import Summary, Unit
from infalign.rewards.scores import count_scored
from infalign.rewards.sources import Scorer
from infalign.sampling.prompts import PromptTable, rollout_keys
from infalign.sampling.rollouts import find_rollouts
from infalign.steps.costs import Cost, Counts
from infalign.steps.run import Run
from infalign.steps.stored_rollouts import cut_off


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the rollouts."""
    rollout, scorer = run.recipe.rollout, run.scorer("reward")
    for number, part in enumerate(run.rollout_parts):
        rollouts, table = run.layout.rollouts(number), run.layout.scores(number)
        kept = table.with_suffix("")
        yield Unit(
            "score",
            "score",
            str(number),
            inputs=(rollouts, *run.reward_inputs("reward")),
            settings=run.key("reward") | run.precision,
            extent={"rollout": {"prompts": rollout.prompts, "k": rollout.k}},
            output=table,
            work=partial(score_rollouts, scorer, part, rollout.k, rollouts, table),
            workspace=kept,
            so_far=partial(scores_so_far, part, rollout.k, kept),
            cost=partial(score_cost, run),
        )


def score_cost(run: Run, counts: Counts) -> Cost:
    """Return the cost of the reward model's pass over one part of the rollouts, if the reward is a model of the run."""
    rollout = run.recipe.rollout
    if not run.recipe.reward.is_classifier:
        return Cost()
    prompts = counts.prompts(rollout.prompts, "train") / len(run.rollout_parts)
    return counts.reading(counts.shape(run.architecture("reward")).parameters, prompts, rollout.k)


def scores_so_far(part: PromptTable, k: int, folder: Path) -> SoFar:
    """Return how many distinct rollouts of one part are scored."""
    return count_scored(len(part.read().prompt_ids) * k, folder)


def score_rollouts(
    scorer: Scorer, part: PromptTable, k: int, rollouts: Path, table: Path, *, on_progress: OnProgress
) -> Summary:
    """Score one part of the rollouts with the reward."""
    prompts = part.read()
    drawn = find_rollouts(rollouts, prompts.prompt_ids, k)
    asked = Lazy(len(drawn), lambda i: prompts.conversations[i // k])
    rewards = scorer.score(asked, drawn.values("text"), table.with_suffix(""), on_progress)
    write_table(table, rollout_keys(prompts.prompt_ids, k).append_column("reward", pa.array(rewards)))
    return {"responses": len(drawn), "cut_off": cut_off(drawn)}
