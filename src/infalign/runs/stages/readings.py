"""What the reference's states tell of each rollout's rank while it is being written, for training token by token.

The units are of the stage train.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from infalign.method.calibration import Array
from infalign.progress import OnProgress
from infalign.runs.layout import Summary
from infalign.runs.rollouts import StoredRollouts
from infalign.runs.run import Run
from infalign.runs.units import Unit
from infalign.storage import write_table
from infalign.training.solvers.base import Solver, States


def units(run: Run) -> Iterator[Unit]:
    """Yield one unit for each kind of states that some policy's tokens are valued by."""
    parts, layout = range(len(run.rollout_parts)), run.layout
    wanted = {policy.states for policy in run.recipe.policies.values() if policy.by_token}
    for which in sorted(states for states in wanted if states is not None):
        yield Unit(
            "train",
            f"readings-{which}",
            inputs=(*(layout.states(str(which), part) for part in parts), *map(layout.scores, parts)),
            settings={"seed": run.recipe.seed},
            output=layout.readings(str(which)),
            work=partial(read_ranks, run.stored, which, layout.readings(str(which)), run.recipe.seed),
        )


def inputs(run: Run, policy: Solver) -> tuple[Path, ...]:
    """Return the table that a policy's training reads, if there is one."""
    return (run.layout.readings(str(policy.states)),) if policy.by_token else ()


def read_ranks(stored: StoredRollouts, which: States, path: Path, seed: int, *, on_progress: OnProgress) -> Summary:
    """Write what is read of each rollout's rank after each of its tokens, and how well, rollout by rollout."""
    from infalign.training.readings import read_on_the_way

    states, k = stored.states(which), stored.k
    rewards_PK = np.concatenate([stored.rewards(part) for part in range(len(stored.parts))])

    def of(prompt: int) -> list[Array]:
        return [stored_of.of_response.float().numpy() for stored_of in states[prompt * k : (prompt + 1) * k]]

    read = read_on_the_way(of, rewards_PK, seed=seed, on_progress=on_progress)
    rows = [row for of_prompt in read for row in of_prompt]
    columns = {name: pa.array([row[:, i].tolist() for row in rows]) for i, name in enumerate(("read", "rho"))}
    write_table(path, pa.table(columns))
    longest = max(rows, key=len)[:, 1]
    return {"responses": len(rows)} | {f"rho_after_{t}": float(longest[t - 1]) for t in (1, 4, 16) if t <= len(longest)}
