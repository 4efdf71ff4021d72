"""What of a policy is known only after earlier steps of its run: its β, and a transformation that the run finds."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from infalign.core.errors import ConfigError
from infalign.core.storage import read_table
from infalign.evaluation.budget import Budget, measure_budgets
from infalign.method.calibration import Array
from infalign.method.procedures import Served, rewinds
from infalign.method.shapings import Ranked
from infalign.method.transforms import Tabulated, parse_transform
from infalign.recipe.layout import Layout
from infalign.training.solvers.base import JUDGED, Solver, StoredOptimum
from infalign.training.solvers.theory import OptimumTheory


def reference_rewards(layout: Layout) -> Array:
    """Return the sorted rewards of the training prompts' rollouts, (P, K), from the table that calibration wrote."""
    table = read_table(layout.calibrated, ["reference_rewards"])
    return pc.list_flatten(table["reference_rewards"]).to_numpy().reshape(table.num_rows, -1)


def policy_betas(policy: Solver, procedure: Served, layout: Layout) -> tuple[float, float]:
    """Return a policy's β for the paper's raw Φ and for the normalized Φ that it is trained on."""
    beta = policy.theory.raw_beta(procedure, partial(reference_rewards, layout))
    return beta, beta / policy.shaping.scale


def check_spendable(policies: Mapping[str, Solver], procedure: Served, layout: Layout) -> None:
    """Raise ConfigError for a policy whose KL budget the stored rewards cannot spend, with the largest."""
    for name, policy in policies.items():
        if policy.shaping != JUDGED:  # its table is found by the judge
            try:
                policy_betas(policy, procedure, layout)
            except ConfigError as error:
                raise ConfigError(f"policies.{name}: {error}") from error


def stored_budgets(policies: Mapping[str, Solver], procedure: Served, layout: Layout) -> list[Budget]:
    """Return what the KL budgets of policies buy where the stored rewards are all 0 or 1; otherwise nothing."""
    rewards_PK, kls = reference_rewards(layout), {policy.theory.kl_budget for policy in policies.values()} - {None}
    if rewinds(procedure) or not np.isin(rewards_PK, (0.0, 1.0)).all():
        return []
    return measure_budgets(rewards_PK, procedure, sorted(kl for kl in kls if kl is not None))


def transform_owner(name: str, policies: Mapping[str, Solver]) -> str | None:
    """Return which policy's transformation by the judge trains a policy: its own, its teacher's or none."""
    return _shaping_owner(name, policies) if policies[name].shaping == JUDGED else None


def _shaping_owner(name: str, policies: Mapping[str, Solver]) -> str:
    return policies[name].data_needs.teacher or name


def resolved_policy(name: str, policies: Mapping[str, Solver], procedure: Served, layout: Layout) -> Solver:
    """Return a policy with the shaping that the run finds for it, or for its teacher."""
    owner = _shaping_owner(name, policies)
    shaping, theory = policies[owner].shaping, policies[owner].theory
    if shaping == JUDGED:
        table = parse_transform(str(layout.transform(owner)))
        assert isinstance(table, Tabulated)
        shaping = Ranked(replace(table, name=JUDGED.name))
    elif isinstance(shaping, StoredOptimum):
        assert isinstance(theory, OptimumTheory)
        shaping = theory.stored_optimum(procedure, reference_rewards(layout)).shaping
    else:
        return policies[name]
    found = policies[owner].model_copy(update={"transform": shaping})
    policy = found if owner == name else policies[name].model_copy()
    policy.find_teacher({**policies, owner: found})
    return policy


def transform_table(name: str, policies: Mapping[str, Solver], layout: Layout) -> Path | None:
    """Return the file with the table that a policy is trained on, None if its transformation is no table."""
    if (owner := transform_owner(name, policies)) is not None:
        return layout.transform(owner)
    shaping = policies[name].shaping.name
    return Path(shaping) if shaping.endswith(".json") else None
