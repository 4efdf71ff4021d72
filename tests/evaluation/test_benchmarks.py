"""What alignment changed elsewhere: likelihoods of held-out responses, questions of one's own, and words for it."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import micro
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.benchmarks import check_benchmarks, held_out, read_questions
from infalign.evaluation.settings import Benchmarks
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.runs.report.words import elsewhere

PAIRS = pa.table(
    {
        "prompt": [[{"role": "user", "content": f"How do I bake {what}?"}] for what in ("bread", "a cake", "a pie")],
        "chosen": ["Knead it.", "Ask the baker on the corner.", "Please wait. " * 80],
    }
)


@pytest.fixture(scope="module")
def uniform() -> tuple[Any, Any]:
    """Return a model that gives all of its tokens the same probability, and its tokenizer."""
    shape = Scratch(**micro.SCRATCH)
    tokenizer = train_tokenizer(["How do I bake bread?", "Knead it."] * 9, shape)
    model = new_policy(shape, tokenizer, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model, tokenizer


def test_a_uniform_model_gives_each_token_the_logarithm_of_its_vocabulary(uniform: tuple[Any, Any]) -> None:
    """Whatever is said and however long it is; what does not fit the model's context is left out."""
    model, tokenizer = uniform
    found = held_out(model, tokenizer, PAIRS, None)
    assert found["value"].to_pylist() == pytest.approx([-math.log(model.config.vocab_size)] * 2)
    with pytest.raises(DataError, match="of which 1 fit the model's context of 192"):
        held_out(model, tokenizer, PAIRS, 1)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Who?", "choices": ["me", "you"]},
        {"question": "Who?", "choices": ["me", "you"], "answer": 2},
        {"question": "Who?", "choices": ["me", "you"], "answer": True},
        {"question": "Who?", "choices": ["me", 2], "answer": 0},
        {"question": "Who?", "choices": ["me"], "answer": 0},
        {"question": "Who?", "choices": ["me", ""], "answer": 0},
        {"question": "", "choices": ["me", "you"], "answer": 0},
        {"question": "Who?", "choices": "me or you", "answer": 0},
    ],
)
def test_a_row_that_is_no_question_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    """A choice, the answer among them, or the question is missing, empty or of another kind."""
    good = {"question": "Who?", "choices": ["me", "you"], "answer": 1}
    path = tmp_path / "facts.jsonl"
    path.write_text(f"{json.dumps(good)}\n", encoding="utf-8")
    assert read_questions(path) == [good]
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"facts\.jsonl line 2: not a question"):
        check_benchmarks(Benchmarks(tasks=[str(path)]))


def test_without_the_harness_its_tasks_are_refused_and_held_out_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    check_benchmarks(Benchmarks())
    with pytest.raises(ConfigError, match=r"pip install 'infalign\[lm-eval\]'"):
        check_benchmarks(Benchmarks(tasks=["held-out", "arc_easy"]))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["a/facts.jsonl", "b/facts.parquet"], "two tasks are called facts"),
        (["../x"], "no task can be called"),
        ([], "at least 1 item"),
    ],
)
def test_tasks_have_names_of_their_own_that_files_can_have(tasks: list[str], said: str) -> None:
    """Their tables lie side by side."""
    with pytest.raises(ValidationError, match=said):
        Benchmarks(tasks=tasks)


def metric(low: float, high: float, *, higher_is_better: bool = True) -> dict[str, Any]:
    """Return one metric of which one policy differs from the reference by this interval."""
    change = {"mean": (low + high) / 2, "low": low, "high": high}
    return {"higher_is_better": higher_is_better, "policies": {"aware": {"difference": change}}}


def test_only_what_is_surely_worse_is_called_worse() -> None:
    """The whole interval is on the bad side, which for an error is above 0."""
    unclear = {"acc": metric(-0.2, 0.1), "error": metric(-0.2, -0.1, higher_is_better=False)}
    assert elsewhere({}) == []
    assert elsewhere({"benchmarks": {"a": unclear}}) == ["On a no policy is surely worse than the reference."]
    worse = {"acc": metric(-0.2, -0.1), "error": metric(0.1, 0.2, higher_is_better=False)}
    assert elsewhere({"benchmarks": {"a": unclear, "b": worse}}) == [
        "Elsewhere aware is worse than the reference: b acc by −0.150 (−0.200 to −0.100) and "
        "b error by 0.150 (0.100 to 0.200)."
    ]
