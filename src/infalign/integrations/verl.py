"""A reward function for verl: ``reward.custom_reward_function.path=pkg://infalign.integrations.verl``.

`integrations.environment` says which reward it is. verl does not pass the prompt, so ``extra_info`` of a row carries
``prompt`` (messages), ``reference_rewards`` and, to be checked, ``prompt_id``: the columns of calibrated.parquet, and
``columns``, which a reward function may read.
Estimators that keep Φ are ``rloo`` with ``algorithm.use_kl_in_reward=True``, and ``grpo`` with
``algorithm.norm_adv_by_std_in_grpo=False``; grpo's default divides by the group's deviation, which replaces Φ. For
group advantages, `register` makes an objective an estimator.
"""

import json
from collections.abc import Mapping
from typing import Any

from infalign.integrations.environment import GENERATIONS, calibrated_row, from_environment
from infalign.method.by_name import warn_of_column

TRUTHS = ("ground_truth", "answer", "solution")  # columns that hold the true answer, the first that is there


def compute_score(
    data_source: object,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    **_: object,
) -> dict[str, float]:
    """Return score, win_rate and reward of a response; verl trains on the first and logs all.

    Raises DataError for a row without prompt or reference_rewards, and as `CalibratedReward.scores`.
    """
    what = f"extra_info of a {data_source!r} row"
    messages, said, references, columns = calibrated_row(extra_info or {}, solution_str, what)
    passed = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
    texts = {name: value for name, value in passed.items() if isinstance(value, str)}  # Parquet changes others
    for name in texts:
        if columns.get(name, texts[name]) != texts[name]:
            warn_of_column(name)
    return from_environment().score(messages, said, references, passed | columns | texts)._asdict()


def register(objective: str) -> None:
    """Make ``algorithm.adv_estimator=OBJECTIVE`` known to verl. Raises ConfigError."""
    from verl.trainer.ppo.core_algos import register_adv_est

    from infalign.integrations.estimators import check_version, estimator

    check_version("verl")
    register_adv_est(objective)(estimator(objective))


def row(calibrated: dict[str, Any]) -> dict[str, Any]:
    """Return a calibrated prompt as a row of a data set; its columns may hold the true answer."""
    known = json.loads(calibrated["columns"] or "{}")
    known = (known["reward_model"] if isinstance(known.get("reward_model"), dict) else {}) | known
    return {
        "data_source": known.get("data_source", "infalign"),
        "prompt": calibrated["prompt"],
        "reward_model": {"style": "rule", "ground_truth": next((known[name] for name in TRUTHS if name in known), "")},
        "extra_info": calibrated,
    }


def command(model: str, data: str, *, beta: float, max_prompt_tokens: int, max_new_tokens: int) -> list[str]:
    """Return the words that train by RLOO with KL in the reward, at the temperature of the rollouts."""
    settings = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.kl_coef": f"{beta:.6g}",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.rollout.n": GENERATIONS,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.top_p": 1.0,
        "actor_rollout_ref.rollout.top_k": -1,
        "data.train_files": data,
        "data.val_files": data,  # verl wants some
        "data.max_prompt_length": max_prompt_tokens,
        "data.max_response_length": max_new_tokens,
        "reward.custom_reward_function.path": "pkg://infalign.integrations.verl",
    }
    return ["python", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]
