"""The reference's log-probabilities of the rollouts, as a training computes them where drawing rounds otherwise.

A log-ratio is then 0 before the first step. The units are of the stage train.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from infalign.core.progress import OnProgress
from infalign.core.storage import write_table
from infalign.models.conversations import load_tokenizer
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.pipeline.units import Summary, Unit
from infalign.steps.costs import Cost, Counts, reading, summed
from infalign.steps.policy_inputs import PolicyInputs
from infalign.steps.run import Run
from infalign.training.solvers.base import Solver
from infalign.training.solvers.offline import Offline

BATCH_TOKENS = 16384  # tokens per forward pass


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit for each kind of log-probabilities that some policy is trained with."""
    inputs, layout = PolicyInputs.of(run), run.layout
    asking = {inputs.logprobs(policy): policy for policy in run.recipe.policies.values()}
    for asked, policy in asking.items():
        if asked is None:
            continue
        assert isinstance(policy, Offline)
        parts, states = range(len(run.rollout_parts)), asked.states
        read = () if states is None else (layout.states(str(states), part) for part in parts)
        yield Unit(
            "train",
            "logprobs",
            str(asked),
            inputs=(*map(layout.rollouts, parts), *run.reference_inputs, *read),
            settings=run.key("policy") | {"logprobs": str(asked)},
            output=layout.logprobs(str(asked)),
            work=partial(write_logprobs, policy, inputs, run.recipe.compute, layout.logprobs(str(asked))),
            cost=partial(logprob_cost, run, policy),
        )


def table_read_by(run: Run, policy: Solver) -> tuple[Path, ...]:
    """Return the table that a policy's training reads, if there is one."""
    asked = PolicyInputs.of(run).logprobs(policy)
    return () if asked is None else (run.layout.logprobs(str(asked)),)


def logprob_cost(run: Run, policy: Offline, counts: Counts) -> Cost:
    """Return the cost of the pass over the rollouts, of the whole reference or of what follows its states."""
    which, reference = policy.data_needs.states, run.architecture("policy")
    if which is not None and not which.last:  # they are stored, or of a guide that is not trained yet
        return Cost()
    share = 1.0 if which is None else counts.shape(reference).share(which.last)
    whole = summed(reading([reference], samples, counts) for samples in run.stored.parts)
    return Cost(whole.tokens, share * whole.flops)


def write_logprobs(
    policy: Offline, inputs: PolicyInputs, compute: Compute, path: Path, *, on_progress: OnProgress
) -> Summary:
    """Write log π_ref of each rollout, in the order of the rollouts."""
    which = policy.data_needs.states
    if which is not None and which.top_tokens:
        found: Any = [float(said.top_tokens.target_logprobs.sum()) for said in inputs.stored.states(which)]
    else:
        found = _compute_logprobs(policy, inputs, compute, on_progress)
    write_table(path, pa.table({"logprob": pa.array(found)}))
    return {"responses": len(found)}


def _compute_logprobs(policy: Offline, inputs: PolicyInputs, compute: Compute, on_progress: OnProgress) -> Any:
    """Return log π_ref by a pass over the rollouts, of the whole reference or of what follows its states."""
    import torch

    from infalign.models.logprobs import token_logprobs
    from infalign.models.packed import can_pack, packed_logprobs
    from infalign.models.top_layers import starting_from_states

    tokenizer = load_tokenizer(inputs.layout.tokenizer)
    stored = inputs.stored
    if policy.data_needs.states is None:  # an untrained guide is the reference, and its trunk may not be there yet
        model, _ = load_policy(inputs.reference, device=compute.torch_device())
    else:
        model = inputs.start(policy, tokenizer, compute)
    prompts, responses = stored.all_texts()
    states = () if policy.data_needs.states is None else stored.states(policy.data_needs.states)
    last = policy.data_needs.states.last if policy.data_needs.states is not None else 0

    def report(done: int, total: int) -> None:
        on_progress(done, total, "log-probabilities of the reference")

    mixed = torch.autocast(compute.torch_device(), torch.bfloat16, enabled=policy.fit.bf16)
    with starting_from_states(model, last) if last else nullcontext():
        together = can_pack(model)  # told before rounding
        with mixed:
            if together:
                return packed_logprobs(model, prompts, responses, BATCH_TOKENS, stored=states, on_progress=report)
            return token_logprobs(model, prompts, responses, batch_tokens=BATCH_TOKENS)
