"""A report of garak: its test probe, a generator of lorem ipsum, and two detectors, one of them random."""

import json
import os
import random
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
REPORT = HERE / "lipsum.report.jsonl"
DROPPED = {"plugin_cache", "digest"}  # entries that describe garak, not the run

# Write the report, and numbers.json with what garak counts for each detector.
with tempfile.TemporaryDirectory() as folder:
    os.environ |= {f"XDG_{kind}_HOME": folder for kind in ("DATA", "CACHE", "CONFIG")} | {"HF_HUB_OFFLINE": "1"}
    from garak import cli  # reads the environment

    random.seed(4)
    cli.main(
        [
            *("--target_type", "test.Lipsum", "--probes", "test.Test", "--detectors", "always.Random,always.Fail"),
            *("--generations", "3", "--eval_threshold", "0.7", "--report_prefix", f"{folder}/lipsum"),
        ]
    )
    lines = Path(folder, "lipsum.report.jsonl").read_text(encoding="utf-8").splitlines()
rows = [row for row in map(json.loads, lines) if row["entry_type"] not in DROPPED]
for row in rows:
    if row["entry_type"] == "attempt":
        row["conversations"] = row["reverse_translation_outputs"] = []  # the same texts again
    elif row["entry_type"] == "start_run setup":
        for key in [key for key, value in row.items() if folder in str(value) or key.startswith("_config")]:
            del row[key]
REPORT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
numbers = {row["detector"]: row for row in rows if row["entry_type"] == "eval"}
(HERE / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
