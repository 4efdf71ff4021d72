"""How much of the rank a network can read, told before any policy is trained; a unit of the stage calibrate."""

import json
from collections.abc import Iterator
from functools import partial
from math import ceil

import numpy as np

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import write_text
from infalign.method.calibration import Array
from infalign.models.settings import Compute
from infalign.runs.layout import Summary
from infalign.runs.passes import Pass, Read, Texts
from infalign.runs.rollouts import StoredRollouts
from infalign.runs.run import Confidence, Run, confidence
from infalign.runs.units import Unit

PROMPTS, SAMPLES = 384, 16  # read at most
SHARES = (0.25, 0.5, 0.75, 1.0)  # of a response, after which the rank is read
BATCH_TOKENS = 4096  # tokens per forward pass, which keeps the states of all layers


def units(run: Run) -> Iterator[Unit]:
    """Yield the reading of ranks."""
    layout, parts, reads = run.layout, range(len(run.rollout_parts)), reader(run)
    yield Unit(
        "calibrate",
        "ceiling",
        inputs=(
            *map(layout.rollouts, parts),
            *map(layout.scores, parts),
            *(run.reference_inputs if reads == "policy" else run.reward_inputs(reads)),
        ),
        settings=run.key(reads) | run.precision | {"confidence": run.recipe.evaluate.confidence},
        output=layout.ceiling,
        work=partial(
            read_ranks,
            reads,
            run.reference if reads == "policy" else str(layout.model(reads)),
            run.recipe.compute,
            run.stored,
            confidence(run.recipe.evaluate, run.recipe.seed),
        ),
        early=True,
        passes=partial(ceiling_passes, run),
    )


def reader(run: Run) -> str:
    """Return whose states ranks are read from: the reward's if the run trains all of it on the policy's tokens."""
    reward = run.recipe.reward
    return "reward" if reward.fit is not None and reward.model is None else "policy"


def ceiling_passes(run: Run, texts: Texts) -> Iterator[Pass]:
    """Yield the pass of the network whose states are read."""
    rollout = run.recipe.rollout
    prompts = min(PROMPTS, texts.prompts(rollout.prompts, "train"))
    yield Read(run.architecture(reader(run)), prompts, min(SAMPLES, rollout.k), texts.prompt, texts.drawn)


def read_ranks(
    reads: str, model: str, compute: Compute, stored: StoredRollouts, intervals: Confidence, *, on_progress: OnProgress
) -> Summary:
    """Write how well ranks are read from the states of a network after each share of a response.

    Where that cannot be measured, for too few prompts or a network that cannot be packed, the reason is written.
    """
    from infalign.evaluation.ceiling import readable  # SciPy's linear algebra, which no other stage needs

    found: Summary = {"reads": reads, "rho": {}}
    try:
        states_SPMF, rewards_PM = prefix_states(reads, model, compute, stored, on_progress)
        rhos = [intervals.of(readable(states_PMF, rewards_PM, seed=intervals.seed)) for states_PMF in states_SPMF]
        found |= {"rollouts": rewards_PM.size, "rho": dict(zip(map("{:.0%}".format, SHARES), rhos, strict=True))}
    except DataError as error:
        found["none"] = str(error)
    write_text(stored.layout.ceiling, json.dumps(found, indent=1))
    return {f"rho_at_{share}": rho for share, rho in found["rho"].items()} | found


def prefix_states(
    reads: str, model: str, compute: Compute, stored: StoredRollouts, on_progress: OnProgress
) -> tuple[Array, Array]:
    """Return states after each share of some rollouts, (S, P, M, F), and the rewards (P, M).

    They are those of the middle and the last layer, at the last token and in the mean over the response so far.
    """
    import torch

    from infalign.models.packed import Packed, packed_batches, packing, packs
    from infalign.models.pretrained import load_policy, padded
    from infalign.models.states import states_of
    from infalign.rewards.classifier import ClassifierReward

    device, k, samples = compute.torch_device(), stored.k, min(SAMPLES, stored.k)
    if reads == "policy":
        network, scores = load_policy(model, device=device, dtype=compute.dtype)[0], Packed.logits
    else:
        network, scores = ClassifierReward.load(model, device=device, dtype=compute.dtype).model, Packed.scores
    if not packs(network, scores):
        raise DataError("the network has layers without full attention, whose states are not read")
    depth = network.config.get_text_config(decoder=True).num_hidden_layers
    prompts, responses, rewards = list[list[int]](), list[list[int]](), list[Array]()
    for part in range(len(stored.parts)):
        asked, said = stored.texts(part)
        count = min(len(asked), ceil(PROMPTS / len(stored.parts)))
        prompts += [asked[i] for i in range(count) for _ in range(samples)]
        responses += [said[i * k + j] for i in range(count) for j in range(samples)]
        rewards.append(stored.rewards(part)[:count, :samples])
    network = padded(network, 1 + max(map(max, responses)))  # a reference with more ids than tokens may draw those too
    found = list[Array]()
    with torch.inference_mode(), packing(network):
        for rows, batch in packed_batches(prompts, responses, BATCH_TOKENS, network, logits=False):
            states = states_of(network, batch, [max(1, depth // 2), depth])[0, len(batch.tokens) - len(batch.targets) :]
            for own in torch.split(states.float(), batch.lengths.tolist()):
                ends = [max(1, ceil(share * len(own))) for share in SHARES]
                means = own.cumsum(0)[[end - 1 for end in ends]] / torch.tensor(ends, device=own.device)[:, None]
                found.append(torch.cat([own[[end - 1 for end in ends]], means], dim=1).cpu().numpy())
            on_progress(rows.stop, len(responses), "rollouts read")
    states_RSF = np.stack(found)
    by_share = states_RSF.reshape(-1, samples, *states_RSF.shape[1:]).transpose(2, 0, 1, 3)
    return by_share, np.concatenate(rewards)
