"""From prompts and a reward function to the dataset that a `CalibratedReward` trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.method.by_name import columns_of
from infalign.method.calibration import calibrate
from infalign.method.reward import Reward, rewards_of
from infalign.models.conversations import prompt_ids
from infalign.models.conversion import convert
from infalign.models.pretrained import load_policy
from infalign.sampling.engine import Engine, Sampling
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine

if TYPE_CHECKING:
    from datasets import Dataset


def calibrate_prompts(
    model: str | Path | tuple[Any, Any],
    prompts: Sequence[Any] | Dataset,
    reward: Reward,
    k: int = 32,
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> Dataset:
    """Draw ``k`` responses of the reference policy to each prompt and return a dataset with their sorted rewards.

    Its columns are ``prompt``, as given, and ``reference_rewards``, K numbers in ascending order. ``model`` is a folder
    or hub id of a causal language model, or one that is loaded, with its tokenizer: ``(model, tokenizer)``. Prompts are
    texts or lists of messages, or a dataset with the column ``prompt``, whose other columns reach the reward by name
    and stay; ``reward(prompts, responses)`` returns a number for each response text. Responses are
    drawn at temperature 1, ``max_new_tokens`` long at most, by random streams of ``seed`` that depend on the place of
    the prompt; `infalign run` stores them too and continues after a stop.

    Raises ConfigError for a model that cannot be sampled and for ``k`` below 2, DataError for a prompt that the
    tokenizer's chat template cannot render or the model has no room for, and for rewards that are not finite numbers.

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
    network, tokenizer = model if isinstance(model, tuple) else load_policy(convert(str(model)))
    engine = _engine(network.eval(), tokenizer, Sampling(max_new_tokens, seed=seed))
    references, asked = [], prompts if isinstance(prompts, Dataset) else Dataset.from_dict({"prompt": list(prompts)})
    if "reference_rewards" in asked.column_names:
        raise DataError("the dataset has the column reference_rewards already; rename or remove it")
    for number, row in enumerate(asked):
        prompt = row.pop("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        (ids,) = prompt_ids(tokenizer, [messages])
        drawn = engine.sample(ids, str(number), range(k))
        said, given = [response.text for response in drawn], {"completion_ids": [[*r.token_ids] for r in drawn]}
        rewards_K = np.sort(rewards_of(reward, [prompt] * k, said, columns_of([row] * k), given))
        calibrate(rewards_K, rewards_K)  # raises for rewards that are not finite
        references.append(rewards_K.tolist())
    return asked.add_column("reference_rewards", references)


def _engine(model: Any, tokenizer: Any, sampling: Sampling) -> Engine:
    """Return the fast engine, or transformers' own for a model that it cannot run; they pick the same tokens."""
    try:
        return SharedPrefixEngine(model, tokenizer, sampling)
    except ConfigError:
        return TransformersEngine(model, tokenizer, sampling)
