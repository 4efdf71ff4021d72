"""The reference's states at every token of the rollouts, for guides that read them; units of the stage train."""

from collections.abc import Iterator
from functools import partial

from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.progress import NOTHING, OnProgress, SoFar
from infalign.runs.layout import Summary
from infalign.runs.passes import Pass, Read, Texts
from infalign.runs.rollouts import StoredRollouts
from infalign.runs.run import Run
from infalign.runs.units import Unit
from infalign.training.solvers.base import Offline, Solver


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the rollouts, for each number of layers that some policy's guide reads."""
    rollout, parts = run.recipe.rollout, len(run.rollout_parts)
    for reads in sorted({found for policy in run.recipe.policies.values() if (found := stored_layers(policy))}):
        for part in range(parts):
            yield Unit(
                "train",
                f"states-{reads}-{part}",
                inputs=(run.layout.rollouts(part), *run.reference_inputs),
                settings=run.sampling_key | {"reads": reads, "prompts": rollout.prompts, "k": rollout.k},
                output=run.layout.states(reads, part),
                work=partial(compute_states, run.reference, run.recipe.compute, run.stored, reads, part),
                so_far=partial(states_so_far, run.stored, reads, part),
                passes=partial(states_passes, run),
            )


def states_passes(run: Run, texts: Texts) -> Iterator[Pass]:
    """Yield the pass of the reference over one part of the rollouts."""
    rollout = run.recipe.rollout
    prompts = texts.prompts(rollout.prompts, "train") / len(run.rollout_parts)
    yield Read(run.architecture("policy"), prompts, rollout.k, texts.prompt, texts.drawn)


def stored_layers(policy: Solver) -> int:
    """Return how many layers of the reference a policy's guide reads from the disk, 0 for none."""
    side = policy.guide.side if isinstance(policy, Offline) and policy.guide is not None else None
    return side.reads if side is not None and side.stored else 0


def compute_states(
    reference: str, compute: Compute, stored: StoredRollouts, reads: int, part: int, *, on_progress: OnProgress
) -> Summary:
    """Write the states of one part of the rollouts, in the precision of drawing and scoring."""
    from infalign.models.guided import layers_read
    from infalign.models.states import write_states

    model, _ = load_policy(reference, device=compute.torch_device(), dtype=compute.dtype)
    layers = layers_read(model.config.num_hidden_layers, reads)
    prompts, responses = stored.texts(part)
    write_states(model, layers, prompts, responses, stored.layout.states(reads, part), on_progress)
    return {"responses": len(responses), "layers": layers}


def states_so_far(stored: StoredRollouts, reads: int, part: int) -> SoFar:
    """Return how many shards of one part there are; how many there will be is not known."""
    shards = len([*stored.layout.states(reads, part).glob("from-*.safetensors")])
    return SoFar(f"{shards} shards", 0.0) if shards else NOTHING
