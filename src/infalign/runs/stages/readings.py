"""What states or a policy's guide tell of each rollout's rank while it is being written, to train token by token.

The units are of the stage train.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from infalign.core.progress import OnProgress
from infalign.core.storage import write_table
from infalign.method.calibration import Array
from infalign.models.pretrained import load_policy
from infalign.models.settings import Compute
from infalign.runs.layout import Summary
from infalign.runs.passes import Pass, Read, Texts
from infalign.runs.rollouts import StoredRollouts
from infalign.runs.run import Run
from infalign.runs.stages.material import networks
from infalign.runs.units import Unit
from infalign.training.solvers.base import Solver, States, Told

BATCH_TOKENS = 16384  # tokens per forward pass


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit for each kind of states that some policy's tokens are valued by."""
    parts, layout = range(len(run.rollout_parts)), run.layout
    wanted = {policy.told.states for policy in run.recipe.policies.values() if policy.told is not None}
    for which in sorted(states for states in wanted if states is not None):
        yield Unit(
            "train",
            f"readings-{which}",
            inputs=(*(layout.states(str(which), part) for part in parts), *map(layout.scores, parts)),
            settings={"seed": run.recipe.seed},
            output=layout.readings(str(which)),
            work=partial(read_ranks, run.stored, which, layout.readings(str(which)), run.recipe.seed),
        )


def of_guide(run: Run, name: str) -> Unit:
    """Return the unit of what the guide of a policy tells."""
    parts, layout, policy = range(len(run.rollout_parts)), run.layout, run.recipe.policies[name]
    told = Told(policy=name)
    return Unit(
        "train",
        f"readings-{told}",
        inputs=(
            layout.model(name),
            *map(layout.scores, parts),
            *(layout.states(str(policy.states), part) for part in parts if policy.states is not None),
        ),
        settings={},
        output=layout.readings(str(told)),
        work=partial(read_guide, run.stored, name, policy.states, run.recipe.compute),
        passes=partial(guide_passes, run, name),
    )


def guide_passes(run: Run, name: str, texts: Texts) -> Iterator[Pass]:
    """Yield the passes of a policy with a guide over the rollouts."""
    prompts = texts.prompts(run.recipe.rollout.prompts, "train")
    for network in networks(run, name):
        yield Read(network, prompts, run.recipe.rollout.k, texts.prompt, texts.drawn, vocabulary=True)


def inputs(run: Run, policy: Solver) -> tuple[Path, ...]:
    """Return the table that a policy's training reads, if there is one."""
    return () if policy.told is None else (run.layout.readings(str(policy.told)),)


def read_ranks(stored: StoredRollouts, which: States, path: Path, seed: int, *, on_progress: OnProgress) -> Summary:
    """Write what is read of each rollout's rank after each of its tokens, and how well, rollout by rollout."""
    from infalign.training.readings import read_on_the_way

    states, k, rewards_PK = stored.states(which), stored.k, stored.all_rewards()

    def of(prompt: int) -> list[Array]:
        return [stored_of.of_response.float().numpy() for stored_of in states[prompt * k : (prompt + 1) * k]]

    return _written(read_on_the_way(of, rewards_PK, seed=seed, on_progress=on_progress), path)


def read_guide(
    stored: StoredRollouts, name: str, which: States | None, compute: Compute, *, on_progress: OnProgress
) -> Summary:
    """Write what the guide of a policy tells of each rollout's rank after each of its tokens, and how well.

    ``which`` states of the reference are stored for it.
    """
    from infalign.models.packed import of_responses
    from infalign.training.offline import HELD_OUT
    from infalign.training.readings import read_from_log_ratios

    told = Told(policy=name)
    model, _ = load_policy(stored.layout.model(name), device=compute.torch_device())
    found = of_responses(
        lambda batch: batch.split(model.token_log_ratios(batch)),
        model,
        *stored.all_texts(),
        BATCH_TOKENS,
        states=() if which is None else stored.states(which),
        on_progress=lambda done, total: on_progress(done, total, f"rollouts read by {name}"),
    )
    unseen = slice(None, None, round(1 / HELD_OUT))
    return _written(read_from_log_ratios(found, stored.all_rewards(), unseen), stored.layout.readings(str(told)))


def _written(read: Sequence[Sequence[Array]], path: Path) -> Summary:
    """Write what is read of each prompt's rollouts, (tokens, 2) each, and return how well."""
    rows = [row for of_prompt in read for row in of_prompt]
    columns = {name: pa.array([row[:, i].tolist() for row in rows]) for i, name in enumerate(("read", "rho"))}
    write_table(path, pa.table(columns))
    longest = max(rows, key=len)[:, 1]
    return {"responses": len(rows)} | {f"rho_after_{t}": float(longest[t - 1]) for t in (1, 4, 16) if t <= len(longest)}
