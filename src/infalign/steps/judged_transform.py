"""The transformation that wins most by the judge, for policies with ``transform: judged``; units of calibrate.

The judge scores some of the reference's rollouts, which the reward has ranked: docs/theory.md, when the judge is not
the reward.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from infalign.core.progress import OnProgress, SoFar
from infalign.core.sequences import Lazy
from infalign.core.storage import write_table, write_text
from infalign.method.procedures import Served
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.data_dependent import transform_owner
from infalign.recipe.layout import Layout
from infalign.rewards.scores import count_scored
from infalign.rewards.sources import Scorer
from infalign.sampling.prompts import rollout_keys
from infalign.steps.costs import Cost, Counts
from infalign.steps.run import Run
from infalign.steps.stored_rollouts import StoredRollouts

MAX_PROMPTS, MAX_SAMPLES = 128, 32  # that are judged; they lie in the first part of the rollouts
PART = 0


def units(run: Run) -> Iterator[Unit]:
    """Yield the judging of some rollouts, and the transformation of each policy that asks for it."""
    layout, recipe = run.layout, run.recipe
    policies = recipe.policies
    found = [name for name in policies if transform_owner(name, policies) == name]
    if not found:
        return
    yield Unit(
        "calibrate",
        "judged",
        inputs=(layout.rollouts(PART), layout.scores(PART), *run.reward_inputs("judge")),
        settings=run.key("judge") | run.precision,
        output=layout.judged,
        work=partial(judge_rollouts, run.scorer("judge"), run.stored, layout.judged),
        workspace=layout.judged.with_suffix(""),
        so_far=partial(judged_so_far, run.stored, layout.judged.with_suffix("")),
        cost=partial(judged_cost, run),
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


def _judged_counts(prompts: int, k: int) -> tuple[int, int]:
    """Return how many prompts and rollouts of each are judged."""
    return min(MAX_PROMPTS, prompts), min(MAX_SAMPLES, k)


def judged_cost(run: Run, counts: Counts) -> Cost:
    """Return the cost of the judge's pass, if it is a model of the run."""
    judge, rollout = run.recipe.judge, run.recipe.rollout
    if judge is None or not judge.is_classifier:
        return Cost()
    of_part = round(counts.prompts(rollout.prompts, "train") / len(run.rollout_parts))
    prompts, samples = _judged_counts(of_part, rollout.k)
    return counts.reading(counts.shape(run.architecture("judge")).parameters, prompts, samples)


def judged_so_far(stored: StoredRollouts, folder: Path) -> SoFar:
    """Return how many of the rollouts are judged."""
    prompts, samples = _judged_counts(len(stored.parts[PART].read().prompt_ids), stored.k)
    return count_scored(prompts * samples, folder)


def judge_rollouts(scorer: Scorer, stored: StoredRollouts, path: Path, *, on_progress: OnProgress) -> Summary:
    """Write the reward and the judge's score of the first rollouts of some prompts."""
    prompts = stored.parts[PART].read()
    count, samples = _judged_counts(len(prompts.prompt_ids), stored.k)
    texts = stored.drawn(PART, prompts).values("text")
    asked = Lazy(count * samples, lambda i: prompts.conversations[i // samples])
    judged = Lazy(count * samples, lambda i: texts[i // samples * stored.k + i % samples])
    scores = scorer.score(asked, judged, path.with_suffix(""), on_progress)
    table = rollout_keys(prompts.prompt_ids[:count], samples)
    table = table.append_column("reward", pa.array(stored.rewards(PART)[:count, :samples].ravel()))
    write_table(path, table.append_column("judge_reward", pa.array(scores)))
    return {"prompts": count, "samples": samples}


def find_transform(layout: Layout, name: str, procedure: Served, kl: float, *, on_progress: OnProgress) -> Summary:
    """Write the optimum by the judge at ``kl`` nats as a table."""
    from infalign.evaluation.judge import estimated_judge  # SciPy's solvers, which no other stage needs
    from infalign.evaluation.reward_tables import judged_samples
    from infalign.theory.optimum import optimal_by

    estimated = estimated_judge(judged_samples(layout.judged), procedure)
    found = optimal_by(estimated.judge, procedure, kl=kl)
    write_text(layout.transform(name), found.transform.to_json())
    return {"win_rate_by_judge": found.win_rate, "misfit": estimated.misfit, "noise": estimated.noise}


def inputs(run: Run, name: str) -> tuple[Path, ...]:
    """Return the table that a run finds for a policy, or for its teacher, if it finds one."""
    found = transform_owner(name, run.recipe.policies)
    return () if found is None else (run.layout.transform(found),)
