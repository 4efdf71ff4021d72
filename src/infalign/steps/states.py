"""The reference's states at every token of the rollouts, for guides that read them and for training the layers above.

The units are of the stage train.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from infalign.core.progress import NOTHING, OnProgress, SoFar
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.pipeline.units import Summary, Unit
from infalign.steps.costs import Cost, Counts, UnknownSizeError, reading
from infalign.steps.run import Run
from infalign.steps.samples import Samples, StoredRollouts
from infalign.training.solvers.base import Solver, States

TOP_TOKEN_BYTES = 8  # of a token that is told apart: its id and its log-probability


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit per part of the rollouts, for all layers that some policy reads the states of."""
    rollout, stored = run.recipe.rollout, run.stored
    for which in sorted({found for policy in run.recipe.policies.values() for found in read_by(policy)}):
        for part, samples in enumerate(stored.parts):
            yield Unit(
                "train",
                "states",
                f"{which}-{part}",
                inputs=(samples.folder, *run.reference_inputs),
                settings=run.sampling_key | {"states": str(which), "prompts": rollout.prompts, "k": rollout.k},
                output=run.layout.states(str(which), part),
                work=partial(compute_states, run.reference, run.recipe.compute, stored, which, part),
                so_far=partial(states_so_far, run.layout.states(str(which), part)),
                cost=partial(states_cost, run, which, samples),
            )


def states_cost(run: Run, which: States, samples: Samples, counts: Counts) -> Cost:
    """Return the cost of the reference's pass over one part of the rollouts, whose states are kept."""
    recipe, reference = run.recipe, run.architecture("policy")
    if not (width := counts.shape(reference).width):
        raise UnknownSizeError("the width of the reference policy")
    prompts = counts.prompts(samples.table)
    drawn = prompts * samples.each * recipe.rollout.max_new_tokens
    of_token = max(1, which.evenly) * width * (2 if recipe.compute.dtype == "bfloat16" else 4)
    disk = (prompts * recipe.data.max_prompt_tokens + drawn) * of_token + drawn * which.top_tokens * TOP_TOKEN_BYTES
    return reading([reference], samples, counts)._replace(disk=disk)


def read_by(policy: Solver) -> set[States]:
    """Return which states of the reference a policy's training reads from the disk."""
    needs = policy.data_needs
    return {which for which in (needs.states, needs.teacher_states) if which is not None}


def compute_states(
    reference: str, compute: Compute, stored: StoredRollouts, which: States, part: int, *, on_progress: OnProgress
) -> Summary:
    """Write the states of one part of the rollouts, in the precision of drawing and scoring.

    Raises ConfigError for a reference whose last layers cannot be trained from the states below them.
    """
    from infalign.models.guided import evenly_spaced_layers
    from infalign.models.states import StateFolder, write_states
    from infalign.models.top_layers import check_top_layers, count_layers_below

    model, _ = load_policy(reference, device=compute.torch_device(), dtype=compute.dtype)

    if which.evenly:
        layers = evenly_spaced_layers(model.config.num_hidden_layers, which.evenly)
    else:
        check_top_layers(model, which.last)
        layers = [count_layers_below(model.config, which.last)]
    folder = StateFolder(stored.layout.states(str(which), part), layers, which.top_tokens)
    prompts, responses = stored.texts(part)
    write_states(model, folder, prompts, responses, on_progress)
    return {"responses": len(responses), "layers": layers}


def states_so_far(folder: Path) -> SoFar:
    """Return how many shards of one part there are; how many there will be is not known."""
    shards = len([*folder.glob("from-*.safetensors")])
    return SoFar(f"{shards} shards", 0.0) if shards else NOTHING
