"""The stage calibrate: every training prompt with the sorted rewards of its rollouts."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infalign.errors import DataError
from infalign.method.calibration import Array
from infalign.models.pretrained import model_digest
from infalign.progress import OnProgress
from infalign.runs.layout import Layout, Summary, parts
from infalign.runs.recipe import Recipe
from infalign.runs.stages.models import model_path, reward_identity
from infalign.storage import read_table, write_table

MANIFEST = b"infalign"  # in the schema of calibrated.parquet: what it was made with


def calibrate_prompts(recipe: Recipe, root: Path, *, on_progress: OnProgress) -> Summary:
    """Give every training prompt the column ``reference_rewards``: its K rewards, sorted.

    The schema of the table carries a manifest, as JSON: `made_with`, K and the number of prompts.
    """
    layout, k, every = Layout(root), recipe.rollout.k, parts(recipe)
    table = read_table(layout.data / "train_prompts.parquet").slice(0, recipe.rollout.prompts)
    rewards_PK = np.empty((table.num_rows, k))
    distinct, spread = np.empty((2, table.num_rows))
    for part in range(every):
        part_PK = np.sort(read_table(layout.scores(part), ["reward"])["reward"].to_numpy().reshape(-1, k), axis=1)
        rewards_PK[part::every], spread[part::every] = part_PK, part_PK.std(axis=1)
        distinct[part::every] = 1 + (part_PK[:, 1:] != part_PK[:, :-1]).sum(axis=1)
    ends = pa.array(np.arange(len(rewards_PK) + 1) * k, pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.array(rewards_PK.ravel(), pa.float64()))
    table = table.append_column("reference_rewards", lists)
    manifest = json.dumps(made_with(recipe, root) | {"k": k, "prompts": len(rewards_PK)})
    write_table(layout.calibrated, table.replace_schema_metadata({MANIFEST: manifest}))
    return {
        "prompts": len(rewards_PK),
        "k": k,
        "tied": float(1 - distinct.mean() / k),
        "degenerate_prompts": int((distinct == 1).sum()),
        "reward_spread_between_prompts": float(spread.max() / max(spread.min(), 1e-12)),
    }


def reference_rewards(root: Path) -> Array:
    """Return the sorted rewards of the training prompts' rollouts, (P, K), from the table that calibration wrote."""
    table = read_table(Layout(root).calibrated, ["reference_rewards"])
    return pc.list_flatten(table["reference_rewards"]).to_numpy().reshape(table.num_rows, -1)


def made_with(recipe: Recipe, root: Path) -> dict[str, str]:
    """Return what calibrated rewards depend on: the digest of ``reference`` and the identity of ``reward``."""
    reference = model_digest(model_path(recipe.policy, "reference", root))
    return {"reference": reference, "reward": reward_identity(recipe, root, "reward")}


def check_calibrated(recipe: Recipe, root: Path) -> None:
    """Raise DataError unless the calibrated rewards are those of the recipe's reward and reference policy as they are.

    The pipeline knows what the recipe says; this is about models that were exchanged under the same name.
    """
    path = Layout(root).calibrated
    table = read_table(path)
    manifest = (table.schema.metadata or {}).get(MANIFEST)
    if manifest is None or "reference_rewards" not in table.column_names:
        raise DataError(
            f"{path} has {'no manifest' if manifest is None else 'no column reference_rewards'}; remove it and run "
            "`infalign calibrate` again"
        )
    made, now = json.loads(manifest), made_with(recipe, root)
    for name, stale in (("reference", "rollouts"), ("reward", "scores")):
        if made[name] != now[name]:
            raise DataError(
                f"{path} was made with another {name} model than the one that the recipe gives now; remove the folder "
                f"{root / stale} and run `infalign calibrate` again"
            )
