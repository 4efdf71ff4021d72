"""What training starts from: calibrated prompts, the models that gave their rewards, and what depends on them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.compute as pc

from infalign.core.errors import DataError
from infalign.core.storage import read_table
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.shapings import Ranked
from infalign.method.transforms import Tabulated, parse_transform
from infalign.runs.layout import Layout
from infalign.runs.run import Provenance
from infalign.training.solvers.base import JUDGED, Solver

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
            "`infalign run --until calibrate` again"
        )
    made, now = json.loads(manifest), provenance.digests()
    for name, stale in (("reference", "rollouts"), ("reward", "scores")):
        if made[name] != now[name]:
            raise DataError(
                f"{path} was made with another {name} model than the one that the recipe gives now; remove the folder "
                f"{layout.root / stale} and run `infalign run --until calibrate` again"
            )


def policy_betas(policy: Solver, procedure: Served, layout: Layout) -> tuple[float, float]:
    """Return a policy's β for the paper's raw Φ and for the normalised Φ that it is trained on."""
    beta = policy.raw_beta(procedure, partial(reference_rewards, layout))
    return beta, beta / policy.shaping.scale


def asking(name: str, policies: Mapping[str, Solver]) -> str | None:
    """Return which policy's transformation the run finds to train a policy: its own, its teacher's or none."""
    if policies[name].shaping != JUDGED:
        return None
    return next((need for need in policies[name].needs if need in policies), name)


def resolved(name: str, policies: Mapping[str, Solver], layout: Layout) -> Solver:
    """Return a policy with the transformation that was found for it, or for its teacher."""
    owner = asking(name, policies)
    if owner is None:
        return policies[name]
    table = parse_transform(str(layout.transform(owner)))
    assert isinstance(table, Tabulated)
    found = policies[owner].model_copy(update={"transform": Ranked(replace(table, name=JUDGED.name))})
    policy = found if owner == name else policies[name].model_copy()
    policy.meet({**policies, owner: found})
    return policy


def table_of(name: str, policies: Mapping[str, Solver], layout: Layout) -> Path | None:
    """Return the file with the table that a policy is trained on, None if its transformation is no table."""
    if (owner := asking(name, policies)) is not None:
        return layout.transform(owner)
    shaping = policies[name].shaping.name
    return Path(shaping) if shaping.endswith(".json") else None
