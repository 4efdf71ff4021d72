"""Time and memory of the demo: ``python benchmarks/demo.py RUN_DIR``, with a directory that does not exist yet.

Promised: at most 4 minutes on two cores and at most 6 GiB, summed over all processes (shared pages counted once each).
"""

import sys
import time
from pathlib import Path

import psutil

RECIPE = "demo"
MINUTES, GIB = 4.0, 6.0


def tree_memory(process: psutil.Process) -> int:
    """Return the proportional memory of a process and its children, in bytes."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def main() -> int:
    """Run the demo, print what it took, and return 1 if that is more than promised."""
    (folder,) = sys.argv[1:] or ["runs/demo-benchmark"]
    if Path(folder).exists():
        print(f"{folder} exists; name a new directory, or the finished stages would not be timed")
        return 2
    started = time.monotonic()
    run = psutil.Popen([sys.executable, "-m", "infalign", "run", RECIPE, "--set", f"run_dir={folder}"])
    peak = 0
    while run.poll() is None:
        peak = max(peak, tree_memory(run))
        time.sleep(0.5)
    minutes, gib = (time.monotonic() - started) / 60, peak / 2**30
    print(f"\ndemo: exit code {run.returncode}, {minutes:.2f} minutes (promised {MINUTES:g}), "
          f"peak memory {gib:.2f} GiB (promised {GIB:g}), sampled every half second")  # fmt: skip
    return int(run.returncode != 0 or minutes > MINUTES or gib > GIB)


if __name__ == "__main__":
    sys.exit(main())
