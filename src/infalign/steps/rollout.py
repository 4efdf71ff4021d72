"""The stage rollout: K responses of the reference policy to every training prompt."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from infalign.core.progress import OnProgress, SoFar
from infalign.pipeline.units import Summary, Unit
from infalign.sampling.prompts import PromptTable, Sampler, rollout_progress
from infalign.steps.costs import Cost, Counts
from infalign.steps.run import Run


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the training prompts; more rollouts or prompts are added to existing shards."""
    rollout, sampler = run.recipe.rollout, run.sampler(run.reference)
    for number, part in enumerate(run.rollout_parts):
        folder = run.layout.rollouts(number)
        yield Unit(
            "rollout",
            "rollout",
            str(number),
            inputs=run.reference_inputs,
            settings=run.sampling_key,
            extent={"rollout": {"prompts": rollout.prompts, "k": rollout.k}},
            output=folder,
            work=partial(draw_rollouts, sampler, part, rollout.k, folder, run.recipe.seed),
            so_far=partial(rollouts_so_far, part, rollout.k, folder),
            only_adds=True,
            cost=partial(rollout_cost, run),
        )


def rollout_cost(run: Run, counts: Counts) -> Cost:
    """Return the cost of the draws of one part."""
    rollout, parameters = run.recipe.rollout, counts.shape(run.architecture("policy")).parameters
    prompts = counts.prompts(rollout.prompts, "train") / len(run.rollout_parts)
    return counts.drawing(parameters, prompts, rollout.k, rollout.max_new_tokens)


def draw_rollouts(
    sampler: Sampler, part: PromptTable, k: int, folder: Path, seed: int, *, on_progress: OnProgress
) -> Summary:
    """Draw K responses from the reference policy for one part of the training prompts."""
    prompts = part.read()
    sampler.draw(prompts, k, folder, seed=seed, on_progress=on_progress)
    return {"responses": len(prompts.prompt_ids) * k}


def rollouts_so_far(part: PromptTable, k: int, folder: Path) -> SoFar:
    """Return how many rollouts of one part of the prompts exist: ``30 of 72 responses``."""
    return rollout_progress(part.read(), k, folder)
