"""Reward functions of users, called by the names of their parameters: infalign's form, TRL's or verl's.

What infalign or a trainer gives wins over a column of the data that has its name, and a warning says so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import Parameter, isawaitable, signature
from typing import Any

from infalign.core.errors import ConfigError, DataError
from infalign.core.spelling import did_you_mean

ABSENT = object()  # the value of a column in a row that does not have it
OWN, TRL, VERL = "responses", "completions", "solution_str"  # the parameter that a form is known by
TRAINER = ("completion_ids", "trainer_state", "log_metric", "log_extra", "environments")  # what TRL 1.16 gives besides
# What a reward function gets by these names, and never a column of the data.
GIVEN = {"prompts": "the prompts", **dict.fromkeys((OWN, TRL, VERL), "what the policy said")}
GIVEN |= dict.fromkeys(TRAINER, "what TRL gives")
LOGGER = logging.getLogger(__name__)


def unlogged(*_: object, **__: object) -> None:
    """Log nothing: outside TRL there is no log."""


UNLOGGED = dict.fromkeys(("log_metric", "log_extra"), unlogged)


class UserReward:
    """A reward that takes the columns of rows: called as `ByName` is."""

    __call__: Callable[..., Any]


@dataclass(frozen=True)
class ByName(UserReward):
    """A reward function, called by the names of its parameters, which say of what form it is.

    infalign's is ``(prompts, responses)``, with the texts of responses; TRL's ``(prompts, completions)``, where
    completions are messages if prompts are, or ``(completion_ids)`` alone; verl's ``(data_source, solution_str,
    ground_truth, extra_info)``, for one row. Other parameters are columns of the data, or `TRAINER`'s inside TRL. The
    function may be asynchronous. Raises ConfigError for a function of no form.
    """

    function: Callable[..., object]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"a reward function is needed, found {self.function!r}; import it, and give it itself")
        if self._form is None:
            raise ConfigError(
                f"{self.name} takes ({', '.join(self.parameters)}); a reward function must take (prompts, "
                "responses), TRL's (prompts, completions) or verl's (data_source, solution_str, ground_truth, "
                "extra_info); further parameters are columns of the data"
            )

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        columns: Mapping[str, Sequence[object]] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what the function gives for rows; ``columns`` have a value for each, `ABSENT` where it has none.

        ``given`` is what a trainer gives besides: `TRAINER`, and ``completions`` as it has them. Raises DataError for a
        column that the function needs and that rows lack, ConfigError for an argument that only TRL gives.
        """
        for name in (columns or {}).keys() & GIVEN.keys():
            warn_of_column(name)
        arguments = self._arguments(prompts, responses, given or {})
        kept = self._checked(columns or {}, arguments, prompts)
        lists = {name: [None if value is ABSENT else value for value in values] for name, values in kept.items()}
        if self._form == VERL:
            lists |= arguments
            rows = ({name: values[row] for name, values in lists.items()} for row in range(len(responses)))
            given_by = map(self._called, rows)  # numbers, or dicts with the key score
            return [self._score(result) if isinstance(result, Mapping) else result for result in given_by]
        return self._called(lists | arguments)

    def check(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[object]]) -> None:
        """Raise as a call for these rows does before the function itself is called."""
        self._checked(columns, self._arguments(prompts, [], {}), prompts)

    def _score(self, result: Mapping[str, Any]) -> Any:
        if "score" not in result:
            raise DataError(f"{self.name} returned a dict without the key score: {', '.join(map(str, result))}")
        return result["score"]

    def _arguments(self, prompts: Sequence[Any], responses: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function gets besides columns: what its form has, and what else it names."""
        if self._form == VERL:
            return {VERL: list(responses)}
        asked, texts = {"prompts": list(prompts)}, {OWN: list(responses)}
        if self._form == TRL:
            said = [*map(as_completion, prompts, given.get(TRL, responses))]
            own, others = {**given, **asked, TRL: said}, {**UNLOGGED, **texts}
        else:
            own, others = {**asked, **texts}, {**UNLOGGED, **given}
        return {name: value for name, value in others.items() if name in self.parameters} | own

    def _called(self, given: dict[str, Any]) -> Any:
        """Return the result of the function for what it takes of ``given``; an asynchronous one runs to its end."""
        takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self.parameters.values())
        result = self.function(**{n: value for n, value in given.items() if takes_all or n in self.parameters})
        if not isawaitable(result):
            return result
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a main thread stays the main thread, where signals work
            return asyncio.run(awaited(result))
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, awaited(result)).result()

    def _checked(
        self, columns: Mapping[str, Sequence[object]], given: Collection[str], prompts: Sequence[Any]
    ) -> dict[str, Sequence[object]]:
        """Return the columns as the function may take them. Raises as a call."""
        kept = {name: values for name, values in columns.items() if name not in GIVEN}
        if self._form == VERL:
            kept = _as_verl(kept, len(prompts))
        for name, parameter in self.parameters.items():
            takes_rest = parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
            if takes_rest or parameter.default is not Parameter.empty or name in given:
                continue
            if name in GIVEN:
                where = "exists only inside TRL" if name in TRAINER else "is an argument of another form"
                raise ConfigError(f"{self.name} needs {name}, which {where}; give it a default, or remove it")
            rows = [row for row, value in enumerate(kept.get(name, ())) if value is ABSENT]
            if name not in kept or rows:
                others = sorted(kept.keys() - {name})
                some = f"{len(rows)} of {len(prompts)} rows, first in {_row(rows[0], prompts)}" if rows else "every row"
                raise DataError(
                    f"{self.name} needs the column {name}, which is missing in {some}; there are "
                    f"{', '.join(others) or 'no columns'}{did_you_mean(name, others, after='; ')}"
                )
        return kept

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"the reward function {getattr(self.function, '__name__', type(self.function).__name__)}"

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters of the function, by name. Raises ConfigError where they cannot be read."""
        try:
            return signature(self.function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(f"cannot read the parameters of {self.name} ({error}); wrap it in a def") from error

    @cached_property
    def _form(self) -> str | None:
        form = next((form for form in (TRL, VERL, OWN) if form in self.parameters), None)
        return form or (TRL if "completion_ids" in self.parameters else None)


def by_name(reward: Callable[..., Any]) -> UserReward:
    """Return what calls a reward by the names of its parameters. Raises ConfigError for what is of no form."""
    return reward if isinstance(reward, UserReward) else ByName(reward)


def columns_of(rows: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return the columns of rows, with `ABSENT` where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, ABSENT) for row in rows] for name in names}


def split(passed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns among what TRL passes by name, which are lists, and what else it gives."""
    others = {n: value for n, value in passed.items() if n in TRAINER or not (n in GIVEN or isinstance(value, list))}
    return {name: values for name, values in passed.items() if name not in others}, others


def why_left_out(name: str) -> str:
    """Return what is said of a column that has the name of something given."""
    what = GIVEN.get(name, "what verl gives")
    return f"the column {name} is left out: a reward function gets {what} by this name; rename the column to use it"


@cache
def warn_of_column(name: str) -> None:
    """Log that a column is left out, once in a process."""
    LOGGER.warning("! %s", why_left_out(name))


async def awaited(result: Awaitable[Any]) -> Any:
    """Return what an asynchronous function gives."""
    return await result


def as_completion(prompt: object, response: object) -> object:
    """Return a response in the form of its prompt: messages for messages."""
    is_text = isinstance(response, str) and not isinstance(prompt, str)
    return [{"role": "assistant", "content": response}] if is_text else response


def _row(row: int, prompts: Sequence[Any]) -> str:
    """Return the number of a row, and how the last text of its prompt begins."""
    text = prompts[row] if isinstance(prompts[row], str) else prompts[row][-1]["content"]
    return f"row {row} ({text[:60]!r})"


def _as_verl(columns: dict[str, Sequence[object]], rows: int) -> dict[str, Sequence[object]]:
    """Return the columns as verl's reward manager names them: the truth lies in ``reward_model`` of its data."""
    truth = columns.get("reward_model")
    if truth is not None and "ground_truth" not in columns:
        columns["ground_truth"] = [v.get("ground_truth", ABSENT) if isinstance(v, Mapping) else ABSENT for v in truth]
    return {"extra_info": [None] * rows, **columns}
