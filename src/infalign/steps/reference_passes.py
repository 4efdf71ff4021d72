"""What is computed once of the reference at the rollouts, for all trainings that read it; units of the stage train.

Its states at every token are for guides that read them and for training the layers above. Its log-probabilities are as
a training computes them, where drawing rounds otherwise: a log-ratio is then 0 before the first step.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from infalign.core.progress import NOTHING, OnProgress, SoFar
from infalign.core.storage import write_table
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.pipeline.units import Summary, Unit
from infalign.steps.policy_inputs import PolicyInputs
from infalign.steps.run import READ, Pass, Run
from infalign.steps.samples import StoredRollouts
from infalign.training.solvers.base import Solver
from infalign.training.solvers.guide import States


def units(run: Run) -> Iterator[Unit]:
    """Yield the states in each part of the rollouts, then the log-probabilities, of each kind that a policy reads."""
    rollout, stored = run.recipe.rollout, run.stored
    for which in sorted({kind for policy in run.recipe.policies.values() for kind in states_read_by(policy)}):
        for part, samples in enumerate(stored.parts):
            yield Unit(
                "train",
                "states",
                f"{which}-{part}",
                inputs=(samples.folder, *run.reference_inputs),
                settings=run.sampling_key("reference")
                | {"states": str(which), "prompts": rollout.prompts, "k": rollout.k},
                output=run.layout.states(str(which), part),
                work=partial(compute_states, run.reference, run.recipe.compute, stored, which, part),
                so_far=partial(states_so_far, run.layout.states(str(which), part)),
                passes=[Pass.over(READ, run.networks("reference"), samples.table, rollout.k)],
            )
    inputs, layout, parts = PolicyInputs.of(run), run.layout, range(len(stored.parts))
    asking = {inputs.logprobs(policy): policy for policy in run.recipe.policies.values()}
    for asked, policy in asking.items():
        if asked is None:
            continue
        states = policy.data_needs.states
        read = () if states is None else (layout.states(str(states), part) for part in parts)
        yield Unit(
            "train",
            "logprobs",
            asked,
            inputs=(*map(layout.rollouts, parts), *run.reference_inputs, *read),
            settings=run.key("policy") | {"logprobs": asked},
            output=layout.logprobs(asked),
            work=partial(write_logprobs, policy, inputs, run.recipe.compute, layout.logprobs(asked)),
            passes=[] if states else [Pass.over(READ, run.networks("reference"), run.rollout_prompts, rollout.k)],
        )


def states_read_by(policy: Solver) -> list[States]:
    """Return which states of the reference a policy's training reads from the disk."""
    needs = policy.data_needs
    return list(dict.fromkeys(which for which in (needs.states, needs.teacher_states) if which is not None))


def read_by(run: Run, policy: Solver) -> tuple[Path, ...]:
    """Return the outputs of these units that a policy's training reads."""
    layout, asked = run.layout, PolicyInputs.of(run).logprobs(policy)
    parts = range(len(run.rollout_parts))
    states = (layout.states(str(which), part) for which in states_read_by(policy) for part in parts)
    return (*states, *([] if asked is None else [layout.logprobs(asked)]))


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


def write_logprobs(
    policy: Solver, inputs: PolicyInputs, compute: Compute, path: Path, *, on_progress: OnProgress
) -> Summary:
    """Write log π_ref of each rollout, in the order of the rollouts."""
    which = policy.data_needs.states
    if which is not None and which.top_tokens:
        logprobs: Any = [float(said.top_tokens.target_logprobs.sum()) for said in inputs.stored.states(which)]
    else:
        logprobs = _compute_logprobs(policy, inputs, compute, on_progress)
    write_table(path, pa.table({"logprob": pa.array(logprobs)}))
    return {"responses": len(logprobs)}


def _compute_logprobs(policy: Solver, inputs: PolicyInputs, compute: Compute, on_progress: OnProgress) -> Any:
    """Return log π_ref by a pass over the rollouts, of the whole reference or of what follows its states."""
    from infalign.models.packed import response_logprobs
    from infalign.models.top_layers import starting_from_states

    stored, which, device = inputs.stored, policy.data_needs.states, compute.torch_device()
    if which is not None:
        model, states, last = inputs.of_solver.start(policy, device), stored.states(which), which.last
    else:  # an untrained guide is the reference, and its trunk may not be there yet
        model, states, last = load_policy(inputs.reference, device=device)[0], (), 0
    prompts, responses = stored.all_texts()

    def report(done: int, total: int) -> None:
        on_progress(done, total, "log-probabilities of the reference")

    with starting_from_states(model, last):
        return response_logprobs(model, prompts, responses, bf16=policy.fit.bf16, stored=states, on_progress=report)
