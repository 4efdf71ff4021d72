"""The stage calibrate: every training prompt with the sorted rewards of its rollouts, and the laws of the policies."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from infalign.core.errors import ConfigError, DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import column_values, read_table, write_table
from infalign.method.calibration import Array
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.stored_laws import write_law
from infalign.steps.run import Run
from infalign.steps.samples import StoredRollouts
from infalign.theory.aims import Aim

OF_AIM = ("transform", "kl_budget", "beta", "n", "objective")  # keys of a policy that its law depends on


def units(run: Run) -> Iterator[Unit]:
    """Yield the calibration, then the law of each policy that has one of its own: a student has its teacher's."""
    stored, recipe = run.stored, run.recipe
    scores = tuple(run.layout.scores(part) for part in range(len(stored.parts)))
    output, work = run.layout.calibrated, partial(calibrate_prompts, stored)
    yield Unit("calibrate", "calibrate", inputs=scores, settings={}, output=output, work=work)
    for name, policy in recipe.policies.items():
        aim, contents = policy.aim(recipe.procedure), run.contents["policies"][name]
        if aim is None or policy.data_needs.teacher is not None:
            continue
        yield Unit(
            "calibrate",
            "law",
            name,
            inputs=scores,
            settings={key: contents[key] for key in OF_AIM if key in contents}
            | {key: run.contents[key] for key in policy.recipe_dependencies},
            output=run.layout.law(name),
            work=partial(write_policy_law, name, aim, stored),
        )


def rewarded_prompts(stored: StoredRollouts) -> tuple[pa.Table, Array, int]:
    """Return the training prompts that the reward does not leave out, their rewards (P, K), and how many it does."""
    rewards_PK = stored.rewards_by_prompt()
    rewarded = ~np.isnan(rewards_PK[:, 0])
    table = read_table(stored.layout.prompts("train")).slice(0, len(rewards_PK)).filter(rewarded)
    return table, rewards_PK[rewarded], int((~rewarded).sum())


def calibrate_prompts(stored: StoredRollouts, *, on_progress: OnProgress) -> Summary:
    """Give every training prompt the column ``reference_rewards``: its K rewards, sorted.

    Prompts that the reward leaves out are not in the table, and ``left_out`` counts them.
    """
    k, (table, rewards_PK, left_out) = stored.k, rewarded_prompts(stored)
    if not len(rewards_PK):
        raise DataError(
            f"reward reward: returned None for all responses to each of {left_out:,} prompts, so no prompt is left; "
            "return numbers"
        )
    rewards_PK = np.sort(rewards_PK, axis=1)
    different = np.pad(rewards_PK[:, 1:] != rewards_PK[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    write_table(stored.layout.calibrated, table.append_column("reference_rewards", pa.array([*rewards_PK])))
    return {
        "prompts": len(rewards_PK),
        "k": k,
        "tied": float(1 - (different[:, 1:] & different[:, :-1]).mean()),
        "degenerate_prompts": int((different.sum(axis=1) == 2).sum()),
        "left_out": left_out,
    }


def write_policy_law(name: str, aim: Aim, stored: StoredRollouts, *, on_progress: OnProgress) -> Summary:
    """Write the law over the rollouts of all prompts that the reward does not leave out, and return its numbers.

    Raises ConfigError for a budget that these rewards cannot spend, with the largest.
    """
    table, rewards_PK, _ = rewarded_prompts(stored)
    try:
        law = aim.law(rewards_PK)
    except ConfigError as error:
        raise ConfigError(f"policies.{name}: {error}") from error
    return {"law": write_law(stored.layout.law(name), column_values(table, "prompt_id"), law)}
