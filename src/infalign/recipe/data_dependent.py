"""What of a policy is known only after earlier steps of its run: its β, and an optimum on stored rewards."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pyarrow.compute as pc

from infalign.core.errors import ConfigError
from infalign.core.storage import read_table
from infalign.evaluation.budget import Budget, measure_budgets
from infalign.method.calibration import Array
from infalign.method.procedures import Served, rewinds
from infalign.recipe.layout import Layout
from infalign.training.solvers.base import Solver, StoredOptimum
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


def resolved_policy(name: str, policies: Mapping[str, Solver], procedure: Served, layout: Layout) -> Solver:
    """Return a policy with the shaping that the run finds for it, or for its teacher."""
    owner = policies[name].data_needs.teacher or name
    theory = policies[owner].theory
    if not isinstance(policies[owner].shaping, StoredOptimum):
        return policies[name]
    assert isinstance(theory, OptimumTheory)
    shaping = theory.stored_optimum(procedure, reference_rewards(layout)).shaping
    found = policies[owner].model_copy(update={"transform": shaping})
    policy = found if owner == name else policies[name].model_copy()
    policy.find_teacher({**policies, owner: found})
    return policy
