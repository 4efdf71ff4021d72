"""The stage rollout: K responses of the reference policy to every training prompt."""

from collections.abc import Iterator
from functools import partial

from infalign.pipeline.units import Unit
from infalign.steps.run import DRAWN, Pass, Run
from infalign.steps.samples import draw_samples, drawn_so_far


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the training prompts; more rollouts or prompts are added to existing shards."""
    rollout, sampler = run.recipe.rollout, run.sampler("reference", run.reference)
    for number, samples in enumerate(run.stored.parts):
        yield Unit(
            "rollout",
            "rollout",
            str(number),
            inputs=run.reference_inputs,
            settings=run.sampling_key("reference"),
            extent={"rollout": {"prompts": rollout.prompts, "k": rollout.k}},
            output=samples.folder,
            work=partial(draw_samples, sampler, samples, run.recipe.seed),
            so_far=partial(drawn_so_far, samples),
            only_adds=True,
            passes=[Pass.over(DRAWN, run.networks("reference"), samples.table, rollout.k)],
        )
