"""By how much a recipe's methods win: ``python benchmarks/leads.py RECIPE FOLDER [SEED …] [key=value …]``.

Runs a recipe with each seed, by default 0, 1 and 2, in a directory of its own in which finished stages are not done
again. Prints by how many points of the served win rate each method is ahead of those after it at one KL, by each judge,
and the share of theory's gap that each policy reaches: each seed's, then the mean with its 95 % interval over seeds and
prompts (`seeds.over_seeds`) and how many seeds are above 0. The share is the part of the gap between
theory's identity and theory's optimum, each at the KL that the policy spends. ``FOLDER/seeds.svg`` shows each policy of
each seed, and what theory gives for as much as the policies know of ranks. `preferences` takes eight minutes a seed.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from method_policies import MIN_KL
from plots import LOOKS, QUIET, STYLE, panels, save
from rank_correlation import fitted_rank_correlations, law_at_rank_correlation, supported_correlation
from seeds import AtOneKL, Seed, Trained, over_seeds, read_words, share_of_gap

from infalign import ConfigError


def leads(seed: Seed) -> Iterator[tuple[str, Trained]]:
    """Yield by how many points each method is ahead of those after it at one KL, by each judge."""
    evaluated, aim, policies = seed.evaluated, seed.recipe.procedure, seed.recipe.policies
    kls, methods = {name: evaluated.kl(name) for name in policies}, defaultdict[str, list[str]](list)
    for name, policy in policies.items():
        methods[policy.method].append(name)
    at = AtOneKL.of(methods, kls, lambda name, nats: evaluated.law_at(policies[name], nats))
    wins = {name: evaluated.wins(name, [aim]) for name in policies}
    for judge in evaluated.sources:
        by_policy = {name: by_judge[judge][aim.name] for name, by_judge in wins.items()}
        for (method, ours), (other, theirs) in combinations(at.matched(by_policy, aim).items(), 2):
            ahead, shifts = ours.values - theirs.values, (ours.shift, -theirs.shift)
            yield f"{method} over {other}, {judge}", seed.trained(100 * ahead, *(100 * shift for shift in shifts))


def knowledge(seed: Seed) -> dict[str, float]:
    """Return for each policy with a law ρ, how well it knows ranks: fitted to its KL and its win rate by the reward.

    A policy whose KL no law reaches has none.
    """
    evaluated, aim, found = seed.evaluated, seed.recipe.procedure, dict[str, float]()
    for name, policy in seed.recipe.policies.items():
        wins = evaluated.wins(name, [aim])["reward"][aim.name]
        values_PX = np.stack([evaluated.kl(name), wins], axis=1)
        kl, win_rate = values_PX.mean(axis=0).tolist()
        if kl >= MIN_KL and (law := evaluated.law_at(policy, kl)) is not None:
            with suppress(ConfigError):
                found[name] = float(fitted_rank_correlations(law.transform, aim, [kl], [win_rate])[0])
    return found


def draw(runs: Sequence[tuple[Seed, dict[str, Any]]], path: Path) -> None:
    """Draw each seed's win rates against KL by each judge; lines: theory with the mean of its seeds' knowledge."""
    seed, first = runs[0]
    aim, policies, knows = seed.recipe.procedure, seed.recipe.policies, [knowledge(seed) for seed, _ in runs]
    with rc_context(STYLE):
        figure, row = panels(1, len(first["judges"]), (1.0 + 3.6 * len(first["judges"]), 3.8))
        for axes, judge in zip(np.atleast_1d(row), first["judges"], strict=True):
            for name, (color, marker) in zip(policies, cycle(LOOKS), strict=False):
                found = [results["policies"][name] for _, results in runs]
                for number, policy in enumerate(found):
                    kl, wins = policy["kl"], {end: 100 * at for end, at in policy["win_rates"][judge][aim.name].items()}
                    axes.plot([kl["low"], kl["high"]], [wins["mean"]] * 2, color=color, linewidth=0.8)
                    axes.plot([kl["mean"]] * 2, [wins["low"], wins["high"]], color=color, linewidth=0.8)
                    label = name if number == 0 and judge == "reward" else None
                    axes.plot(kl["mean"], wins["mean"], marker, color=color, label=label)
                known = [of_seed[name] for of_seed in knows if name in of_seed]
                most = max(policy["kl"]["mean"] for policy in found)
                wanted = policies[name].aim(aim)
                law = None if wanted is None else wanted.rank_law(max(most, MIN_KL))
                if judge == "reward" and known and law is not None:
                    rho, kls = (
                        supported_correlation(float(np.mean(known))),
                        (most * np.linspace(0.1, 1.0, 12) ** 2).tolist(),
                    )
                    reached = [
                        100 * law_at_rank_correlation(law.transform, rho=rho, kl=kl).law.win_rate(aim) for kl in kls
                    ]
                    said = f"{name}, ρ = {rho:.2f}"
                    axes.plot([0, *kls], [50, *reached], linestyle=(0, (1, 1)), color=color, label=said)
            axes.plot(0, 50, "o", color=QUIET)
            axes.set(xlabel="KL to the reference, nats a response", ylabel=f"{aim.name} by the {judge}, %")
        figure.legend(loc="outside upper left", ncols=2)
        save(figure, path)


def main() -> int:
    """Run the seeds and print the table; return 1 if a run fails."""
    name, folder, *words = sys.argv[1:]
    seeds, settings = read_words(words)
    found, runs = defaultdict[str, list[Trained]](list), list[tuple[Seed, dict[str, Any]]]()
    for number in seeds:
        root = Path(folder) / f"seed-{number}"
        changes = [word for change in (f"run_dir={root}", f"seed={number}", *settings) for word in ("--set", change)]
        command = [sys.executable, "-m", "infalign", "run", name, *changes]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            return 1
        seed = Seed.of_run(root)
        results = json.loads((root / "results.json").read_bytes())
        runs.append((seed, results))
        for row, trained in leads(seed):
            found[row].append(trained)
        for policy in seed.recipe.policies:
            if (share := share_of_gap(seed, policy)) is not None:
                found[f"share of theory's gap, {policy}"].append(Trained((), np.array([share.mean()])))
    print(f"| ahead, points | {' | '.join(f'seed {number}' for number in seeds)} | mean (95 %) | above 0 |")
    print("|---" * (3 + len(seeds)) + "|")
    for row, trained in found.items():
        means = [one.mean for one in trained]
        whole = over_seeds(trained) if len(trained) == len(seeds) > 1 else None
        said = f"{whole.mean:.2f} ({whole.low:.2f} to {whole.high:.2f})" if whole else ""
        each = " | ".join(f"{mean:.2f}" for mean in means)
        print(f"| {row} | {each} | {said} | {sum(mean > 0 for mean in means)} of {len(means)} |")
    draw(runs, Path(folder) / "seeds.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
