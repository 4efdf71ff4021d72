"""A reward function for verl: ``reward.custom_reward_function.path=pkg://infalign.integrations.verl``.

`integrations.configured` says which reward it is. verl does not pass the prompt, so ``extra_info`` of a row carries
``prompt`` (messages), ``reference_rewards`` and, to be checked, ``prompt_id``: the columns of calibrated.parquet.
Estimators that keep Φ are ``rloo`` with ``algorithm.use_kl_in_reward=True``, and ``grpo`` with
``algorithm.norm_adv_by_std_in_grpo=False``; grpo's default divides by the group's deviation, which replaces Φ.
"""

from collections.abc import Mapping
from typing import Any

from infalign.errors import DataError
from infalign.integrations.configured import score


def compute_score(
    data_source: object,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    **_: object,
) -> dict[str, float]:
    """Return score, win_rate and reward of a response; verl trains on the first and logs all.

    Raises DataError for a row without prompt or reference_rewards, and as `integrations.configured.score`.
    """
    given = extra_info or {}
    if absent := [name for name in ("prompt", "reference_rewards") if given.get(name) is None]:
        raise DataError(
            f"extra_info of a row of {data_source!r} has no {' and no '.join(absent)}; put the columns prompt, "
            "prompt_id and reference_rewards of calibrated.parquet into it"
        )
    return score(given["prompt"], solution_str, given["reference_rewards"], prompt_id=given.get("prompt_id"))._asdict()
