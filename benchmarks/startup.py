"""Time of ``infalign --help`` beside starting Python, promised under 0.5 s: ``python benchmarks/startup.py``."""

import statistics
import subprocess
import sys
import time

COMMANDS = {"python -c pass": ["-c", "pass"], "infalign --help": ["-m", "infalign", "--help"]}


def seconds(words: list[str]) -> float:
    """Return the wall time of one run."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> int:
    """Print minimum, median and maximum of ten alternating runs; return 1 if the help's median misses the promise."""
    runs = [{name: seconds(words) for name, words in COMMANDS.items()} for _ in range(11)][1:]  # the first one warms up
    for name in COMMANDS:
        times = sorted(run[name] for run in runs)
        print(f"{name:<18} min {times[0]:.3f} s   median {statistics.median(times):.3f} s   max {times[-1]:.3f} s")
    return int(statistics.median(run["infalign --help"] for run in runs) >= 0.5)


if __name__ == "__main__":
    sys.exit(main())
