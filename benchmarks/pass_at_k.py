"""pass@k by the truth, of each method at one KL: ``python benchmarks/pass_at_k.py FOLDER [SEED …] [key=value …]``.

Runs the recipe `demo` with each seed, by default 0, 1 and 2, each in a directory in which finished stages are not done
again, with one policy more: the exact optimum of the stored rewards. Prints pass@1 to pass@64 of the reference and of
each method at the least KL that one of them spends: its gain over the reference is taken to grow with √KL between there
and what it spends, and that shift is in the interval. Then by how many points of pass@8 exp:10 is ahead of the others,
by seed. Intervals: 95 %, over seeds and prompts. Four minutes a seed on two cores.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from seeds import Seed, Trained, estimated, read_words

from infalign.evaluation.pass_at_k import Metric
from infalign.method.calibration import Array
from infalign.steps.status import recorded_recipe

KS = [2**j for j in range(7)]
SERVED, OURS = 8, "aware"
MORE = {
    "optimal": "{transform: optimal, kl_budget: 0.05, solver: qrpo, guide: {trunk: reference}, "
    "fit: {epochs: 1, batch_size: 512, learning_rate: 2.0e-3}}",
}


def at_one_kl(seed: Seed, k: int) -> dict[str, tuple[Array, float]]:
    """Return pass@k of each test prompt, and how far its mean was shifted, of the reference and of each policy."""
    metric, names = Metric.parse(f"pass@{k}"), list(seed.recipe.policies)
    kls = {name: float(seed.kl(name).mean()) for name in names}
    base = metric.of_prompts(seed.evaluated.column("reference", "reward"))
    found = {"reference": (base, 0.0)}
    for name in names:
        gain = metric.of_prompts(seed.evaluated.column(name, "reward")) - base
        less = (min(kls.values()) / kls[name]) ** 0.5
        found[name] = base + less * gain, float((less - 1.0) * gain.mean())
    return found


def main() -> int:
    """Run the seeds and print the tables; return 1 if a run fails."""
    folder, *words = sys.argv[1:]
    numbers, settings = read_words(words)
    rates, ahead, spent = (defaultdict[str, list[Trained]](list) for _ in range(3))
    for number in numbers:
        root = Path(folder) / f"seed-{number}"
        more = [f"policies.{name}={policy}" for name, policy in MORE.items()]
        changes = [f"run_dir={root}", f"seed={number}", *more, *settings]
        command = [sys.executable, "-m", "infalign", "run", "demo"]
        command += [word for change in changes for word in ("--set", change)]
        if subprocess.run(command, check=False).returncode:
            return 1
        seed = Seed(recorded_recipe(root))
        for k in KS:
            for name, (values, shift) in at_one_kl(seed, k).items():
                rates[f"{name}, {k}"].append(seed.trained(100 * values, 100 * shift))
        found = at_one_kl(seed, SERVED)
        ours, moved = found.pop(OURS)
        for name, (values, shift) in found.items():
            ahead[name].append(seed.trained(100 * (ours - values), 100 * moved, -100 * shift))
        for name in seed.recipe.policies:
            spent[name].append(seed.trained(seed.kl(name)))
    print(f"\n| at one KL | KL spent, nats | {' | '.join(f'pass@{k}' for k in KS)} |\n{'|---' * (2 + len(KS))}|")
    for name in found | {OURS: None}:
        kl = f"{np.mean([one.mean for one in spent[name]]):.3f}" if name in spent else "0"
        print(f"| {name} | {kl} | {' | '.join(said(rates[f'{name}, {k}']) for k in KS)} |")
    print(f"\n| pass@{SERVED} of {OURS} over | {' | '.join(f'seed {n}' for n in numbers)} | mean |")
    print("|---" * (2 + len(numbers)) + "|")
    for name, seeds in ahead.items():
        print(f"| {name} | {' | '.join(f'{one.mean:+.1f}' for one in seeds)} | {said(seeds)} |")
    return 0


def said(seeds: list[Trained]) -> str:
    """Return a mean with its interval."""
    found = estimated(seeds)
    return f"{found['mean']:.1f} ({found['low']:.1f} to {found['high']:.1f})"


if __name__ == "__main__":
    sys.exit(main())
