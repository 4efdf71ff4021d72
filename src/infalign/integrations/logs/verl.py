"""Rollouts that verl dumps in ``rollout_data_dir`` or ``validation_data_dir``, one STEP.jsonl per step."""

from collections.abc import Iterator
from pathlib import Path

from infalign.data.files import read_rows
from infalign.integrations.logs.samples import Note, Sample, choose, number

KNOWN_BY = ({"input", "output", "score", "step"},)


def read(path: Path, score: str | None, note: Note) -> Iterator[Sample]:
    """Yield the rows of one file; ``score`` may be another number of the rows."""
    note("verl's dumps have no prompt id: rows with equal input are responses to one prompt")
    note("the policy changes with each step, so each step is a model of its own")
    for _, row in read_rows(path):
        about = {key: value for key, value in row.items() if key not in ("input", "output", "gts", "step")}
        name = choose([key for key, value in about.items() if not isinstance(value, str)], score, "score")
        about |= {"ground_truth": row.get("gts"), "answer": row.get("gts")}
        model, prompt = f"{path.absolute().parent.name} step {row['step']}", row["input"]
        answer = None if row.get("pred") is None else str(row["pred"])
        yield Sample(prompt, model, number(row.get(name)), None, row["output"], answer, asked=prompt, about=about)
