"""A reward function for OpenRLHF: ``--reward.remote_url`` with the path of this file.

`integrations.environment` says which reward it is. A row's label (``--data.label_key``) is a JSON object with
``prompt`` (messages), ``reference_rewards`` and, to be checked, ``prompt_id``: the columns of calibrated.parquet, and
``columns``, which a reward function may read. OpenRLHF drops what a reward function raises and continues without a
reward until it fails elsewhere, so errors are logged here first.
"""

import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from infalign.core.errors import DataError, InfalignError
from infalign.integrations.environment import GENERATIONS, calibrated_row, from_environment, tokenizer


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Return rewards, scores and extra_logs of the responses, as tensors (rows,): ``rewards`` are what is trained on.

    ``prompts`` are rendered, ``queries`` are these with a response and special tokens. Raises DataError for a label
    that is no such object and for a query that does not begin with its prompt, ConfigError if the policy's tokenizer is
    not known, and as `CalibratedReward.scores`.
    """
    import torch

    try:
        asked = zip(queries, prompts, labels, strict=True)
        words = tokenizer(os.environ.get("INFALIGN_REWARD", ""))
        rows = [calibrated_row(label, response(query, prompt, words)) for query, prompt, label in asked]
        scored = [from_environment().score(*row) for row in rows]
    except InfalignError as error:
        logging.getLogger(__name__).error("no reward: %s", error)
        raise
    scores, win_rates, rewards = map(torch.tensor, zip(*scored, strict=True))
    return {"rewards": scores, "scores": rewards, "extra_logs": {"win_rate": win_rates, "reward": rewards}}


def response(query: str, prompt: str, words: Any) -> str:
    """Return what follows the prompt, without BOS, EOS and padding of the tokenizer ``words``.

    Raises DataError if the query does not begin with the prompt.
    """
    if not query.startswith(prompt):
        raise DataError(
            f"a query must begin with its prompt, {prompt[:60]!r}, but begins with {query[:60]!r}, so the response "
            "cannot be separated; render prompts so that they encode and decode to themselves"
        )
    hidden = filter(None, (words.bos_token, words.eos_token, words.pad_token))  # to encode it would add a blank
    return re.sub("|".join(map(re.escape, hidden)), "", query[len(prompt) :])


def row(calibrated: dict[str, Any]) -> dict[str, Any]:
    """Return a calibrated prompt as a row of a data set."""
    return {"prompt": calibrated["prompt"], "label": json.dumps(calibrated)}


def command(model: str, data: str, *, beta: float, max_prompt_tokens: int, max_new_tokens: int) -> list[str]:
    """Return the words that train by RLOO with KL in the reward, at the temperature of the rollouts."""
    options = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": data,
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": max_prompt_tokens + max_new_tokens,  # by default 2,048, and a longer prompt loses its beginning
        "data.apply_chat_template": None,
        "reward.remote_url": __file__,
        "algo.advantage.estimator": "rloo",
        "algo.kl.init_coef": f"{beta:.6g}",
        "algo.kl.estimator": "k1",
        "rollout.n_samples_per_prompt": GENERATIONS,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.max_new_tokens": max_new_tokens,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]
    words += ["--reward.clip_range", -1000, 1000]  # by default 10, which the optimum for best-of-16 exceeds
    return ["python", "-m", "openrlhf.cli.train_ppo_ray", *map(str, words)]
