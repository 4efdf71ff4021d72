"""The stage rollout: K responses of the reference policy to every training prompt."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from infalign.core.progress import OnProgress, SoFar
from infalign.pipeline.units import Summary, Unit
from infalign.sampling.prompts import PromptTable, Sampler, drawn_so_far
from infalign.sampling.rollouts import prompts_together
from infalign.steps.passes import Draw, Pass, Texts
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
            passes=partial(rollout_passes, run),
        )


def rollout_passes(run: Run, texts: Texts) -> Iterator[Pass]:
    """Yield the draws of one part."""
    rollout, parts = run.recipe.rollout, len(run.rollout_parts)
    prompts = texts.prompts(rollout.prompts, "train") / parts
    policy, together, served = run.architecture("policy"), prompts_together(rollout.k), not rollout.engine.own_models
    yield Draw(policy, prompts, rollout.k, texts.prompt, texts.drawn, rollout.max_new_tokens, together, served)


def draw_rollouts(
    sampler: Sampler, part: PromptTable, k: int, folder: Path, seed: int, *, on_progress: OnProgress
) -> Summary:
    """Draw K responses from the reference policy for one part of the training prompts."""
    prompts = part.read()
    sampler.draw(prompts, k, folder, seed=seed, on_progress=on_progress)
    return {"responses": len(prompts.prompt_ids) * k}


def rollouts_so_far(part: PromptTable, k: int, folder: Path) -> SoFar:
    """Return how many rollouts of one part of the prompts exist: ``30 of 72 responses``."""
    return drawn_so_far(part.read(), k, folder)
