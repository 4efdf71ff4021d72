"""Reports of garak, ``….report.jsonl``: the reward is 1 for an attack that a detector finds successful."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.data.messages import digest
from infalign.integrations.logs.samples import Note, Sample, choose, number

KNOWN_BY = ({"entry_type", "plugins.target_type"},)
DONE = 2  # the status of an attempt whose outputs were judged


def read(path: Path, score: str | None, note: Note) -> Iterator[Sample]:
    """Yield the outputs of each attempt with what one detector finds."""
    rows = [row for _, row in read_rows(path)]
    kinds = Counter(row["entry_type"] for row in rows)
    if kinds["start_run setup"] > 1:
        raise DataError(f"{path} holds {kinds['start_run setup']} runs; give a file for each run")
    if not kinds["completion"]:
        raise DataError(f"{path} has no entry completion: the run was cut off; run it again")
    done = [row for row in rows if row["entry_type"] == "attempt" and row["status"] == DONE]
    detector = choose(list(dict.fromkeys(name for row in done for name in row["detector_results"])), score)
    attempts = [row for row in done if detector in row["detector_results"]]
    scores = [number(value) for row in attempts for value in row["detector_results"][detector]]
    values = sorted((value for value in scores if value is not None), reverse=True)
    hits = sum(row["fails"] for row in rows if row["entry_type"] == "eval" and row["detector"] == detector)
    lowest = values[hits - 1] if hits else math.inf  # of the successes: reports do not hold eval_threshold
    if sum(value >= lowest for value in values) != hits:
        raise DataError(f"{path} counts {hits} successes by {detector}, which its attempts do not have; run it again")
    note(
        f"the reward is 1 for an attack that succeeds by {detector}, a judge of {len(attempts)} of {len(done)} attempts"
    )
    model = " ".join(filter(None, (rows[0]["plugins.target_type"], rows[0]["plugins.target_name"])))
    for row in attempts:
        asked = [{"role": turn["role"], "content": turn["content"]["text"]} for turn in row["prompt"]["turns"]]
        about = {"probe": row["probe_classname"], "goal": row["goal"], "intent": row.get("intent")}
        prompt = f"{row['probe_classname']} {row['seq']} {digest(asked)[:6]}"
        for output, value in zip(row["outputs"], row["detector_results"][detector], strict=True):
            reward = None if number(value) is None else float(value >= lowest)
            yield Sample(prompt, model, reward, text=output and output["text"], asked=asked, about=about)
