"""Print the time and memory of pass@k with intervals in large tables of rewards, beside evalplus' estimator.

    python benchmarks/tables.py

The tables: 100,000 rows of CSV and 10 million of Parquet. Ours is the command as a user runs it, with its start,
reading, intervals and paired differences; evalplus' `estimate_pass_at_k` gives points without intervals, of counts that
are there already. In seconds of CPU. Exits with 1 above 2 s for the CSV and 60 s or 4 GB for the Parquet, or where an
estimate differs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

KS = (1, 2, 4, 8, 16, 32, 64)
SIZES = {"csv": (2, 500, 100, 2.0), "parquet": (100, 1000, 100, 60.0)}  # models, tasks, samples, seconds


def published(samples: int, correct: np.ndarray, k: int) -> np.ndarray:
    """Return pass@k of each task as evalplus computes it, after Chen et al. (2021)."""
    wrong = [samples - c for c in correct]
    return np.array([1.0 if n < k else 1.0 - np.prod(1.0 - k / np.arange(n + 1, samples + 1)) for n in wrong])


def table(path: Path, models: int, tasks: int, samples: int) -> np.ndarray:
    """Write rewards in the format of the ending; return how many are right, models × tasks."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((models, tasks, samples)) < rng.beta(0.4, 1.6, (models, tasks, 1))).astype(np.int8)
    columns = {"reward": pa.array(rewards.ravel())}
    for axis, name in enumerate(("model", "prompt_id")):
        places = np.broadcast_to(np.ogrid[:models, :tasks, :samples][axis], rewards.shape).ravel()
        texts = pa.array([f"{name}-{i}" for i in range(rewards.shape[axis])])
        columns[name] = pa.DictionaryArray.from_arrays(places.astype(np.int32), texts)
    if path.suffix == ".csv":
        pa.csv.write_csv(pa.table({name: column.cast(pa.string()) for name, column in columns.items()}), path)
    else:
        pa.parquet.write_table(pa.table(columns), path)
    return rewards.sum(axis=2, dtype=int)


def main() -> int:
    """Print a row for each table; return 1 where a promise is missed."""
    print("table           rows  ours, s      rows/s     GB  evalplus', s  ratio")
    kept = True
    for ending, (models, tasks, samples, limit) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            correct = table(path := Path(folder) / f"table.{ending}", models, tasks, samples)
            command = [
                sys.executable,
                "-m",
                "infalign",
                "pass-at-k",
                path,
                "--json",
                *(f"--metric=pass@{k}" for k in KS),
            ]
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            found = json.loads(process.stdout.read())["metrics"]
            _, status, used = os.wait4(process.pid, 0)
        start = time.process_time()
        expected = {(f"model-{m}", k): np.mean(published(samples, correct[m], k)) for m in range(models) for k in KS}
        ours, theirs = used.ru_utime + used.ru_stime, time.process_time() - start
        same = all(abs(expected[one["model"], one["k"]] - one["mean"]) < 1e-9 for one in found)
        rows, size = correct.size * samples, used.ru_maxrss * 1024 / 1e9
        kept &= status == 0 and len(found) == len(expected) and same and ours < limit and size < 4.0
        print(f"{ending:8} {rows:11,} {ours:8.2f} {rows / ours:11,.0f} {size:6.2f} {theirs:12.2f} {ours / theirs:6.2f}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
