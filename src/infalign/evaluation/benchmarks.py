"""How a model does on tasks of other kinds, question by question, so that two models can be compared on each.

Tasks are those that come with lm-evaluation-harness (the ``lm-eval`` extra), the user's own multiple-choice questions,
and the held-out responses of the run's data. No code is run that came with data: of the harness only its own tasks are
taken, for a task's YAML is a program, and no metric that the library ``evaluate`` would fetch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from infalign.core.errors import ConfigError, DataError, InfalignError, first_line
from infalign.core.spelling import did_you_mean
from infalign.core.storage import listed
from infalign.data.examples import reply
from infalign.data.files import read_rows
from infalign.evaluation.settings import HELD_OUT, Benchmarks, is_file_task, task_label
from infalign.method.calibration import Array

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COLUMNS: dict[str, pa.DataType] = {
    "task": pa.string(),
    "metric": pa.string(),
    "higher_is_better": pa.bool_(),
    "document": pa.string(),  # its number and the hash of what it holds
    "value": pa.float64(),
}
SCHEMA = pa.schema(COLUMNS)
BATCH = 8  # requests a forward pass
BATCH_TOKENS = 16384
SEED = 1234  # of the examples before a question, as the harness has it
QUESTION = '{"question": "…", "choices": ["…", "…"], "answer": 0}'


@dataclass(frozen=True, slots=True)
class Metric:
    """What one model achieves on each document."""

    higher_is_better: bool
    documents: list[str]
    values: Array


def by_metric(table: pa.Table) -> dict[tuple[str, str], Metric]:
    """Return what a table holds by task and metric, as `held_out` and `harness` write it."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault((row["task"], row["metric"]), []).append(row)
    return {
        name: Metric(
            rows[0]["higher_is_better"],
            [row["document"] for row in rows],
            np.array([row["value"] for row in rows]),
        )
        for name, rows in found.items()
    }


def check_benchmarks(benchmarks: Benchmarks) -> None:
    """Raise for what can be known before a model is there.

    ConfigError if lm-evaluation-harness is missing, or has not a task, and DataError for a file that holds no
    questions.
    """
    for task in filter(is_file_task, benchmarks.tasks):
        read_questions(Path(task))
    if others := [task for task in benchmarks.tasks if task != HELD_OUT]:
        _import_harness()
    if named := [task for task in others if not is_file_task(task)]:
        known = _tasks_of_the_harness()
        for task in named:
            _check_known(task, known)


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Return the multiple-choice questions of a file. Raises DataError that names a row that is none."""
    questions = []
    for where, row in read_rows(path):
        match row:
            case {"question": str(question), "choices": [str(), str(), *more] as choices, "answer": int(answer)} if (
                question
                and all(isinstance(choice, str) for choice in more)
                and all(choices)
                and 0 <= answer < len(choices)
                and not isinstance(answer, bool)
            ):
                questions.append({"question": question, "choices": choices, "answer": answer})
            case _:
                raise DataError(f"{where}: not a question like {QUESTION}, whose answer is the place of a choice")
    return questions


def held_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: pa.Table, documents: int | None
) -> pa.Table:
    """Return the log-likelihood a token, in nats, of each test pair's preferred response.

    exp of minus the mean is the perplexity, geometric over responses. Those beyond the model's context are left out.
    Raises DataError if fewer than two are left.
    """
    from infalign.models.logprobs import token_logprobs
    from infalign.models.pretrained import conversation_ids

    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    asked, said = list[list[int]](), list[list[int]]()
    for prompt, chosen in zip(
        *(listed(pairs.slice(0, documents), column) for column in ("prompt", "chosen")), strict=True
    ):
        whole = conversation_ids(tokenizer, [*prompt, reply(chosen)], add_generation_prompt=False)
        opening = conversation_ids(tokenizer, prompt, add_generation_prompt=True)
        before = next((i for i, pair in enumerate(zip(opening, whole, strict=False)) if len({*pair}) > 1), len(opening))
        if before < len(whole) <= context:
            asked.append(whole[:before])
            said.append(whole[before:])
    if len(said) < 2:
        raise DataError(
            f"the data has {pairs.num_rows} test pairs, of which {len(said)} fit the model's context of {context}, and "
            f"{HELD_OUT} compares 2 or more; take it out of benchmarks.tasks"
        )
    sums = token_logprobs(model, asked, said, batch_tokens=BATCH_TOKENS)
    return _table(HELD_OUT, "log-likelihood a token", True, map(str, range(len(said))), sums / list(map(len, said)))


def harness(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, documents: int | None, *, chat: bool
) -> pa.Table:
    """Return what a model achieves on each document of a task, by lm-evaluation-harness.

    A task may hold others. Metrics are those that are means over documents. Raises ConfigError for a task that is not
    known, runs code, or has no such metric, and InfalignError if it fails, as without the hub's data.
    """
    _import_harness()
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet(), _without_code_of_the_hub():
        loaded = _load(task)
        for part in loaded["tasks"].values():
            if part.get_config("num_fewshot") is None:
                part.set_config(key="num_fewshot", value=0)
            part.set_fewshot_seed(seed=SEED)
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH)
        try:
            found = evaluate(wrapped, loaded, limit=documents, bootstrap_iters=0, apply_chat_template=chat)
        except Exception as error:
            raise InfalignError(f"{task} of benchmarks.tasks failed: {first_line(error)}") from error
    tables = [table for name in loaded["tasks"] for table in _means(name, found)]
    if not tables:
        raise ConfigError(f"{task} of benchmarks.tasks has no metric that is a mean over documents; take another task")
    return pa.concat_tables(tables)


def _means(task: str, found: Mapping[str, Any]) -> Iterator[pa.Table]:
    """Yield the values of each metric whose mean over documents is the metric itself."""
    samples: dict[str, list[Mapping[str, Any]]] = {}
    for sample in found["samples"][task]:
        samples.setdefault(sample["filter"], []).append(sample)
    for chosen, rows in samples.items():
        documents = [f"{row['doc_id']} {row['doc_hash'][:16]}" for row in rows]
        for metric in rows[0]["metrics"]:
            values = [float(row[metric]) for row in rows if isinstance(row.get(metric), (int, float, np.number))]
            if len(values) < len(rows):
                continue
            if np.isclose(np.mean(values), found["results"][task].get(f"{metric},{chosen}", np.nan)):
                better = found["higher_is_better"][task].get(metric, True)
                name = metric if chosen == "none" else f"{metric} ({chosen})"
                yield _table(task, name, better, documents, values)


def _table(task: str, metric: str, higher_is_better: bool, documents: Any, values: Any) -> pa.Table:
    rows = [
        {"task": task, "metric": metric, "higher_is_better": higher_is_better, "document": document, "value": value}
        for document, value in zip(documents, values, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _import_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"benchmarks.tasks other than {HELD_OUT} need lm-evaluation-harness; pip install 'infalign[lm-eval]'"
        ) from error


def _tasks_of_the_harness() -> TaskManager:
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager()


def _check_known(task: str, known: TaskManager) -> None:
    if task not in known.all_tasks:
        meant = did_you_mean(task, known.all_tasks) or "`lm-eval ls tasks` lists them"
        raise ConfigError(f"lm-evaluation-harness has no task {task} (benchmarks.tasks); {meant}")


def _load(task: str) -> Any:
    """Return a task with its documents, as the harness takes it."""
    from lm_eval.tasks import TaskManager

    if is_file_task(task):
        return TaskManager(include_defaults=False).load([_multiple_choice(Path(task))])
    known = _tasks_of_the_harness()
    _check_known(task, known)
    try:
        loaded = known.load([task])
    except Exception as error:
        raise InfalignError(
            f"{task} of benchmarks.tasks cannot be loaded ({first_line(error)}); its documents come from the hub, and "
            "a task that needs the library evaluate, whose metrics are code of the hub, is never run"
        ) from error
    for name, part in loaded["tasks"].items():
        if getattr(part, "UNSAFE_CODE", False):
            raise ConfigError(f"{name} of benchmarks.tasks runs code that a model wrote, and none is run; take it out")
    return loaded


def _multiple_choice(path: Path) -> dict[str, Any]:
    """Return the questions of a file as a task of the harness."""
    from datasets import Dataset

    questions = read_questions(path)
    return {
        "task": task_label(str(path)),
        "custom_dataset": lambda **_: {"test": Dataset.from_list(questions)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": lambda document: document["question"],
        "doc_to_choice": lambda document: document["choices"],
        "doc_to_target": lambda document: document["answer"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's notices and progress bars from the display; what fails is raised."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _without_code_of_the_hub() -> Iterator[None]:
    """Let nothing import ``evaluate``, whose metrics are Python files that it fetches from the hub and runs."""
    before = sys.modules.pop("evaluate", None)
    sys.modules["evaluate"] = None  # type: ignore[assignment] # what makes its import an ImportError
    try:
        yield
    finally:
        del sys.modules["evaluate"]
        if before is not None:
            sys.modules["evaluate"] = before
