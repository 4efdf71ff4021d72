"""The calibrated and transformed reward, or another shaping, as a drop-in reward function for a trainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from infalign.core.errors import DataError
from infalign.core.user_code import user_code
from infalign.method.by_name import TRL, by_name, columns_of, split
from infalign.method.calibration import Array, as_rewards, calibrate, not_a_number, snap_to_references
from infalign.method.shapings import Shaping, as_shaping
from infalign.method.transforms import Transformation

Reward = Callable[..., Any]
"""A reward function, called by the names of its parameters (`infalign.method.by_name`): a number for each response."""


class Score(NamedTuple):
    """What a response is worth: its shaped reward, its win rate Ĉ over the reference rollouts, its reward."""

    score: float
    win_rate: float
    reward: float


@dataclass(frozen=True)
class CalibratedReward:
    """Φ∘Ĉ, or a :class:`Shaping`, as a TRL reward function, for ``RLOOTrainer`` and ``GRPOTrainer`` alike.

    ``reward(prompts, responses)`` scores a whole batch at once; prompts are as the dataset has them (text or messages),
    responses are text. TRL's ``reward(prompts, completions, **columns)`` and verl's form are known by their parameters,
    and columns of the dataset reach the function by name, as does what TRL gives besides. The dataset carries the
    column ``reference_rewards``: for each prompt the sorted rewards of its K reference rollouts by the same function.

    ``shaping`` may be a spelling, such as ``"exp:10"``. Raises DataError if the column is missing, or a reward is not
    finite (TRL would train on it in silence), and ConfigError for an unknown shaping or a function of no known form.

    >>> reward = CalibratedReward(lambda prompts, responses: [len(text) for text in responses], "exp:10")
    >>> [round(score, 4) for score in reward(["Hi!"] * 2, ["Hello.", "Yo."], [[2, 3, 5, 9]] * 2)]
    [0.0821, 0.0019]
    """

    reward: Reward
    shaping: Transformation | Shaping | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shaping", as_shaping(self.shaping))
        by_name(self.reward)

    @property
    def __name__(self) -> str:  # TRL logs the reward under this name
        return cast(Shaping, self.shaping).name

    def __call__(
        self,
        /,
        prompts: list[Any],
        completions: list[Any],
        reference_rewards: list[list[float]] | None = None,
        **passed: Any,
    ) -> list[float]:
        """Return each completion's shaped reward; logs the mean of Ĉ, the standard win rate, as ``win_rate``."""
        columns, given = split(passed)
        return logged(self.scores(prompts, completions, reference_rewards, columns, given), given)

    def score(
        self, prompt: Any, response: Any, reference_rewards: Sequence[float], row: Mapping[str, object] | None = None
    ) -> Score:
        """Return what one response is worth; its ``row`` has the columns. Raises as `scores`."""
        return self.scores([prompt], [response], [reference_rewards], columns_of([row or {}]))[0]

    def scores(
        self,
        prompts: list[Any],
        responses: list[Any],
        reference_rewards: Sequence[Sequence[float]] | None,
        columns: Mapping[str, Sequence[object]] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> list[Score]:
        """Return what each response is worth, in their order; a response is text or messages.

        ``columns``, and what a trainer has ``given`` besides, reach the reward function by name. A reward within the
        function's ``tolerance`` (a classifier's rounding) of a reference counts as the reference.

        Raises DataError if there are no ``reference_rewards``, a row of them is no list of at least 2 finite numbers in
        ascending order, or a reward no finite number.
        """
        if reference_rewards is None:
            raise DataError(
                "the training data set has no column reference_rewards; make it with `infalign run --until calibrate`"
            )
        references = [_references(row, values) for row, values in enumerate(reference_rewards)]
        if len(references) != len(responses):
            raise DataError(f"found {len(references)} reference_rewards, but {len(responses)} responses")
        rewards = rewards_of(self.reward, prompts, responses, columns, given)
        if tolerance := getattr(self.reward, "tolerance", 0.0):
            rewards = np.array([snap_to_references(*pair, tolerance) for pair in zip(rewards, references, strict=True)])
        shaping = cast(Shaping, self.shaping)
        return [
            Score(float(shaping(reward, row)), float(calibrate(reward, row)), float(reward))
            for reward, row in zip(rewards, references, strict=True)
        ]


def logged(scores: Sequence[Score], given: Mapping[str, Any]) -> list[float]:
    """Return shaped rewards, and log the means of win rates and rewards by TRL's ``log_metric``, if it is ``given``."""
    if log_metric := given.get("log_metric"):
        log_metric("win_rate", float(np.mean([score.win_rate for score in scores])))
        log_metric("reward_model", float(np.mean([score.reward for score in scores])))
    return [score.score for score in scores]


def _references(row: int, values: object) -> Array:
    """Return one row of the column reference_rewards; DataError unless it is a list of numbers."""
    try:
        references = as_rewards(values, "reference rewards")
        if references.ndim != 1:
            raise DataError(f"found shape {references.shape}")
    except DataError as error:
        raise DataError(
            f"row {row}: reference_rewards must be a list of numbers ({error}); make it with `infalign run --until "
            "calibrate`"
        ) from error
    return references


def rewards_of(
    reward: Reward,
    prompts: list[Any],
    completions: list[Any],
    columns: Mapping[str, Sequence[object]] | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    may_lack: bool = False,
) -> Array:
    """Return the reward of each completion, which is text or messages; True is 1, None is NaN if they ``may_lack`` it.

    The function is called by the names of its parameters (`by_name.ByName`), which may be ``columns`` or ``given``.
    Raises DataError for what is no finite number.
    """
    responses = [spoken_text(row, completion) for row, completion in enumerate(completions)]
    given = {TRL: completions, **(given or {})}
    called = partial(by_name(reward), columns=columns, given=given | {TRL: deepcopy(given[TRL])})
    name = "the reward function"
    values = one_for_each(ask(called, prompts, responses, name=name), len(responses), name)
    for row, value in enumerate(values):
        if isinstance(value, bool | np.bool_) or (may_lack and value is None):
            continue
        if problem := not_a_number(value) or ("" if math.isfinite(value) else f"it is {value}; return a finite number"):
            raise DataError(f"the reward of response {row}: {problem}")
    return np.array([math.nan if value is None else value for value in values], float)


def spoken_text(row: int, completion: object) -> str:
    """Return the text of a completion; of messages all that the assistant says, without what tools answer."""
    if isinstance(completion, str):
        return completion
    try:
        said = [message["content"] or "" for message in cast(Any, completion) if message["role"] == "assistant"]
        return "\n\n".join(text for text in said if text)
    except (TypeError, KeyError) as error:
        raise DataError(
            f"completion {row} must be text or a list of messages with role and text as content ({error!r})"
        ) from error


def ask(reward: Callable[..., object], prompts: list[Any], responses: list[str], *, name: str) -> object:
    """Return what ``reward``, called ``name``, gives for copies of prompts and responses. Raises as `user_code`."""
    with user_code(f"{name} raised"):
        return reward(deepcopy(prompts), list(responses))


def one_for_each(values: object, responses: int, name: str, rows: str = "") -> list[Any]:
    """Return a sequence or an array of one reward for each response as a list; DataError for anything else."""
    if callable(to_list := getattr(values, "tolist", None)):  # of NumPy, torch, pandas and Arrow
        values = to_list()
    given = list(values) if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None
    if given is not None and len(given) == responses:
        return given
    result = type(values).__name__ if given is None else f"{len(given)} rewards"
    raise DataError(f"{name} returned {result} for the {responses} responses{rows}; return a list with one number each")
