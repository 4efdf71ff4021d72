"""The laws of a run's policies as its stored rewards give them: written once, read by training, results and export."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infalign.core.errors import DataError
from infalign.core.storage import column_values, read_table, write_table
from infalign.evaluation.worth import Budget, measure_budgets
from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.method.procedures import Served, rewinds
from infalign.recipe.layout import Layout
from infalign.theory.aims import Aim
from infalign.training.solvers.base import Solver

NUMBERS = b"law"  # key in the schema of a law's table


def reference_rewards(layout: Layout) -> Array:
    """Return the sorted rewards of the training prompts' rollouts, (P, K), from the table that calibration wrote."""
    table = read_table(layout.calibrated, ["reference_rewards"])
    return pc.list_flatten(table["reference_rewards"]).to_numpy().reshape(table.num_rows, -1)


def write_law(path: Path, prompt_ids: Sequence[str], law: Law) -> dict[str, Any]:
    """Write a law, a row per prompt, and return its numbers, which the schema of the table carries as JSON."""
    numbers = {"shaping": law.shaping.name, "beta": law.beta, "paper_beta": law.paper_beta}
    numbers |= {"kl": law.kl, "kl_over": law.kl_over}
    table = pa.table({"prompt_id": prompt_ids, "rewards": [*law.rewards_PK], "log_ratios": [*law.log_ratios_PK]})
    write_table(path, table.replace_schema_metadata({NUMBERS: json.dumps(numbers)}))
    return numbers


def law_numbers(path: Path) -> dict[str, Any]:
    """Return shaping, β, KL and which KL it is of a law that was written. Raises DataError for another table."""
    stored_json = (read_table(path, ["prompt_id"]).schema.metadata or {}).get(NUMBERS)
    if stored_json is None:
        raise DataError(f"{path} is no law of a policy; remove it and rerun the recipe")
    return dict(json.loads(stored_json))


def read_law(path: Path, aim: Aim) -> tuple[list[str], Law]:
    """Return the prompts and the law that was written for an aim."""
    numbers, table = law_numbers(path), read_table(path)
    rewards_PK, log_ratios_PK = (
        pc.list_flatten(table[name]).to_numpy().reshape(table.num_rows, -1) for name in ("rewards", "log_ratios")
    )
    shaping = aim.shaping_named(numbers["shaping"])
    law = Law(log_ratios_PK, rewards_PK, shaping, numbers["beta"], numbers["kl"], numbers["kl_over"])
    return column_values(table, "prompt_id"), law


def stored_budgets(policies: Mapping[str, Solver], procedure: Served, layout: Layout) -> list[Budget]:
    """Return what the KL budgets of policies buy where the stored rewards are all 0 or 1; otherwise nothing."""
    rewards_PK, kls = reference_rewards(layout), {policy.budget for policy in policies.values()}
    if rewinds(procedure) or not np.isin(rewards_PK, (0.0, 1.0)).all():
        return []
    return measure_budgets(rewards_PK, procedure, sorted(kl for kl in kls if kl is not None))
