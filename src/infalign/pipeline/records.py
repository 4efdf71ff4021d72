"""The records of finished units in a run directory: ``stages/UNIT.json``, and their numbers as ``metrics.jsonl``."""

import json
import os
from pathlib import Path
from typing import Any

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import read_record, write_text

Record = dict[str, Any]
FORMAT = 4  # of the records; increase it when this version would misread records of the previous format


def record_path(root: Path, unit: str) -> Path:
    """Return the record of a finished unit of work."""
    return root / "stages" / f"{unit}.json"


def started_path(root: Path, unit: str) -> Path:
    """Return the file that says what identifies the last attempt at a unit (`pending.attempt`)."""
    return root / "stages" / f"{unit}.started"


def records(root: Path) -> dict[str, Record]:
    """Return the records of the finished units by name: kind, subject, stage, key, seconds, summary, versions, output.

    Raises DataError for a damaged record, and ConfigError for a record in another format.
    """
    by_unit = dict[str, Record]()
    for path in sorted((root / "stages").glob("*.json")):
        try:
            by_unit[path.stem] = read_record(path)
        except DataError:
            if os.path.lexists(path):  # else the run has removed it meanwhile, to do the unit again
                raise
    for name, record in by_unit.items():
        if record["format"] != FORMAT:
            raise ConfigError(
                f"{root} was made by infalign {record['versions']['infalign']}, whose records this version cannot "
                f"read (stages/{name}.json has format {record['format']}, not {FORMAT}); install that version, or "
                "choose another run_dir"
            )
    return by_unit


def write_metrics(root: Path) -> None:
    """Write ``metrics.jsonl`` from the records: a line per logged training step, and one per finished unit.

    Written whole after each unit, it is consistent whenever and however often a run was stopped.
    """
    lines = []
    for name, record in records(root).items():
        which, summary = {"stage": record["stage"], "unit": name}, dict(record["summary"])
        lines += [which | row for row in summary.pop("history", [])]
        lines.append(which | {"seconds": record["seconds"]} | summary)
    write_text(root / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
