"""What the files of a run directory hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq


def column(path: Path, name: str) -> list[Any]:
    """Return a column of a Parquet table."""
    return list(pq.read_table(path, columns=[name])[name].to_pylist())


def drawn(folder: Path, name: str) -> dict[tuple[str, int], Any]:
    """Return a column of the responses in a folder, by the id of their prompt and their number."""
    tables = (pq.read_table(shard, columns=["prompt_id", "index", name]) for shard in folder.glob("*.parquet"))
    return {(row["prompt_id"], row["index"]): row[name] for table in tables for row in table.to_pylist()}


def test_prompts(run_dir: str | Path, first: int) -> dict[str, list[Any]]:
    """Return the first test prompts: prompt_id, prompt (messages), columns (the others, as JSON) and token_ids."""
    found: dict[str, list[Any]] = pq.read_table(Path(run_dir) / "data" / "test_prompts.parquet")[:first].to_pydict()
    return found


def reference_rewards(run_dir: str | Path) -> np.ndarray:
    """Return the sorted rewards of the training prompts' rollouts, (P, K)."""
    return np.array(column(Path(run_dir) / "calibrated.parquet", "reference_rewards"))


def records(run_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Return the records of the finished units by name: among others their seconds and what they say."""
    return {path.stem: json.loads(path.read_bytes()) for path in Path(run_dir).glob("stages/*.json")}
