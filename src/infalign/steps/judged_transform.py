"""The transformation that wins most by the judge, for policies with ``transform: judged``; units of calibrate.

The judge scores some of the reference's rollouts, which the reward has ranked: docs/theory.md, when the judge is not
the reward.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from infalign.core.progress import OnProgress
from infalign.core.storage import write_table, write_text
from infalign.method.procedures import Served
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.data_dependent import transform_owner
from infalign.recipe.layout import Layout
from infalign.rewards.base import Batch
from infalign.rewards.sources import Scorer
from infalign.sampling.prompts import repeated, rollout_keys
from infalign.steps.run import READ, Pass, Run
from infalign.steps.samples import Samples, StoredRollouts, scored_so_far

MAX_PROMPTS, MAX_SAMPLES = 128, 32  # that are judged; they lie in the first part of the rollouts
PART = 0


def units(run: Run) -> Iterator[Unit]:
    """Yield the judging of some rollouts, and the transformation of each policy that asks for it."""
    layout, recipe = run.layout, run.recipe
    policies = recipe.policies
    found = [name for name in policies if transform_owner(name, policies) == name]
    if not found:
        return
    stored = run.stored
    samples = judged_samples_of(stored)
    yield Unit(
        "calibrate",
        "judged",
        inputs=(layout.rollouts(PART), layout.scores(PART), *run.reward_inputs("judge")),
        settings=run.key("judge") | run.precision,
        output=layout.judged,
        work=partial(judge_rollouts, run.scorer("judge"), samples, stored, layout.judged),
        workspace=layout.judged.with_suffix(""),
        so_far=partial(scored_so_far, samples, [layout.judged.with_suffix("")]),
        passes=[Pass.over(READ, run.scoring_networks("judge"), samples.table, samples.each)],
    )
    for name in found:
        kl = policies[name].theory.kl_budget
        assert kl is not None  # as `Shaped` checks
        yield Unit(
            "calibrate",
            "transform",
            name,
            inputs=(layout.judged,),
            settings=run.key("procedure") | {"kl_budget": kl},
            output=layout.transform(name),
            work=partial(find_transform, layout, name, recipe.procedure, kl),
        )


def judged_samples_of(stored: StoredRollouts) -> Samples:
    """Return the rollouts that are judged."""
    part = stored.parts[PART]
    table = replace(part.table, first=min(part.table.first, MAX_PROMPTS * len(stored.parts)))
    return Samples(table, min(MAX_SAMPLES, part.each), part.folder)


def judge_rollouts(
    scorer: Scorer, samples: Samples, stored: StoredRollouts, path: Path, *, on_progress: OnProgress
) -> Summary:
    """Write the reward and the judge's score of the first rollouts of some prompts."""
    prompts, drawn = samples.read()
    count = len(prompts.prompt_ids)
    asked, columns = samples.conversations(prompts), repeated(prompts.columns, samples.each)
    scores = scorer.score(Batch(asked, drawn.values("text"), columns), path.with_suffix(""), on_progress)
    rewards = stored.rewards(PART)[:count, : samples.each].ravel()
    table = rollout_keys(prompts.prompt_ids, samples.each).append_column("reward", pa.array(rewards))
    table = table.append_column("judge_reward", pa.array(scores)).filter(~np.isnan(rewards + scores))
    write_table(path, table)
    return {"prompts": table.num_rows // samples.each, "samples": samples.each}


def find_transform(layout: Layout, name: str, procedure: Served, kl: float, *, on_progress: OnProgress) -> Summary:
    """Write the optimum by the judge at ``kl`` nats as a table."""
    from infalign.evaluation.judge import estimated_judge  # SciPy's solvers, which no other stage needs
    from infalign.evaluation.pairing import judged_samples
    from infalign.theory.optimum import optimal_by

    estimated = estimated_judge(judged_samples(layout.judged), procedure)
    found = optimal_by(estimated.judge, procedure, kl=kl)
    write_text(layout.transform(name), found.transform.to_json())
    return {"win_rate_by_judge": found.win_rate, "misfit": estimated.misfit, "noise": estimated.noise}


def inputs(run: Run, name: str) -> tuple[Path, ...]:
    """Return the table that a run finds for a policy, or for its teacher, if it finds one."""
    found = transform_owner(name, run.recipe.policies)
    return () if found is None else (run.layout.transform(found),)
