"""How good must a reward be? The recipe `preferences` with reward models of five accuracies.

``python benchmarks/good_rewards.py FOLDER [SEED …] [key=value …]``, by default seeds 0, 1 and 2. A seed's data,
reference, rollouts and judge are made once; each of `REWARDS` scores the same rollouts, trains `aware` (exp:10) and
`raw` (ordinary RLHF) from itself, and selects the best of four. Printed per reward model: Spearman's correlation within
prompts with the truth, which only this world has, and with the judge, which a user has too; by how many points `aware`
is ahead of `raw` at one KL by the reward, the judge and the truth, and of the reference by the truth; and what would be
left by the truth of the lead by the reward if the reward were the truth with independent noise (`left_by_truth`).
``FOLDER/good-rewards.svg`` shows the leads over both correlations. Means over seeds, 95 % intervals over seeds and
prompts. What is done is not repeated, so the seeds that are done can be printed at any time. 35 minutes of an idle core
per seed.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from forms import base_run
from leads import leads
from matplotlib import rc_context
from plots import COLORS, INK, LOOKS, STYLE, panels, save
from scipy.special import ndtr, ndtri
from seeds import Seed, Trained, over_seeds, read_words

from infalign import law_at_kl, parse_procedure

RECIPE = "preferences"
PAIRS = 16_000  # that a reward model can see; the judge has others
FEWER = {"300 pairs": 300, "1,200 pairs": 1_200, "4,800 pairs": 4_800, "16,000 pairs": PAIRS}
REWARDS: dict[str, list[str]] = {
    **{name: [f"reward.fit.epochs={pairs / PAIRS}"] for name, pairs in FEWER.items()},
    "16,000 pairs, small": ["reward.scratch={hidden: 64, layers: 1, context: 96}", "reward.fit.epochs=1"],
}
# Three times the recipe's rows, for more pairs; as many steps for the policy. `aware` and `raw` are its policies.
COMMON = [
    "data.sources=[{world: 24000}]",
    "data.judge_fraction=0.25",
    "policy.fit.epochs=0.67",
    "policies.aware-student=null",
    "policies.identity=null",
    "evaluate.prompts=200",
]
JUDGES = {"reward": "the reward", "judge": "the judge", "gold": "the truth"}
OURS, ORDINARY = "aware", "raw"  # policies
BY_REWARD = "ahead by the reward"
KL, CORRELATIONS = 0.6, np.linspace(0.0, 0.99, 34)


def seed_of(folder: Path, number: str, reward: str, settings: Sequence[str]) -> Seed:
    """Run what is missing of a seed with a reward model."""
    of_seed = folder / f"seed-{number}"
    common = [*COMMON, f"seed={number}", *settings]
    root, copied = of_seed / reward.replace(" ", "-").replace(",", ""), of_seed / "copied"
    if not root.exists():
        base = base_run(RECIPE, of_seed, [*common, *next(iter(REWARDS.values()))])
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(base, copied).rename(root)
    changes = [f"run_dir={root}", *common, *REWARDS[reward]]
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "infalign", "run", RECIPE, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Seed.of_run(root)


def left_by_truth(spearman: float, procedure: str, kl: float) -> float:
    """Return which part of exp:10's lead over the identity by the reward is left by the truth, if errors are noise.

    Reward and truth are normal scores with the correlation ρ = 2·sin(π/6·Spearman's), and a policy knows the reward's
    ranks only: what is served has the reward s and the truth ρs + √(1 − ρ²)·noise, so that ours beats s₀ of the
    reference with probability Φ(ρ(s − s₀)/√(2 − 2ρ²)).
    """
    served, rho = parse_procedure(procedure), 2.0 * np.sin(np.pi / 6.0 * spearman)

    def win_rates(transform: str) -> np.ndarray:
        law = law_at_kl(transform, kl=kl)
        score = np.where(law.u < 0.5, ndtri(law.u), -ndtri(law.v))
        mass = law.weight * served.density(law.cdf) * law.density
        theirs = law.weight * served.density(law.u)
        wins = ndtr(rho * (score[:, None] - score) / np.sqrt(2.0 - 2.0 * rho**2))
        return np.array([mass @ wins @ theirs, law.win_rate(served)])

    by_truth, by_reward = win_rates("exp:10") - win_rates("identity")
    return float(by_truth / by_reward)


def of_seed(seed: Seed) -> dict[str, Trained]:
    """Return what is measured of a seed: agreements, leads by each judge, and the gain over the reference."""
    results: Mapping[str, Any] = json.loads((seed.root / "results.json").read_bytes())
    found = {
        f"agreement with {JUDGES[name]}": Trained((), np.array([results["base"]["agreement"][name]["mean"]]))
        for name in ("gold", "judge")
    }
    ahead = dict(leads(seed))
    ours, ordinary = (seed.recipe.policies[name].method for name in (OURS, ORDINARY))
    for name, said in JUDGES.items():
        if (lead := ahead.get(f"{ours} over {ordinary}, {name}")) is not None:
            found[f"ahead by {said}"] = lead
    procedure = seed.recipe.procedure
    wins = seed.evaluated.wins(OURS, [procedure])["gold"][procedure.name]
    found["over the reference by the truth"] = seed.trained(100.0 * (wins - 0.5))
    return found


def shown(found: Sequence[Trained], seeds: int, digits: int) -> str:
    """Return the mean over seeds with its interval, where all have it."""
    if len(found) < seeds:
        return f"comparable in {len(found)} of {seeds} seeds"
    if seeds == 1:
        return f"{found[0].mean:.{digits}f}"
    mean = over_seeds(found)
    return f"{mean.mean:.{digits}f} ({mean.low:.{digits}f} to {mean.high:.{digits}f})"


def draw(measured: Mapping[str, Sequence[Mapping[str, Trained]]], procedure: str, path: Path) -> None:
    """Draw the leads over the agreement with the truth and with the judge; dotted: by the truth, were errors noise."""
    with rc_context(STYLE):
        figure, row = panels(1, 2, (8.4, 3.8))
        for axes, by in zip(row, ("gold", "judge"), strict=True):
            for place, said in enumerate(JUDGES.values()):
                known = [one for seeds in measured.values() for one in seeds if f"ahead by {said}" in one]
                agreed, ahead = (
                    [one[column].mean for one in known]
                    for column in (f"agreement with {JUDGES[by]}", f"ahead by {said}")
                )
                axes.plot(agreed, ahead, LOOKS[place][1], color=COLORS[place], label=f"by {said}")
            axes.axhline(0.0, color=INK, linewidth=0.6)
            axes.set(
                xlabel=f"agreement of the reward with {JUDGES[by]}", ylabel=f"aware over ordinary, {procedure}, points"
            )
        most = np.mean([one[BY_REWARD].mean for seeds in measured.values() for one in seeds if BY_REWARD in one])
        curve = [most * left_by_truth(one, procedure, KL) for one in CORRELATIONS]
        row[0].plot(CORRELATIONS, curve, ":", color=COLORS[2], label="by the truth, if errors were noise")
        figure.legend(*row[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        save(figure, path)


def main() -> None:
    """Run what is missing, print the table and draw the figure."""
    folder, *words = sys.argv[1:]
    numbers, settings = read_words(words)
    measured = dict[str, list[dict[str, Trained]]]()
    for number in numbers:
        for reward in REWARDS:
            seed = seed_of(Path(folder), number, reward, settings)
            measured.setdefault(reward, []).append(of_seed(seed))
    procedure = seed.recipe.procedure.name
    agreements = [f"agreement with {JUDGES[name]}" for name in ("gold", "judge")]
    columns = ["over the reference by the truth", *agreements, *(f"ahead by {said}" for said in JUDGES.values())]
    print(f"| reward model | {' | '.join(columns)} | the same, if errors were noise |\n{'|---' * (2 + len(columns))}|")
    for reward, seeds in measured.items():
        cells = [
            shown([one[column] for one in seeds if column in one], len(seeds), 2 if column in agreements else 1)
            for column in columns
        ]
        noise = [
            one[BY_REWARD].mean * left_by_truth(one[agreements[0]].mean, procedure, KL)
            for one in seeds
            if BY_REWARD in one
        ]
        print(f"| {reward} | {' | '.join(cells)} | {np.mean(noise):.1f} |")
    draw(measured, procedure, Path(folder) / "good-rewards.svg")


if __name__ == "__main__":
    main()
