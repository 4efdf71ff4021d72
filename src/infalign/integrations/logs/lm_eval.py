"""Samples of lm-eval, ``samples_TASK_DATE.jsonl``, and the ``results_DATE.json`` beside them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.integrations.logs.samples import Note, Sample, choose, number

KNOWN_BY = ({"doc_id", "doc", "resps", "filtered_resps"},)
USUAL = ("acc", "exact_match")  # metrics, one of which is taken where none is named
SEVERAL = {"majority_vote", "take_first_k"}  # filters that give the score of several responses


def read(path: Path, score: str | None, note: Note) -> Iterator[Sample]:
    """Yield each response; a metric of a filter, METRIC,FILTER, is the reward of the one response that it scores."""
    named = re.fullmatch(r"samples_(.+)_(\d{4}-\d\d-\d\dT.+?)\.jsonl.*", path.name)
    beside = sorted(path.parent.glob(f"*_{named[2]}.json")) if named else []
    task, run = named[1] if named else path.stem, json.loads(beside[0].read_bytes()) if beside else {}
    if not beside:
        note(f"{path} has no results_DATE.json beside it, so its folder names the model")
    rows = [row for _, row in read_rows(path)]
    numbers = ((m, row["filter"]) for row in rows for m in row["metrics"] if isinstance(row[m], int | float))
    names = [",".join(name) for name in dict.fromkeys(numbers)]
    likely = [name for name in names if (name.split(",")[0] in USUAL if score is None else score in name.split(","))]
    chosen = choose(names, likely[0] if len(likely) == 1 else score) if names else f",{rows[0]['filter']}"
    if len(names) > 1:
        note(f"{task}: the reward is {chosen}; not used: {', '.join(name for name in names if name != chosen)}")
    metric, _, kind = chosen.partition(",")
    rows = [row for row in rows if row["filter"] == kind]
    if len(rows) != (documents := run.get("n-samples", {}).get(task, {}).get("effective", len(rows))):
        raise DataError(f"{path} has {len(rows)} of {documents} documents; it is cut off, or holds two runs")
    responses = max(len(_texts(row)) for row in rows)
    first = responses == 1 or _takes_the_first(kind, run.get("configs", {}).get(task, {}))
    if responses > 1:
        which = "only the first" if first else "no single one"
        note(f"{task}: {chosen} scores {which} of the {responses} responses to a document; a checker scores them all")
    model = run.get("model_name") or path.absolute().parent.name
    for row in rows:
        prompt, asked = f"{task} {row['doc_id']} {row['doc_hash'][:6]}", row["arguments"]["gen_args_0"]["arg_0"]
        asked = asked if isinstance(asked, str) else json.loads(asked[0])  # of a chat
        about = {"answer": row["target"]} | row["doc"] | {"target": row["target"], "task": task}
        for i, text in enumerate(_texts(row)):
            reward = number(row.get(metric)) if first and i == 0 else None
            yield Sample(prompt, model, reward, i, text, asked=asked, about=about)


def _texts(row: Mapping[str, Any]) -> list[str | None]:
    """Return the responses to the one request for text; a choice by likelihood is one response without text."""
    texts = row["resps"][0] if len(row["resps"]) == 1 else []
    return texts if texts and all(isinstance(text, str) for text in texts) else [None]


def _takes_the_first(kind: str, config: Mapping[str, Any]) -> bool:
    """Return whether a filter takes the first response, as the default does; others are in the task's configuration."""
    filters = config.get("filter_list") or []
    steps = {step["function"] for each in filters if each["name"] == kind for step in each["filter"]}
    return ("take_first" in steps or (kind == "none" and not steps)) and not steps & SEVERAL
