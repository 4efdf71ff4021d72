"""The rewards of rollouts: the call, and the dataset that it makes for a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from infalign.core.errors import DataError, first_line
from infalign.core.progress import progress_line
from infalign.core.storage import column_values
from infalign.data.messages import prompts_of
from infalign.method.by_name import UserReward
from infalign.method.calibration import Array
from infalign.models.policy import AnyModel
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_to
from infalign.rewards.sources import AnyReward, load_reward
from infalign.sampling.prompts import repeated
from infalign.sampling.sample import AnyPrompts, Rollouts, prompt_rows, read_prompts, sample

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class _WithIds(UserReward):
    """A user's function that gets the token ids of responses too, as TRL gives them."""

    function: UserReward
    ids_of: Mapping[str, list[int]]

    def __call__(self, prompts: list[Any], responses: list[str], columns: Any = None) -> Any:
        return self.function(prompts, responses, columns, {"completion_ids": [self.ids_of[one] for one in responses]})


def score(reward: AnyReward, rollouts: Rollouts) -> Array:
    """Return the reward of each response, (P, K). Equal responses to one prompt are scored once, so they tie.

    ``reward`` is the folder or hub id of a reward model, or a function or its spelling ``mine.py:score``, called as a
    recipe's is: by the names of its parameters, ``(prompts, responses)`` and columns of the prompts' rows, or TRL's or
    verl's. Prompts are lists of messages. Where it returns None for all responses to a prompt, the row is NaN. Raises
    DataError for what is no finite number, InfalignError for what the function raises.

    >>> rollouts = sample(MODEL, [{"prompt": "What is 2 + 2?", "answer": "4"}], k=3, max_new_tokens=8)
    >>> score(lambda responses, answer: [float(a in r) for r, a in zip(responses, answer)], rollouts).shape
    (1, 3)
    """
    asked, k, texts = rollouts.prompts, rollouts.k, column_values(rollouts.drawn, "text")
    rows, function = Batch(repeated(asked.conversations, k), texts, repeated(asked.columns, k)), load_reward(reward)
    if isinstance(function, UserReward):
        function = _WithIds(function, dict(zip(texts, column_values(rollouts.drawn, "token_ids"), strict=True)))
    named = NamedReward(function, getattr(reward, "__name__", str(reward)), "")
    with TemporaryDirectory() as folder, progress_line("score") as report:
        return score_to(Path(folder), named, rows, on_progress=report).reshape(-1, k)


def calibrate_prompts(
    model: AnyModel, prompts: AnyPrompts | Dataset, reward: AnyReward, k: int = 32, **drawing: Any
) -> Dataset:
    """Return prompts with their sorted rewards, ``reference_rewards``: the dataset that a `CalibratedReward` trains on.

    It is that of `score` for `sample`, which take the arguments and raise. ``prompt`` has the conversations that were
    sampled, other columns stay; prompts that the reward leaves out go.

    >>> dataset = calibrate_prompts(MODEL, ["How are you?"], lambda responses: [1] * len(responses), k=4)
    >>> dataset["reference_rewards"][0]
    [1.0, 1.0, 1.0, 1.0]
    """
    from datasets import Dataset

    given: Any = prompts if isinstance(prompts, Dataset) else prompt_rows(prompts)
    asked = [*prompts_of(read_prompts(given))]
    if isinstance(given, list):
        rows = [{**row, "prompt": one} for row, one in zip(given, asked, strict=True)]
        try:
            dataset = Dataset(pa.Table.from_struct_array(pa.array(rows)))  # from_list drops what the first row lacks
        except pa.ArrowException as error:
            raise DataError(f"a column has values of several types ({first_line(error)}); use one type") from error
    else:
        kept_names = [name for name in given.column_names if name != "prompt"]
        dataset = given.add_column("as asked", asked).select_columns([*kept_names, "as asked"])
        dataset = dataset.rename_column("as asked", "prompt")
    if "reference_rewards" in dataset.column_names:
        raise DataError("the dataset has the column reference_rewards already; rename or remove it")
    rewards_PK = np.sort(score(reward, sample(model, given, k, **drawing)), axis=1)
    kept = ~np.isnan(rewards_PK).any(axis=1)
    return dataset.select(np.flatnonzero(kept)).add_column("reference_rewards", rewards_PK[kept].tolist())
