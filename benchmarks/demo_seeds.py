"""Whether the aware policy wins, and by how much: ``python benchmarks/demo_seeds.py FOLDER [SEED …] [key=value …]``.

Runs the demo, with settings if some are given, with each seed, by default ten, in a directory of its own in which
finished stages are not done again. Prints shares and gains in points of the served win rate over the baselines at the
same KL, by each judge: a row a seed, then the mean over seeds with its 95 % interval (Student's t) and the number of
seeds that are ahead. The share is the part of the gap between theory's identity and theory's optimum that a policy
reaches, each at the KL it spends. Some eight minutes a seed.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from infalign.evaluation.matched import LEAST_KL
from infalign.method.procedures import parse_procedure
from infalign.method.transforms import Identity
from infalign.runs.results import read_results
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal

RECIPE = "demo"
AWARE, BASELINES = ("aware", "aware-student"), ("raw", "identity")


def share(results: dict[str, Any], policy: str) -> float:
    """Return the share of theory's gap that a policy reaches; NaN for a policy that has not moved."""
    found, procedure = results["policies"][policy], parse_procedure(results["procedure"])
    kl = found["kl"]["mean"]
    if kl < LEAST_KL:
        return np.nan
    identity, optimum = law_at_kl(Identity(), kl=kl).win_rate(procedure), optimal(procedure, kl=kl).win_rate
    return float((found["win_rates"]["reward"][procedure.name]["mean"] - identity) / (optimum - identity))


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of one seed by the heading of their column."""
    methods = {name: policy["method"] for name, policy in results["policies"].items()}
    found = {f"share {name}": share(results, name) for name in AWARE}
    for name in AWARE:
        for judge, row in results["matched"]["judges"].items():
            rates = row["win_rates"]
            wins = {name: rates.get(method, {"mean": np.nan})["mean"] for name, method in methods.items()}
            found |= {f"{name} − {other}, {judge}": 100 * (wins[name] - wins[other]) for other in BASELINES}
    return found


def main() -> int:
    """Run the seeds and print the table; return 1 if a run fails."""
    folder, *words = sys.argv[1:]
    settings, seeds = [word for word in words if "=" in word], [word for word in words if "=" not in word]
    found = []
    for seed in seeds or map(str, range(10)):
        run_dir = Path(folder) / f"seed-{seed}"
        command = [sys.executable, "-m", "infalign", "run", RECIPE]
        changes = [word for change in (f"run_dir={run_dir}", f"seed={seed}", *settings) for word in ("--set", change)]
        if subprocess.run([*command, *changes], stdout=subprocess.DEVNULL, check=False).returncode:
            return 1
        found.append(numbers(read_results(run_dir)))
        print(seed, {name: round(value, 2) for name, value in found[-1].items()}, flush=True)
    for name in found[0]:
        values = np.array([one[name] for one in found])
        half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
        each = " ".join(f"{value:+6.2f}" for value in values)
        print(f"{name:34} {values.mean():+.2f} ± {half:.2f}, {(values > 0).sum()} of {len(values)} above 0:  {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
