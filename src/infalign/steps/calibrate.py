"""The stage calibrate: every training prompt with the sorted rewards of its rollouts, and the laws of the policies."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import read_table, write_table
from infalign.pipeline.units import Summary, Unit
from infalign.steps import laws
from infalign.steps.run import Run
from infalign.steps.samples import StoredRollouts


def units(run: Run) -> Iterator[Unit]:
    """Yield the calibration, then the laws of the policies."""
    stored = run.stored
    yield Unit(
        "calibrate",
        "calibrate",
        inputs=tuple(run.layout.scores(part) for part in range(len(stored.parts))),
        settings={},
        output=run.layout.calibrated,
        work=partial(calibrate_prompts, stored),
    )
    yield from laws.units(run)


def calibrate_prompts(stored: StoredRollouts, *, on_progress: OnProgress) -> Summary:
    """Give every training prompt the column ``reference_rewards``: its K rewards, sorted.

    Prompts that the reward leaves out are not in the table, and ``left_out`` counts them.
    """
    layout, k, rewards_PK = stored.layout, stored.k, np.sort(stored.rewards_by_prompt(), axis=1)
    table = read_table(layout.prompts("train")).slice(0, len(rewards_PK))
    rewarded = ~np.isnan(rewards_PK[:, 0])
    if not rewarded.any():
        raise DataError(
            f"reward reward: returned None for all responses to each of {len(rewarded):,} prompts, so no prompt is "
            "left; return numbers"
        )
    table, rewards_PK = table.filter(rewarded), rewards_PK[rewarded]
    distinct = 1 + (rewards_PK[:, 1:] != rewards_PK[:, :-1]).sum(axis=1)
    ends = pa.array(np.arange(len(rewards_PK) + 1) * k, pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.array(rewards_PK.ravel(), pa.float64()))
    write_table(layout.calibrated, table.append_column("reference_rewards", lists))
    return {
        "prompts": len(rewards_PK),
        "k": k,
        "tied": float(1 - distinct.mean() / k),
        "degenerate_prompts": int((distinct == 1).sum()),
        "left_out": int((~rewarded).sum()),
    }
