"""The reward function protocol, and checks of the rewards."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from infalign.core.errors import DataError
from infalign.data.messages import Message, prompt_id
from infalign.method.by_name import UserReward, columns_of
from infalign.method.calibration import Array, not_a_number
from infalign.method.reward import ask, one_for_each

ROWS_PER_CALL = 4096
LARGEST = 1e100  # cubes of differences, which intervals take, are still finite


class RewardFunction(Protocol):
    """A function that gives each response a finite number, or None to all responses of a prompt; higher is better."""

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> Sequence[float]:
        """Return one reward for each row, in the order of the rows."""


class Batch(NamedTuple):
    """Prompts, a response to each, and the other columns of each row as JSON, if it has any."""

    prompts: Sequence[list[Message]]
    responses: Sequence[str]
    columns: Sequence[str] | None = None

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return some rows, in memory."""
        columns = None if self.columns is None else [self.columns[row] for row in rows]
        return Batch([self.prompts[row] for row in rows], [self.responses[row] for row in rows], columns)


@runtime_checkable
class ConcurrentReward(RewardFunction, Protocol):
    """A reward function that works on many batches at once."""

    def score_each(self, batches: Iterable[Batch]) -> Generator[tuple[int, Sequence[float]]]:
        """Yield the number of each batch and its rewards, checked, as they come, in any order.

        What is under way when a batch fails comes before the error.
        """


def score_each(
    reward: RewardFunction, batches: Iterable[Batch], *, name: str
) -> Generator[tuple[int, Sequence[float]]]:
    """Yield the number of each batch and its rewards, many batches at once if the reward can; raises as `score`."""
    if isinstance(reward, ConcurrentReward):
        yield from reward.score_each(batches)
        return
    for number, batch in enumerate(batches):
        asked, said = list(batch.prompts), list(batch.responses)
        rewards = score(reward, asked, said, columns=batch.columns, name=name)
        check_left_out(asked, rewards, name=name)
        yield number, rewards.tolist()


def score(
    reward: RewardFunction,
    prompts: list[list[Message]],
    responses: list[str],
    *,
    columns: Sequence[str] | None = None,
    name: str,
) -> Array:
    """Return the rewards of all rows, shape (rows,), requesting 4,096 rows at a time; NaN stands for None.

    Raises DataError that names the reward source (``name``), the row, counted from 0, and its prompt, if a reward is
    not a finite number of at most 1e100 (True is 1; "1" and a number that no float holds are errors),
    or if what is returned is no sequence or array or has the wrong number of rewards, and InfalignError if the reward
    function itself raises an exception, SystemExit among them. The function gets copies of prompts and responses, and
    if it is the user's the ``columns`` of the rows, given as JSON, by name.
    """
    rewards: list[float] = []
    for start in range(0, len(responses), ROWS_PER_CALL):
        asked, said = prompts[start : start + ROWS_PER_CALL], responses[start : start + ROWS_PER_CALL]
        rows = f"rows {start} to {start + len(said) - 1} (first prompt {prompt_id(asked[0])})"
        called: Callable[..., object] = reward
        if isinstance(reward, UserReward) and columns is not None:
            here = columns[start : start + ROWS_PER_CALL]
            read = {text: json.loads(text) for text in set(here)}
            called = partial(reward, columns=columns_of([read[text] for text in here]))
        given = ask(called, asked, said, name=f"reward {name}, asked for {rows},")
        rewards += checked_rewards(given, asked, first=start, name=name, of_function=True)
    return np.array(rewards, float)


def checked_rewards(
    values: object, prompts: list[list[Message]], *, first: int, name: str, of_function: bool = False
) -> list[float]:
    """Return ``values`` if they are one finite number for each of ``prompts``, whose rows count from ``first``.

    Those ``of_function`` may be None, as NaN, and True or False, as 1 or 0.
    """
    rows = f" of rows {first} to {first + len(prompts) - 1} (first prompt {prompt_id(prompts[0])})"
    rewards = one_for_each(values, len(prompts), f"reward {name}:", rows)
    for row, (value, prompt) in enumerate(zip(rewards, prompts, strict=True), first):
        if of_function and (value is None or isinstance(value, bool | np.bool_)):
            continue
        problem = not_a_number(value)
        if problem is None and not abs(value) <= LARGEST:
            problem = f"found {float(value):g}; rewards must be finite and at most {LARGEST:g}: fix or scale them"
        if problem is not None:
            raise DataError(f"reward {name}, row {row} (prompt {prompt_id(prompt)}): {problem}")
    return [math.nan if value is None else float(value) for value in rewards]


def check_left_out(prompts: Sequence[list[Message]], rewards: Array, *, name: str) -> None:
    """Raise DataError for a prompt with a reward for some of its responses only; NaN stands for None."""
    given = ~np.isnan(rewards)
    if given.all():
        return
    rows_of = defaultdict[str, list[int]](list)
    for row, prompt in enumerate(prompts):
        rows_of[prompt_id(prompt)].append(row)
    for identity, rows in rows_of.items():
        if given[rows].any() and not given[rows].all():
            raise DataError(
                f"reward {name}: returned None for {len(rows) - given[rows].sum()} of the {len(rows)} responses to "
                f"prompt {identity}, first in row {next(row for row in rows if not given[row])}; return None for "
                "all of them to leave the prompt out, or a number for each"
            )
