"""A reward function for TRL's trainers and command line: ``--reward_funcs infalign.integrations.trl.reward``.

`integrations.configured` says which reward it is. RLOO, and GRPO with β > 0, take it; AsyncGRPO has no reference model
and so no KL term, and without that the objective is another one. axolotl's ``trl.reward_funcs`` takes the same name.
"""

from collections.abc import Callable, Sequence
from typing import Any

from infalign.integrations.configured import conversation, from_environment


def reward(
    prompts: list[Any],
    completions: list[Any],
    reference_rewards: list[list[float]] | None = None,
    prompt_id: list[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: object,
) -> list[float]:
    """Return each completion's shaped reward; the dataset has prompt, as messages, and reference_rewards.

    With the column prompt_id, as in calibrated.parquet, a prompt that is not the one of its reference rewards is found.
    Raises ConfigError and DataError as `integrations.configured.score`.
    """
    identities: Sequence[str | None] = prompt_id or [None] * len(prompts)
    asked = [conversation(*pair) for pair in zip(prompts, identities, strict=True)]
    return from_environment()(asked, completions, reference_rewards, log_metric)
