"""What of a policy is known only after earlier steps of its run: its β, and a transformation that the run finds."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.compute as pc

from infalign.core.storage import read_table
from infalign.method.calibration import Array
from infalign.method.procedures import Served
from infalign.method.shapings import Ranked
from infalign.method.transforms import Tabulated, parse_transform
from infalign.recipe.layout import Layout
from infalign.training.solvers.base import JUDGED, Solver


def reference_rewards(layout: Layout) -> Array:
    """Return the sorted rewards of the training prompts' rollouts, (P, K), from the table that calibration wrote."""
    table = read_table(layout.calibrated, ["reference_rewards"])
    return pc.list_flatten(table["reference_rewards"]).to_numpy().reshape(table.num_rows, -1)


def policy_betas(policy: Solver, procedure: Served, layout: Layout) -> tuple[float, float]:
    """Return a policy's β for the paper's raw Φ and for the normalized Φ that it is trained on."""
    beta = policy.theory.raw_beta(procedure, partial(reference_rewards, layout))
    return beta, beta / policy.shaping.scale


def transform_owner(name: str, policies: Mapping[str, Solver]) -> str | None:
    """Return which policy's transformation the run finds to train a policy: its own, its teacher's or none."""
    if policies[name].shaping != JUDGED:
        return None
    return next((need for need in policies[name].data_needs.models if need in policies), name)


def resolved_policy(name: str, policies: Mapping[str, Solver], layout: Layout) -> Solver:
    """Return a policy with the transformation that was found for it, or for its teacher."""
    owner = transform_owner(name, policies)
    if owner is None:
        return policies[name]
    table = parse_transform(str(layout.transform(owner)))
    assert isinstance(table, Tabulated)
    found = policies[owner].model_copy(update={"transform": Ranked(replace(table, name=JUDGED.name))})
    policy = found if owner == name else policies[name].model_copy()
    policy.find_teacher({**policies, owner: found})
    return policy


def transform_table(name: str, policies: Mapping[str, Solver], layout: Layout) -> Path | None:
    """Return the file with the table that a policy is trained on, None if its transformation is no table."""
    if (owner := transform_owner(name, policies)) is not None:
        return layout.transform(owner)
    shaping = policies[name].shaping.name
    return Path(shaping) if shaping.endswith(".json") else None
