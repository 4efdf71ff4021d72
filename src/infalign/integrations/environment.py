"""The calibrated and transformed reward that the environment names, for trainers that take a function by its name.

``INFALIGN_REWARD`` is the reward: a run directory (its recipe's reward), ``package.module:function``, a URL, or the
folder or hub id of a classifier. ``INFALIGN_TRANSFORM`` is Φ, such as ``exp:10``, or another shaping. Without a run
directory, ``INFALIGN_TOKENIZER`` names the policy's tokenizer where one is needed: for a URL, and for OpenRLHF.
``INFALIGN_REWARD_KEY`` may hold the key of a URL.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from infalign.core.errors import ConfigError, DataError
from infalign.data.lines import reject_duplicate_keys
from infalign.data.messages import Message, from_cell, prompt_id
from infalign.method.optimum import Optimal
from infalign.method.reward import CalibratedReward
from infalign.method.shapings import parse_shaping
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.base import RewardFunction

GENERATIONS = 8  # to each prompt, in the commands that start a trainer
KEY_VARIABLE = "INFALIGN_REWARD_KEY"
CALIBRATED = ("prompt", "prompt_id", "reference_rewards", "columns")  # the columns of calibrated.parquet
_loading = Lock()
_load_tokenizer = cache(load_tokenizer)


def from_environment() -> CalibratedReward:
    """Return the reward that the environment names, loaded once in a process. Raises ConfigError."""
    with _loading:
        return _loaded()


@cache
def _loaded() -> CalibratedReward:
    source, shaping = os.environ.get("INFALIGN_REWARD"), os.environ.get("INFALIGN_TRANSFORM")
    if not source or not shaping:
        raise ConfigError(
            f"the environment variable INFALIGN_{'TRANSFORM' if source else 'REWARD'} is not set; set "
            "INFALIGN_REWARD to a run directory, package.module:function, a URL or a classifier, and "
            "INFALIGN_TRANSFORM, such as exp:10"
        )
    return calibrated(source, shaping)


def calibrated(source: str, shaping: str) -> CalibratedReward:
    """Return the reward ``source``, as ``INFALIGN_REWARD`` spells it, shaped by ``shaping``. Raises ConfigError."""
    return CalibratedReward(_reward(source), Optimal.parse(shaping) or parse_shaping(shaping))


def _reward(source: str) -> RewardFunction:
    if _is_run(source):
        from infalign.steps.run import Run
        from infalign.steps.status import recorded_recipe
        from infalign.steps.whole_run import check_opened

        run = Run.of(recorded_recipe(Path(source)))
        check_opened(run, run.layout.data, *run.reward_inputs("reward"))
        return run.scorer("reward").load().function
    if source.startswith(("http://", "https://")):
        from infalign.rewards.server import RemoteReward

        return RemoteReward(source, tokenizer(source), api_key_env=KEY_VARIABLE if KEY_VARIABLE in os.environ else None)
    from infalign.models.pretrained import check_reachable
    from infalign.rewards.sources import load_reward

    check_reachable(source)
    return load_reward(source)


def find_tokenizer(source: str) -> Any | None:
    """Return the policy's tokenizer: ``INFALIGN_TOKENIZER``, or that of the run directory ``source``, or None."""
    own = str(Path(source) / "data" / "tokenizer") if _is_run(source) else None
    path = os.environ.get("INFALIGN_TOKENIZER") or own
    return None if path is None else _load_tokenizer(path)


def tokenizer(source: str) -> Any:
    """Return the policy's tokenizer as `find_tokenizer`. Raises ConfigError if there is none."""
    if (loaded := find_tokenizer(source)) is None:
        raise ConfigError(f"with {source}, set INFALIGN_TOKENIZER to the folder or hub id of the policy's tokenizer")
    return loaded


def _is_run(source: str) -> bool:
    return (Path(source) / "recipe.yaml").is_file()


def data_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the data in a row of a trainer: those in ``columns``, JSON or an object, and its others.

    Raises DataError for ``columns`` that are no object.
    """
    columns = _json_object(row.get("columns") or {}, "columns")
    return columns | {name: value for name, value in row.items() if name not in CALIBRATED}


def _json_object(value: Any, what: str) -> dict[str, Any]:
    """Return an object, which may be JSON. Raises DataError, which calls it ``what``, for anything else."""
    try:
        return dict(json.loads(value, object_pairs_hook=reject_duplicate_keys) if isinstance(value, str) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} must be a JSON object; it begins {str(value)[:60]!r}") from error


def calibrated_row(row: Any, said: str, what: str = "a label") -> tuple[list[Message], str, Any, dict[str, Any]]:
    """Return what the response ``said`` is scored by: its prompt, itself, reference rewards and columns of its row.

    The row is one of calibrated.parquet, JSON or an object, which errors call ``what``. Raises DataError if it lacks
    prompt or reference_rewards, and as `conversation` and `data_columns`.
    """
    given = _json_object(row, what)
    if absent := [name for name in ("prompt", "reference_rewards") if given.get(name) is None]:
        raise DataError(
            f"{what} lacks {' and '.join(absent)} (it begins {str(row)[:60]!r}); add the columns prompt, prompt_id "
            "and reference_rewards of calibrated.parquet"
        )
    return conversation(given["prompt"], given.get("prompt_id")), said, given["reference_rewards"], data_columns(given)


def conversation(prompt: Any, identity: str | None) -> list[Message]:
    """Return a prompt as messages with role and content.

    Raises DataError for text, as frameworks make it with a chat template, and if ``identity``, the id of the prompt
    with these reference rewards, is another prompt's.
    """
    turns = [] if isinstance(prompt, str) or not hasattr(prompt, "__iter__") else list(prompt)
    if not turns or not all(isinstance(turn, Mapping) and turn.keys() >= {"role", "content"} for turn in turns):
        raise DataError(
            f"the prompt must be a list of messages, not rendered text (it begins {str(prompt)[:60]!r}); pass the "
            "column `prompt` of calibrated.parquet"
        )
    messages = [
        turn | {"role": str(turn["role"]), "content": "" if turn["content"] is None else str(turn["content"])}
        for turn in from_cell(map(dict, turns))
    ]
    if identity is not None and prompt_id(messages) != identity:
        raise DataError(
            f"the prompt differs from the one with these reference_rewards ({identity}; it begins "
            f"{messages[0]['content'][:60]!r}); keep its messages as in calibrated.parquet, without an added system "
            "prompt or template"
        )
    return messages
