"""From prompts and a reward function to the dataset that a `CalibratedReward` trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import listed
from infalign.method.by_name import columns_of
from infalign.method.calibration import calibrate
from infalign.method.reward import Reward, rewards_of
from infalign.models.policy import AnyModel
from infalign.sampling.sample import sample

if TYPE_CHECKING:
    from datasets import Dataset


def calibrate_prompts(
    model: AnyModel,
    prompts: Sequence[Any] | Dataset,
    reward: Reward,
    k: int = 32,
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> Dataset:
    """Draw ``k`` responses of the reference policy to each prompt and return a dataset with their sorted rewards.

    Its columns are ``prompt``, as given, and ``reference_rewards``, K numbers in ascending order. ``model`` and the
    sampling are as in `sample`. Prompts are texts or lists of messages, or a dataset with the column ``prompt``, whose
    other columns reach the reward by name and stay. The reward gets prompts as given and what TRL gives.

    Raises as `sample`, ConfigError for ``k`` below 2, and DataError for rewards that are not finite numbers.

    >>> prompts = ["How are you?", "Where is Oslo?"]
    >>> dataset = calibrate_prompts(
    ...     MODEL, prompts, lambda prompts, responses: [len(text) for text in responses], k=4, max_new_tokens=8
    ... )
    >>> [len(row["reference_rewards"]) for row in dataset]
    [4, 4]
    """
    from datasets import Dataset

    if k < 2:
        raise ConfigError(f"calibration needs k ≥ 2 responses per prompt, found {k}")
    asked = prompts if isinstance(prompts, Dataset) else Dataset.from_dict({"prompt": list(prompts)})
    if "reference_rewards" in asked.column_names:
        raise DataError("the dataset has the column reference_rewards already; rename or remove it")
    rollouts = sample(model, asked["prompt"], k, max_new_tokens=max_new_tokens, seed=seed)
    references, ids = [], listed(rollouts.drawn, "token_ids")
    for place, (row, said) in enumerate(zip(asked, rollouts.texts, strict=True)):
        given = {"completion_ids": ids[place * k : (place + 1) * k]}
        rewards_K = np.sort(rewards_of(reward, [row.pop("prompt")] * k, said, columns_of([row] * k), given))
        calibrate(rewards_K, rewards_K)  # raises for rewards that are not finite
        references.append(rewards_K.tolist())
    return asked.add_column("reference_rewards", references)
