"""A reward function for TRL's trainers and command line: ``--reward_funcs infalign.integrations.trl.reward``.

`integrations.environment` says which reward it is. RLOO, and GRPO with β > 0, take it; AsyncGRPO has no reference model
and so no KL term, and without that the objective is another one. axolotl's ``trl.reward_funcs`` takes the same name.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infalign.integrations.environment import GENERATIONS, conversation, data_columns, find_tokenizer, from_environment
from infalign.method.by_name import TRL, columns_of, split
from infalign.method.reward import logged
from infalign.models.conversations import decode


def reward(
    prompts: list[Any],
    completions: list[Any],
    reference_rewards: list[list[float]] | None = None,
    prompt_id: list[str] | None = None,
    **passed: Any,
) -> list[float]:
    """Return each completion's shaped reward; the dataset has prompt, as messages, and reference_rewards.

    Where the policy's tokenizer is known, special tokens in a response are seen, which TRL leaves out of its text; a
    function of TRL's form gets its completions, and whatever else TRL gives.
    With the column prompt_id, as in calibrated.parquet, a prompt that is not the one of its reference rewards is found.
    Raises ConfigError and DataError as `CalibratedReward.scores`.
    """
    identities: Sequence[str | None] = prompt_id or [None] * len(prompts)
    asked = [conversation(*pair) for pair in zip(prompts, identities, strict=True)]
    columns, given = split(passed)
    rows = [data_columns(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    ids, said = given.get("completion_ids"), completions
    if ids is not None and (words := find_tokenizer(os.environ.get("INFALIGN_REWARD", ""))) is not None:
        said = decode(words, ids)
    given[TRL] = completions
    return logged(from_environment().scores(asked, said, reference_rewards, columns_of(rows), given), given)


def row(calibrated: dict[str, Any]) -> dict[str, Any]:
    """Return a calibrated prompt as a row of a data set."""
    return calibrated


def command(model: str, data: str, *, beta: float, max_prompt_tokens: int, max_new_tokens: int) -> list[str]:
    """Return the words that train by RLOO, whose KL is in the reward, at the temperature of the rollouts."""
    options = {
        "model_name_or_path": model,
        "dataset_name": Path(data).parent,
        "reward_funcs": "infalign.integrations.trl.reward",
        "beta": f"{beta:.6g}",
        "num_generations": GENERATIONS,
        "max_completion_length": max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    return ["trl", "rloo", *(f"--{name}={value}" for name, value in options.items())]
