"""A reward function is called by the names of its parameters, and gets the columns of the data by name."""

import json
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import pytest

from infalign.core.errors import ConfigError, DataError
from infalign.method.by_name import ABSENT, GIVEN, TRAINER, ByName, columns_of, warn_of_column
from infalign.method.reward import CalibratedReward
from infalign.training.on_policy_trainer import with_row_columns

PROMPTS = [[{"role": "user", "content": "2 + 3?"}], [{"role": "user", "content": "2 + 4?"}]]
RESPONSES = ["5", "7"]
COLUMNS = columns_of([{"answer": "5", "level": 1}, {"answer": "6", "level": 2}])


def ours(prompts: list[Any], responses: list[str], answer: list[str]) -> list[float]:
    """infalign's form, with a column."""
    return [float(said == true) for said, true in zip(responses, answer, strict=True)]


def trl(completions: list[Any], answer: list[str], **columns: list[Any]) -> list[float]:
    """TRL's form: messages where prompts are messages, all columns, and the prompts by name."""
    assert columns["level"] == [1, 2]
    assert columns["prompts"] == PROMPTS
    return [float(said[0]["content"] == true) for said, true in zip(completions, answer, strict=True)]


def keyword_only(*, prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
    """TRL's form, keyword-only."""
    return trl(completions, answer, prompts=prompts, level=[1, 2])


async def asynchronous(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
    """TRL's form, asynchronous."""
    return keyword_only(prompts=prompts, completions=completions, answer=answer)


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> dict[str, float]:
    """verl's form: one row, and a dict."""
    assert data_source == "sums"
    return {"score": float(solution_str == ground_truth)}


VERL = columns_of([{"data_source": "sums", "reward_model": {"ground_truth": truth}} for truth in ("5", "6")])


class Checker:
    """An object that is called."""

    def __call__(self, prompts: list[Any], responses: list[str], answer: list[str]) -> list[float]:
        return ours(prompts, responses, answer)


def named(seen: list[Any], name: str, form: str, default: Any = Parameter.empty) -> Any:
    """Return a reward function with the parameters prompts, ``form`` and ``name``, which it adds to ``seen``."""

    def function(**given: Any) -> list[float]:
        seen.append(given.get(name, default))
        return [0.5, 0.5]

    parameters = [Parameter(n, Parameter.KEYWORD_ONLY) for n in ("prompts", form)]
    last = Parameter(name, Parameter.KEYWORD_ONLY, default=default)
    function.__signature__ = Signature([*parameters, last])  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize(
    ("function", "columns"),
    [
        *((form, COLUMNS) for form in (ours, trl, keyword_only, asynchronous, Checker())),
        *((verl, VERL), (partial(ours, answer=["5", "6"]), {})),
    ],
)
def test_each_form_gets_what_it_names_and_what_is_given_wins_over_a_column_of_its_name(
    function: Any, columns: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Responses, and the columns of their rows; the column that is left out is named once."""
    warn_of_column.cache_clear()
    for _ in range(2):
        assert ByName(function)(PROMPTS, RESPONSES, columns | {name: ["old", "old"]}) == [1.0, 0.0]
    (said,) = caplog.messages
    assert said.startswith(f"! the column {name} is left out: a reward function gets {GIVEN[name]} by this name")


@pytest.mark.parametrize("form", ["responses", "completions"])
@pytest.mark.parametrize("name", TRAINER)
def test_an_argument_of_trl_has_its_value_inside_trl_and_exists_only_there(form: str, name: str) -> None:
    """A column does not replace it; outside its default holds, nothing is logged, and other needs are refused."""
    seen: list[Any] = []
    needs, may = named(seen, name, form), named(seen, name, form, default="its default")
    value = [[1], [2]] if name == "completion_ids" else lambda *_: None
    said = [[{"role": "assistant", "content": text}] for text in RESPONSES]
    given, rows = {"reference_rewards": [[0.0, 1.0]] * 2, name: value}, [json.dumps({name: "old"})] * 2
    CalibratedReward(needs, "identity")(PROMPTS, said, **given)
    CalibratedReward(with_row_columns(ByName(needs)), "identity")(PROMPTS, said, columns=rows, **given)
    assert seen == [value] * 2
    if name.startswith("log_"):
        ByName(needs)(PROMPTS, RESPONSES, {})
        assert seen.pop()("name", 1.0) is None
    else:
        ByName(may)(PROMPTS, RESPONSES, {name: ["old"] * 2})
        assert seen.pop() == "its default"
        with pytest.raises(ConfigError, match=f"needs {name}, which exists only inside TRL; give it a default"):
            ByName(needs)(PROMPTS, RESPONSES, {name: ["old"] * 2})


@pytest.mark.parametrize("function", [lambda p, r: [], lambda prompts, texts: [], lambda *rows: [], len, max])
def test_a_function_of_no_form_is_refused_and_never_called_by_position(function: Any) -> None:
    """The error says which names there are."""
    with pytest.raises(ConfigError, match=r"\(prompts, responses\), TRL's|cannot read"):
        ByName(function)


@pytest.mark.parametrize(
    ("function", "rows", "said"),
    [
        (ours, [{"answers": "5"}] * 2, r"column answer, which is missing in every row; .* did you mean answers\?"),
        (ours, [{"solution": "5"}] * 2, "column answer, which is missing in every row; there are solution$"),
        (ours, [{"answer": "5"}, {"level": 2}], r"in 1 of 2 rows, first in row 1 \('2 \+ 4\?'\); there are level"),
        (ours, [{"answer": "5"}, {}], r"in 1 of 2 rows, first in row 1 \('2 \+ 4\?'\); there are no columns"),
        (lambda solution_str: {"reward": 1.0}, [{}] * 2, "returned a dict without the key score: reward"),
        (verl, [{"data_source": "sums", "reward_model": {}}] * 2, "ground_truth, which is missing in 2 of 2 rows"),
    ],
)
def test_a_column_that_rows_lack_is_named(function: Any, rows: list[dict[str, Any]], said: str) -> None:
    """With how many rows, the first of them, and the near name."""
    with pytest.raises(DataError, match=said):
        ByName(function)(PROMPTS, RESPONSES, columns_of(rows))


def test_what_a_function_does_not_need_may_be_absent() -> None:
    """A default stays, and among further columns a row without one has None."""

    def scored(prompts: list[Any], responses: list[str], weight: float = 2.0, **more: list[Any]) -> list[Any]:
        return [weight, more["level"]]

    assert ByName(scored)(PROMPTS, RESPONSES, {"level": [ABSENT, 3]}) == [2.0, [None, 3]]
