"""Logs of inspect_ai, ``.eval`` and ``.json``, through its own API: the epochs are the samples of a prompt."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError
from infalign.data.messages import digest
from infalign.integrations.logs.samples import Note, Sample, choose, number

KNOWN_BY = ({".eval"}, {"version", "status", "eval", "run_id", "task_id"})
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # as it reads them


def read(path: Path, score: str | None, _: Note) -> Iterator[Sample]:
    """Yield the samples of a finished log with the values of one scorer; ``SCORER.KEY`` where these are objects."""
    log = import_module("inspect_ai.log").read_eval_log(str(path), exclude_fields={"events", "store", "messages"})
    if log.status != "success":
        raise DataError(f"the log has status {log.status}, not success; finish it with `inspect eval-retry {path}`")
    samples, planned = log.samples or [], len(log.eval.dataset.sample_ids or []) * (log.eval.config.epochs or 1)
    if len(samples) != planned:
        raise DataError(f"the log has {len(samples)} of {planned} samples; give the log of the whole run")
    names = list(dict.fromkeys(name for sample in samples for name in _scores(sample)))
    scorer = choose(names, score) if names or score else ""
    for sample in samples:
        asked = sample.input
        if not isinstance(asked, str):
            asked = [{"role": turn.role, "content": turn.text} for turn in asked]
        given = None if sample.invalidation else _scores(sample).get(scorer)
        yield Sample(
            f"{log.eval.task} {sample.id} {digest([asked, sample.target])[:6]}",
            log.eval.model,
            _reward(given.value) if given else None,
            sample.epoch,
            sample.output.completion if sample.output.choices else None,
            given.answer if given else None,
            sample.error.message if sample.error else "it was invalidated" if sample.invalidation else None,
            asked,
            {"target": sample.target, "answer": sample.target} | sample.metadata | {"task": log.eval.task},
        )


def _scores(sample: Any) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for name, score in (sample.scores or {}).items():
        parts = score.value.items() if isinstance(score.value, dict) else ()
        scores |= {f"{name}.{key}": score.model_copy(update={"value": part}) for key, part in parts} or {name: score}
    return scores


def _reward(value: Any) -> float | None:
    if not isinstance(value, str):
        return number(value)
    grade = GRADES.get(value, GRADES.get(value.lower()))
    try:
        return number(float(value)) if grade is None else grade
    except ValueError:  # inspect_ai takes other text for 0
        raise DataError(f"the value {value!r} is neither a grade ({', '.join(GRADES)}) nor a number") from None
