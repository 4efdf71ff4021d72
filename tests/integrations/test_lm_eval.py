"""lm-evaluation-harness itself on models of ours, offline (`make test-frameworks`)."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from rich.console import Console

from infalign.core.errors import ConfigError, InfalignError
from infalign.core.storage import read_table
from infalign.evaluation.benchmarks import by_metric, check_benchmarks, harness
from infalign.evaluation.settings import Benchmarks
from infalign.models.guided import GuidedForCausalLM
from infalign.models.logprobs import token_logprobs
from infalign.models.pretrained import load_policy
from infalign.recipe.settings import Recipe
from infalign.runs import pipeline

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

QUESTIONS = [
    {"question": f"What is {i} plus {i}?", "choices": ["two", f"{2 * i}", "the moon", "I do not know"], "answer": i % 4}
    for i in range(24)
]


def write_questions(path: Path, rows: list[dict[str, Any]] = QUESTIONS) -> str:
    """Write questions as JSON lines and return the path."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def policy(calibrated_run: Path) -> Path:
    """Return the folder of a small policy."""
    return calibrated_run.parent / "policy"


def test_a_question_is_right_where_the_answer_is_the_most_likely_choice(policy: Path, tmp_path: Path) -> None:
    """What the harness counts, from our own log-probabilities of each choice after the question."""
    model, tokenizer = load_policy(policy)
    (found,) = by_metric(
        harness(model, tokenizer, write_questions(tmp_path / "facts.jsonl"), None, chat=False)
    ).values()
    right = []
    for row in QUESTIONS:
        asked = [tokenizer(row["question"])["input_ids"]] * 4
        said = [tokenizer(f"{row['question']} {choice}")["input_ids"][len(asked[0]) :] for choice in row["choices"]]
        sums = token_logprobs(model, asked, said, batch_tokens=1024)
        right.append(float(np.argmax(sums) == row["answer"]))
    assert found.values.tolist() == right
    assert 0 < sum(right) < 24


def test_a_guide_that_learnt_nothing_answers_as_the_reference(policy: Path, tmp_path: Path) -> None:
    """A policy that only this library can load goes the same way."""
    reference, tokenizer = load_policy(policy)
    guided = GuidedForCausalLM.beside(load_policy(policy)[0], load_policy(policy)[0].base_model).eval()
    path = write_questions(tmp_path / "facts.jsonl")
    tables = [harness(model, tokenizer, path, 8, chat=True) for model in (reference, guided)]
    assert tables[0] == tables[1]
    assert tables[0].num_rows == 8


def test_a_task_that_is_not_there_is_named_with_the_nearest() -> None:
    """Before any model is loaded."""
    with pytest.raises(ConfigError, match=r"no task arc_eazy .* did you mean arc_easy"):
        check_benchmarks(Benchmarks(tasks=["arc_eazy"]))


def test_no_code_of_the_hub_is_run(policy: Path) -> None:
    """A task whose metric `evaluate` would fetch and run is refused, and `evaluate` can be imported as before."""
    with pytest.raises(InfalignError, match=r"humaneval .* is never run"):
        harness(*load_policy(policy), "humaneval", 2, chat=False)
    assert sys.modules.get("evaluate", True) is not None


def test_a_run_asks_each_model_once_and_only_what_is_new(policy: Path, tmp_path: Path) -> None:
    """Another file of questions adds its own; a question that changed asks again what it is about."""
    facts, more = write_questions(tmp_path / "facts.jsonl"), write_questions(tmp_path / "more.jsonl")

    def done(*tasks: str) -> list[str]:
        recipe = Recipe.model_validate(micro.given(tmp_path / "run", str(policy)) | {"benchmarks": {"tasks": tasks}})
        console = Console(file=io.StringIO(), width=200)
        pipeline.run(recipe, until="evaluate", console=console)
        said = [line.split()[1] for line in console.file.getvalue().splitlines() if line.startswith("✓")]
        return [name for name in said if name.startswith("benchmark")]

    assert done(facts) == ["benchmark-reference.facts", "benchmark-aware.facts"]
    assert done(facts) == []
    assert done(facts, more) == ["benchmark-reference.more", "benchmark-aware.more"]
    write_questions(tmp_path / "more.jsonl", QUESTIONS[:20])
    assert done(facts, more) == ["benchmark-reference.more", "benchmark-aware.more"]
    numbers = json.loads((tmp_path / "run" / "results.json").read_text())["benchmarks"]
    for task, documents in (("facts", 24), ("more", 20)):
        of, base = (
            by_metric(read_table(tmp_path / "run" / "benchmarks" / name / f"{task}.parquet"))[task, "acc"].values
            for name in ("aware", "reference")
        )
        found = numbers[task]["acc"]
        assert found["documents"] == documents
        assert found["policies"]["aware"]["difference"]["mean"] == pytest.approx((of - base).mean())
        assert found["reference"]["mean"] == pytest.approx(base.mean())
