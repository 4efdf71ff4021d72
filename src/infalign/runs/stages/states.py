"""The reference's states at every token of the rollouts, for guides that read them and for training the layers above.

The units are of the stage train.
"""

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
from infalign.training.solvers.base import Solver, States


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the rollouts, for all layers that some policy reads the states of."""
    rollout, parts = run.recipe.rollout, len(run.rollout_parts)
    for which in sorted({found for policy in run.recipe.policies.values() for found in read_by(policy)}):
        for part in range(parts):
            yield Unit(
                "train",
                f"states-{which}-{part}",
                inputs=(run.layout.rollouts(part), *run.reference_inputs),
                settings=run.sampling_key | {"states": str(which), "prompts": rollout.prompts, "k": rollout.k},
                output=run.layout.states(str(which), part),
                work=partial(compute_states, run.reference, run.recipe.compute, run.stored, which, part),
                so_far=partial(states_so_far, run.stored, which, part),
                passes=partial(states_passes, run, which),
            )


def states_passes(run: Run, which: States, texts: Texts) -> Iterator[Pass]:
    """Yield the pass of the reference over one part of the rollouts."""
    rollout = run.recipe.rollout
    prompts = texts.prompts(rollout.prompts, "train") / len(run.rollout_parts)
    vocabulary = which.likely > 0
    yield Read(run.architecture("policy"), prompts, rollout.k, texts.prompt, texts.drawn, vocabulary=vocabulary)


def read_by(policy: Solver) -> set[States]:
    """Return which states of the reference a policy's training reads from the disk."""
    return {which for which in (policy.states, policy.teacher_states) if which is not None}


def compute_states(
    reference: str, compute: Compute, stored: StoredRollouts, which: States, part: int, *, on_progress: OnProgress
) -> Summary:
    """Write the states of one part of the rollouts, in the precision of drawing and scoring.

    Raises ConfigError for a reference whose last layers cannot be trained from the states below them.
    """
    from infalign.models.above import check_above, layers_below
    from infalign.models.guided import layers_read
    from infalign.models.states import write_states

    model, _ = load_policy(reference, device=compute.torch_device(), dtype=compute.dtype)
    if which.evenly:
        layers = layers_read(model.config.num_hidden_layers, which.evenly)
    else:
        check_above(model, which.last)
        layers = [layers_below(model.config, which.last)]
    prompts, responses = stored.texts(part)
    folder = stored.layout.states(str(which), part)
    write_states(model, layers, prompts, responses, folder, on_progress, likely=which.likely)
    return {"responses": len(responses), "layers": layers}


def states_so_far(stored: StoredRollouts, which: States, part: int) -> SoFar:
    """Return how many shards of one part there are; how many there will be is not known."""
    shards = len([*stored.layout.states(str(which), part).glob("from-*.safetensors")])
    return SoFar(f"{shards} shards", 0.0) if shards else NOTHING
