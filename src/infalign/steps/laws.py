"""The law of each policy on the stored rewards; units of the stage calibrate."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.core.storage import listed, read_table
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.stored_laws import write_law
from infalign.steps.run import Run
from infalign.steps.samples import StoredRollouts
from infalign.theory.aims import Aim

OF_AIM = ("transform", "kl_budget", "beta", "n", "objective")  # keys of a policy that its law depends on


def units(run: Run) -> Iterator[Unit]:
    """Yield the law of each policy that has one of its own: a student has its teacher's."""
    stored, recipe = run.stored, run.recipe
    for name, policy in recipe.policies.items():
        aim, contents = policy.aim(recipe.procedure), run.contents["policies"][name]
        if aim is None or policy.data_needs.teacher is not None:
            continue
        yield Unit(
            "calibrate",
            "law",
            name,
            inputs=tuple(run.layout.scores(part) for part in range(len(stored.parts))),
            settings={key: contents[key] for key in OF_AIM if key in contents}
            | {key: run.contents[key] for key in policy.recipe_dependencies},
            output=run.layout.law(name),
            work=partial(write_policy_law, name, aim, stored),
        )


def write_policy_law(name: str, aim: Aim, stored: StoredRollouts, *, on_progress: OnProgress) -> Summary:
    """Write the law over the rollouts of all prompts that the reward does not leave out, and return its numbers.

    Raises ConfigError for a budget that these rewards cannot spend, with the largest.
    """
    rewards_PK = stored.rewards_by_prompt()
    rewarded = ~np.isnan(rewards_PK[:, 0])
    table = read_table(stored.layout.prompts("train"), ["prompt_id"]).slice(0, len(rewards_PK)).filter(rewarded)
    try:
        law = aim.law(rewards_PK[rewarded])
    except ConfigError as error:
        raise ConfigError(f"policies.{name}: {error}") from error
    return {"law": write_law(stored.layout.law(name), listed(table, "prompt_id"), law)}
