"""The table of calibrated prompts: their reference rewards, and the models that gave them."""

import json
from functools import partial

import pyarrow.compute as pc

from infalign.errors import DataError
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.runs.layout import Layout
from infalign.runs.run import Provenance
from infalign.storage import read_table
from infalign.training.solvers.base import Solver

MANIFEST = b"infalign"  # key in the schema of calibrated.parquet: the models that the table was made with


def reference_rewards(layout: Layout) -> Array:
    """Return the sorted rewards of the training prompts' rollouts, (P, K), from the table that calibration wrote."""
    table = read_table(layout.calibrated, ["reference_rewards"])
    return pc.list_flatten(table["reference_rewards"]).to_numpy().reshape(table.num_rows, -1)


def check_calibrated(layout: Layout, provenance: Provenance) -> None:
    """Raise DataError unless the calibrated rewards come from the recipe's current reward and reference policy.

    The pipeline detects a changed recipe; this check detects models that were replaced under the same name.
    """
    path = layout.calibrated
    table = read_table(path)
    manifest = (table.schema.metadata or {}).get(MANIFEST)
    if manifest is None or "reference_rewards" not in table.column_names:
        raise DataError(
            f"{path} has {'no manifest' if manifest is None else 'no column reference_rewards'}; remove it and run "
            "`infalign calibrate` again"
        )
    made, now = json.loads(manifest), provenance.digests()
    for name, stale in (("reference", "rollouts"), ("reward", "scores")):
        if made[name] != now[name]:
            raise DataError(
                f"{path} was made with another {name} model than the one that the recipe gives now; remove the folder "
                f"{layout.root / stale} and run `infalign calibrate` again"
            )


def policy_betas(policy: Solver, procedure: Served, layout: Layout) -> tuple[float, float]:
    """Return a policy's β for the paper's raw Φ and for the normalised Φ that it is trained on."""
    beta = policy.raw_beta(procedure, partial(reference_rewards, layout))
    return beta, beta / policy.shaping.scale
