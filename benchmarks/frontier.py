"""pass@k by the truth over KL, and over responses drawn, in the demo's world: ``benchmarks/frontier.py FOLDER SEED …``.

For each seed, with the reference, the prompts and the exact pass@k of `pass_at_k.py`: guides on stored rollouts for the
law of Best-of-8, of ordinary RLHF and of Best-of-n (`OFFLINE`), each trained for its KL and as the run saves it, with
no factor on its log-ratio; and on-policy objectives at four weights of the KL and without (`WEIGHTS`), two of which
also tell pass@8 after `SNAPSHOTS` steps. `FEW` are fits of the first law to fewer rollouts, for two KLs. Everything is
fixed here beforehand. ``FOLDER/frontier.svg`` has pass@1, pass@8 and pass@64 over KL with the most that any policy can
have there, and pass@8 over responses drawn; means over seeds, 95 % intervals over seeds and prompts. FOLDER/seed-N.npz
is all that this needs of a seed, which is not trained again while the file is there: those of the page are in
``results/frontier``. About 35 minutes of a core per seed; a training that is done is not repeated after a stop.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from pass_at_k import (
    GROUP,
    GUIDE,
    LENGTH,
    OBJECTIVES,
    PROMPTS,
    SERVED,
    TUNED,
    Rival,
    World,
    best_at_kl,
    cell,
    interval,
    load,
    mean_kl,
    train_offline,
)
from plots import STYLE, panels, save
from run_files import written
from seeds import Trained

from infalign import fit, optimum, sample, score

KS = (1, 8, 64)
BUDGETS, NS = (0.02, 0.05, 0.2, 0.6, 1.5), (2, 3, 5, 12, 32)  # nats; of Best-of-n, which has no budget
WEIGHTS = (0.0, 0.03, 0.1, 0.3, 1.0)
DRAWN_WEIGHTS = {0.0: ":", 0.3: "--"}  # and the lines of their snapshots
SNAPSHOTS = (1, 10, 50, 125, 250, 500)
K, MOST_PROMPTS, FEW = 32, 4000, (16, 64, 256, 1024)  # prompts with K rollouts each
FEW_KLS = {BUDGETS[1]: "--", BUDGETS[-1]: "-"}  # nats, and the lines of the fits to few prompts
LIMITS = {k: np.geomspace(0.02, most, 12) for k, most in ((1, 1.5), (8, 1.5), (64, 0.15))}  # nats; pass@64 is 100 there
COLORS = {
    "aware": "#0072b2",
    "ordinary": "#d55e00",
    "best-of-n": "#009e73",
    "pass@8": "#56b4e9",
    "rloo": "#e69f00",
    "grpo": "#cc79a7",
    "maxrl": "#85898f",
}
OFFLINE = {
    **{f"aware {kl:g}": f"{{transform: optimal, kl_budget: {kl}, solver: qrpo, {GUIDE}}}" for kl in BUDGETS},
    **{f"ordinary {kl:g}": f"{{transform: raw, kl_budget: {kl}, solver: qrpo, {GUIDE}}}" for kl in BUDGETS},
    **{f"best-of-n {n}": f"{{solver: bon-sft, n: {n}, {GUIDE}}}" for n in NS},
}


class Done(NamedTuple):
    """A seed's N policies: mean KL in nats, responses drawn, and the share of right answers to each of P prompts."""

    prompt_ids: Sequence[str]
    names: Sequence[str]
    kl_N: np.ndarray
    drawn_N: np.ndarray
    right_NP: np.ndarray

    def kl(self, name: str) -> float:
        """Return the KL of a policy."""
        return float(self.kl_N[self.names.index(name)])

    def drawn(self, name: str) -> int:
        """Return how many responses were drawn for a policy."""
        return int(self.drawn_N[self.names.index(name)])

    def passed(self, name: str, k: int) -> np.ndarray:
        """Return pass@k of each prompt, %."""
        return 100.0 * (1.0 - (1.0 - self.right_NP[self.names.index(name)].astype(float)) ** k)


def seed_of(folder: Path, seed: int) -> Done:
    """Return a seed from its file, for which what is missing is trained."""
    file = folder / f"seed-{seed}.npz"
    if not file.exists():
        with written(file) as part:
            np.savez_compressed(part, **trained(folder, seed)._asdict())
    with np.load(file) as stored:
        found = Done(**stored)
    return found._replace(prompt_ids=found.prompt_ids.tolist(), names=found.names.tolist())


def trained(folder: Path, seed: int) -> Done:
    """Train what is missing of a seed and return its policies, their shares in half precision."""
    keys = {name: re.sub(r"[ .]", "-", name) for name in OFFLINE}  # as policies are named
    root = train_offline("demo", folder, seed, {keys[name]: policy for name, policy in OFFLINE.items()})
    world, stored = World(root), root / "frontier"
    stored.mkdir(exist_ok=True)

    def laws(name: str, train: Callable[[], list[np.ndarray]]) -> np.ndarray:
        file = stored / f"{name.replace(' ', '-')}.npy"
        if not file.exists():
            with written(file) as part:
                np.save(part, train())
        return np.load(file)

    (base,) = laws("reference", lambda: [world.law(world.reference)])
    points = dict[str, tuple[float, int, np.ndarray]]()

    def add(name: str, law_PA: np.ndarray, drawn: int = 0) -> None:
        right_P = (np.exp(law_PA)[:, :-1] * world.right_PA).sum(axis=1)
        points[name] = mean_kl(law_PA, base), drawn, right_P.astype(np.float16)

    add("reference", base)
    for name, key in keys.items():
        add(name, *laws(name, partial(saved, world, key)), MOST_PROMPTS * K)
    for kl, prompts in product(FEW_KLS, FEW):
        name = f"{prompts} prompts, {kl:g}"
        add(name, *laws(name, partial(fitted, world, prompts, kl, seed)), prompts * K)
    for objective, weight in product(OBJECTIVES, WEIGHTS):
        name, rate = f"{objective} {weight:g}", TUNED[weight > 0.0][objective]
        found = laws(name, partial(on_policy, world, Rival(objective, objective, weight, rate), seed))
        for steps, law_PA in zip(SNAPSHOTS, found, strict=True):
            if steps == SNAPSHOTS[-1] or weight in DRAWN_WEIGHTS:
                add(name if steps == SNAPSHOTS[-1] else f"{name} after {steps}", law_PA, steps * PROMPTS * GROUP)
    for k, nats in chain.from_iterable(product([k], LIMITS[k]) for k in KS):
        add(f"limit {k} {nats:g}", best_at_kl(base, world.right_PA, k, nats))
    return Done(world.asked, [*points], *map(np.array, zip(*points.values(), strict=True)))


def saved(world: World, name: str) -> list[np.ndarray]:
    """Return the law of a policy of the run."""
    return [world.law(load(world.models / name).model)]


def fitted(world: World, prompts: int, kl: float, seed: int) -> list[np.ndarray]:
    """Return the law of a guide for Best-of-8 from K rollouts of the first prompts, with what `fit` finds itself."""
    reference = str(world.models / "reference")
    rollouts = sample(reference, world.train[:prompts], K, max_new_tokens=LENGTH, seed=seed)
    law = optimum(score("infalign.sums:check", rollouts), f"best-of-{SERVED}", kl=kl)
    return [world.law(fit(reference, rollouts, law, guide={}, seed=seed).model)]


def on_policy(world: World, rival: Rival, seed: int) -> list[np.ndarray]:
    """Return the laws of an on-policy training after `SNAPSHOTS` steps."""
    trained = enumerate(world.train_rival(rival, seed), 1)
    return [world.law(model) for steps, (model, _) in trained if steps in SNAPSHOTS]


def line(axes: Axes, seeds: Sequence[Done], names: Sequence[str], k: int, drawn: bool = False, **look: Any) -> None:
    """Draw pass@k of points over KL or responses drawn, in the order of names, with the interval of each."""
    found = [interval([Trained(seed.prompt_ids, seed.passed(name, k)) for seed in seeds]) for name in names]
    at = [np.mean([seed.drawn(name) if drawn else seed.kl(name) for seed in seeds]) for name in names]
    ends = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
    axes.errorbar(at, [one.mean for one in found], yerr=ends, markersize=4, elinewidth=0.8, **look)


def draw(seeds: Sequence[Done], path: Path) -> None:
    """Draw pass@k over KL, a panel for each k, and pass@8 over responses drawn."""
    figure, grid = panels(2, 2, (9.0, 7.0))
    for k, axes in zip(KS, grid.flat, strict=False):
        line(axes, seeds, [f"limit {k} {nats:g}" for nats in LIMITS[k]], k, color="black", label="limit", lw=0.8)
        for kind in ("aware", "ordinary", "best-of-n"):
            names = [name for name in OFFLINE if name.startswith(f"{kind} ")]
            line(axes, seeds, names, k, color=COLORS[kind], label=f"{kind}, stored", marker="o")
        for kind in OBJECTIVES:
            names = [f"{kind} {weight:g}" for weight in sorted(WEIGHTS, reverse=True)]
            line(axes, seeds, names, k, color=COLORS[kind], label=f"{kind}, on-policy", marker="s", ls=":")
        axes.set(xscale="log", xlim=(0.015, 6.0), xlabel="KL, nats", ylabel=f"pass@{k}, %")
    axes = grid[1, 1]
    for kl, look in FEW_KLS.items():
        names = [*(f"{prompts} prompts, {kl:g}" for prompts in FEW), f"aware {kl:g}"]
        line(axes, seeds, names, SERVED, drawn=True, color=COLORS["aware"], marker="o", ls=look)
    for kind, (weight, look) in product(OBJECTIVES, DRAWN_WEIGHTS.items()):
        names = [f"{kind} {weight:g} after {steps}" for steps in SNAPSHOTS[:-1]] + [f"{kind} {weight:g}"]
        line(axes, seeds, names, SERVED, drawn=True, color=COLORS[kind], marker="s", ls=look)
    axes.set(xscale="log", xlabel="responses drawn", ylabel=f"pass@{SERVED}, %")
    few, weights = (", ".join(f"{one:g} ({look})" for one, look in of.items()) for of in (FEW_KLS, DRAWN_WEIGHTS))
    axes.set_title(f"stored, at nats: {few}\non-policy, weight of the KL: {weights}", fontsize="small")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    for one in grid.flat:
        one.set_ylim(top=100.3)
    save(figure, path)


def print_table(seeds: Sequence[Done]) -> None:
    """Print KL, responses drawn and pass@k of each point."""
    print(f"| policy | KL, nats | responses drawn | {' | '.join(f'pass@{k}' for k in KS)} |\n|{'---|' * (3 + len(KS))}")
    for name in seeds[0].names:
        kl, drawn = np.mean([seed.kl(name) for seed in seeds]), seeds[0].drawn(name)
        cells = [cell([Trained(seed.prompt_ids, seed.passed(name, k)) for seed in seeds]) for k in KS]
        print(f"| {name} | {kl:.3f} | {drawn:,} | {' | '.join(cells)} |")


def ahead(seed: Done, name: str, k: int) -> Trained | None:
    """Return by how much `aware` is ahead at a policy's KL, between its own two budgets; None outside of all."""
    kls, kl = np.log([seed.kl(f"aware {nats:g}") for nats in BUDGETS]), np.log(max(seed.kl(name), 1e-9))
    place = int(np.searchsorted(kls, kl))
    if not 0 < place < len(kls):
        return None
    share = (kl - kls[place - 1]) / (kls[place] - kls[place - 1])
    lower, upper = (seed.passed(f"aware {nats:g}", k) for nats in BUDGETS[place - 1 : place + 1])
    return Trained(seed.prompt_ids, (1.0 - share) * lower + share * upper - seed.passed(name, k))


def print_leads(seeds: Sequence[Done]) -> None:
    """Print by how much `aware` is ahead of every other policy at its KL, where it has one in every seed."""
    print(f"\n| aware ahead of | at nats | {' | '.join(f'pass@{k}' for k in KS)} |\n|{'---|' * (2 + len(KS))}")
    names = [*(name for name in OFFLINE if not name.startswith("aware"))]
    for name in names + [f"{kind} {weight:g}" for kind in OBJECTIVES for weight in WEIGHTS]:
        found = {k: [one for seed in seeds if (one := ahead(seed, name, k)) is not None] for k in KS}
        if all(len(leads) == len(seeds) for leads in found.values()):
            cells = [f"{one.mean:+.1f} ({one.low:+.1f} to {one.high:+.1f})" for one in map(interval, found.values())]
            kl = np.mean([seed.kl(name) for seed in seeds])
            print(f"| {name} | {kl:.3f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    seeds = [seed_of(Path(folder), int(number)) for number in numbers]
    print_table(seeds)
    print_leads(seeds)
    with rc_context(STYLE):
        draw(seeds, Path(folder) / "frontier.svg")
