"""Completions that TRL's trainers write with ``log_completions``, one Parquet file per logged step."""

import json
from collections.abc import Iterator
from pathlib import Path

from infalign.data.files import read_rows
from infalign.data.messages import spoken
from infalign.integrations.logs.samples import Note, Sample, choose, number

FIXED = {"step", "prompt", "completion", "advantage"}
KNOWN_BY = (FIXED,)


def read(path: Path, score: str | None, note: Note) -> Iterator[Sample]:
    """Yield the rows of one file with the reward of one function."""
    note("TRL's tables have no prompt id: rows with equal prompt are responses to one prompt")
    note("the policy changes with each step, so each step is a model of its own")
    rows = [row for _, row in read_rows(path)]
    numbers = {key for row in rows for key, value in row.items() if isinstance(value, int | float)} - FIXED
    name, folder = choose(sorted(numbers), score), path.absolute().parent
    run = folder.parent if folder.name == "completions" else folder
    for row in rows:
        asked, said = row["prompt"], row["completion"]
        prompt = asked if isinstance(asked, str) else json.dumps(asked)
        text = said if isinstance(said, str) else spoken(said)
        about = {key: value for key, value in row.items() if key not in FIXED}
        model = f"{run.name} step {row['step']}"
        yield Sample(prompt, model, number(row.get(name)), None, text, asked=asked, about=about)
