"""Results of evalplus, ``…eval_results.json``: whether each solution passes the base tests, and the extra ones too."""

import json
from collections.abc import Iterator
from pathlib import Path

from infalign.data.lines import reject_duplicate_keys
from infalign.integrations.logs.samples import Note, Sample, choose

KNOWN_BY = ({"date", "hash", "eval"},)


def read(path: Path, score: str | None, note: Note) -> Iterator[Sample]:
    """Yield the solutions: 1 if they pass the tests of ``score``, plus (base and extra ones) or base."""
    tasks = json.loads(path.read_bytes(), object_pairs_hook=reject_duplicate_keys)["eval"]
    rows = [row for solutions in tasks.values() for row in solutions]
    kinds = ["plus", "base"] if all(row["plus_status"] for row in rows) else ["base"]
    kind, named = choose(kinds, score, kinds[0]), path.name.removesuffix("eval_results.json").rstrip("._")
    model = path.absolute().parent.name if named in ("", "samples") else named
    note(f"the results do not name the model, so their file or folder does: {model}")
    note(f"the reward is 1 for a solution that passes {'base and extra' if kind == 'plus' else 'the base'} tests")
    for row in rows:
        passed = all(row[f"{name}_status"] == "pass" for name in ("base", kind))
        yield Sample(row["task_id"], model, float(passed), text=row["solution"])
