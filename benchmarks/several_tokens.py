"""pass@k of a real model whose responses have several tokens, at one KL, from samples.

``python benchmarks/several_tokens.py FOLDER offline|online SEED SEED … [key=value …]``

The task is the one that `candidates.py` chooses, whose responses are in ``FOLDER/candidates``. For each seed: `TRAIN`
prompts with `K` rollouts each, and `HELD_OUT` others with `SAMPLES` samples of each policy. ``offline``: a guide that
reads the reference's states and a LoRA adapter of the last ten layers, each for Best-of-8 (`aware`) and as ordinary
RLHF, and such an adapter by `snips`, at `NATS` by the strength that their training chooses. ``online``: adapters
trained by `fit_online` in TRL's loop on as many responses, to `ONLINE` prompts, for each of `METHODS`: with our law, as
RLOO, and with the advantages of GRPO and of MaxRL; each is measured as trained and with ΔW times the factor that should
bring it to `NATS`. Pairs are compared per prompt at the KL that both reach, where they are comparable
(`seeds.AtOneKL`). Further words are settings, such as compute.processes=1. 95 % intervals over seeds and prompts. What
is done is not repeated. Three and a half hours of an idle core per seed with compute.dtype=bfloat16, where the CPU
has it; on-policy ten hours more, by estimate: not run.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from candidates import LONGEST, REFERENCE, chosen, measured, rows_of
from candidates import check as is_right
from letters import LORA, RECIPE
from methods import LEARNING_RATE_FACTOR
from own_tasks import infalign
from pass_at_k import SERVED, cell, interval
from run_files import Evaluated, load_recipe, reference_rewards
from seeds import AtOneKL, Trained, read_words

from infalign import BestOfN, Policy, advantages, fit_online, optimum, tilted

TRAIN, HELD_OUT, K, SAMPLES, NATS = 1500, 400, 8, 16, 0.2
KS = (1, 2, 4, 8, 16)
ONLINE, GENERATIONS, RATE = 256, 8, 2.0e-4  # prompts, responses to each, and the rate of an offline adapter
MOST = 8.0  # times ΔW, at most
OFFLINE = {  # adapters of the last ten layers train on stored states
    f"lora-{name}": LORA.format(transform, "{rank: 16, layers: 10}")
    for name, transform in (("aware", "optimal"), ("ordinary", "raw"))
} | {"lora-snips": "{solver: snips, kl_budget: 0.2, fit: {lora: {rank: 16, layers: 10}, batch_size: 64, epochs: 1}}"}
METHODS: dict[str, str | None] = {"rloo-aware": None, "rloo": None, "grpo": "grpo", "maxrl": "maxrl"}  # advantages
AWARE = "rloo-aware"
LEADS = {  # each over the others
    "offline": [
        ("aware", ["ordinary"]),
        ("lora-aware", ["lora-ordinary", "aware"]),
        ("lora-snips", ["lora-ordinary", "lora-aware"]),
    ],
    "online": [(AWARE, [name for name in METHODS if name != AWARE])],
}


class Seed(NamedTuple):
    """A seed's prompts, and of each policy, by method, its KL (P,) in nats and its right samples, (P, M)."""

    prompt_ids: Sequence[str]
    methods: Mapping[str, Sequence[str]]
    kls: Mapping[str, np.ndarray]
    right: Mapping[str, np.ndarray]

    def passed(self, k: int) -> dict[str, np.ndarray]:
        """Return pass@k of each policy and prompt, unbiased."""
        served = BestOfN(k)
        return {name: (served.weights(right_PM) * right_PM).sum(axis=1) for name, right_PM in self.right.items()}

    def lead(self, ours: str, theirs: str, k: int) -> tuple[float, Trained] | None:
        """Return the KL at which two methods are compared, and the lead in points; None where they cannot be."""
        pair, passed = {name: self.methods[name] for name in (ours, theirs)}, self.passed(k)
        at = AtOneKL.of(pair, self.kls, lambda *_: None, median=NATS)
        if at.kl is None or len(at.methods) < len(pair):
            return None
        both = at.matched(passed, BestOfN(k), passed["reference"])
        ahead = both[ours].values - both[theirs].values
        shifts = 100.0 * both[ours].shift, -100.0 * both[theirs].shift
        return at.kl, Trained(self.prompt_ids, 100.0 * ahead, shifts)


def run_of(folder: Path, number: int, settings: Sequence[str], *words: str) -> Path:
    """Run what is missing of a seed's offline policies; with more words of `infalign run` that besides."""
    root = folder / f"seed-{number}"
    if not (root / "checker.py").exists():
        (task,) = chosen(measured(folder / "candidates")) or [""]
        if not task:
            raise SystemExit("no candidate is suitable, see candidates.py")
        root.mkdir(parents=True, exist_ok=True)
        rows = rows_of(task, TRAIN + HELD_OUT, seed=1 + number)  # 0 is the candidates'
        for name, some in (("train", rows[:TRAIN]), ("test", rows[TRAIN:])):
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        (root / "checker.py").write_text(inspect.getsource(is_right))
    changes = [
        "run_dir=run",
        f"seed={number}",
        "data={sources: [{path: train.jsonl}], test: [{path: test.jsonl}], max_prompt_tokens: 512}",
        "reward.function=checker.py:check",
        f"rollout={{prompts: {TRAIN}, k: {K}, max_new_tokens: {LONGEST}}}",
        f"evaluate={{prompts: {HELD_OUT}, samples: {SAMPLES}, max_n: {SAMPLES}, truth: reward}}",
        *(f"policies.{name}={policy}" for name, policy in OFFLINE.items()),
        *settings,
    ]
    infalign(root, "run", RECIPE, *words, *(word for change in changes for word in ("--set", change)))
    return root / "run"


def reward_of(objective: str | None) -> Callable[..., Any]:
    """Return the checker as a reward; for an objective its group advantages, whose mean is 0 as RLOO would make it."""

    def reward(prompts: list[Any], responses: list[str], answer: list[str]) -> Any:
        right_B = np.array(is_right(responses, answer), float)
        groups = [json.dumps(prompt) for prompt in prompts]
        if any(groups.count(group) != GENERATIONS for group in set(groups)):
            raise ValueError(f"the batch does not have {GENERATIONS} responses to each prompt")
        return right_B if objective is None else advantages(right_B, groups, objective)

    return reward


def train_online(run_dir: Path, method: str, seed: int) -> Path:
    """Train an adapter on its own responses, and return its folder."""
    place = run_dir.parent / "online" / method
    if not place.exists():
        table = pq.read_table(run_dir / "calibrated.parquet", columns=["prompt", "columns"])[:ONLINE].to_pylist()
        rows = [{"prompt": row["prompt"], "answer": json.loads(row["columns"])["answer"]} for row in table]
        rewards_PK = reference_rewards(run_dir)[:ONLINE]
        law = (
            optimum(rewards_PK, f"best-of-{SERVED}", kl=NATS) if method == AWARE else tilted(rewards_PK, "raw", kl=NATS)
        )
        fit_online(
            REFERENCE,
            rows,
            reward_of(METHODS[method]),
            law,
            folder=place,
            seed=seed,
            generations=GENERATIONS,
            max_new_tokens=LONGEST,
            epochs=1,
            batch_size=min(64, GENERATIONS * len(rows)),
            learning_rate=RATE * LEARNING_RATE_FACTOR,
            lora={"rank": 16},
        )
    return place


@torch.no_grad()
def scaled(place: Path, kl: float) -> Path:
    """Save a policy with ΔW times the factor that brings it from its KL to `NATS`, if KL is its square."""
    target = place.with_name(f"{place.name}-at-{NATS:g}")
    if not target.exists():
        (model, tokenizer), (reference, _) = Policy.of(place), Policy.of(REFERENCE)
        strength = min(float(np.sqrt(NATS / kl)), MOST)
        for name, weight in model.named_parameters():
            weight.copy_(torch.lerp(reference.get_parameter(name), weight, strength))
        for part in (model, tokenizer):
            part.save_pretrained(target.with_suffix(".part"))
        target.with_suffix(".part").rename(target)
    return target


def external(evaluated: Evaluated, place: Path) -> str:
    """Return the name under which a run has a policy that was trained elsewhere."""
    named = re.sub("[^A-Za-z0-9_-]", "_", place.name)
    (found,) = evaluated.folder.glob(f"{named}.*")
    return found.name


def seed_of(folder: Path, number: int, settings: Sequence[str], *, online: bool) -> Seed:
    """Do what is missing of a seed and return what was measured."""
    run_dir = run_of(folder, number, settings)
    evaluated = Evaluated(load_recipe(str(run_dir / "recipe.yaml"), [f"run_dir={run_dir}"]))
    methods = {name: [name] for name in evaluated.recipe.policies}
    for method in METHODS if online else ():
        trained = train_online(run_dir, method, number)
        run_of(folder, number, settings, "--policy", str(trained))
        names = [external(evaluated, trained)]
        at_nats = scaled(trained, float(evaluated.kl(names[0]).mean()))
        run_of(folder, number, settings, "--policy", str(at_nats))
        methods[method] = [*names, external(evaluated, at_nats)]
    policies = [name for names in methods.values() for name in names]
    right = {name: evaluated.column(name, "reward") for name in ("reference", *policies)}
    return Seed(evaluated.prompt_ids, methods, {name: evaluated.kl(name) for name in policies}, right)


def print_tables(numbers: Sequence[int], seeds: Sequence[Seed], kinds: Sequence[str]) -> None:
    """Print KL and pass@k as measured, and the leads at one KL, of each seed and of all."""
    print(f"\n| as measured | KL, nats | {' | '.join(f'pass@{k}' for k in KS)} |\n|{'---|' * (2 + len(KS))}")
    passed = [{k: seed.passed(k) for k in KS} for seed in seeds]
    rows = {"reference": 0, **{method: len(names) for method, names in seeds[0].methods.items()}}
    for method, count in rows.items():
        for place in range(max(count, 1)):
            names = [seed.methods[method][place] if count else method for seed in seeds]
            spent = np.mean([seed.kls[name].mean() if count else 0.0 for seed, name in zip(seeds, names, strict=True)])
            cells = [
                cell([Trained(s.prompt_ids, 100.0 * p[k][n]) for s, p, n in zip(seeds, passed, names, strict=True)])
                for k in KS
            ]
            print(f"| {method}{', ΔW scaled' * (place > 0)} | {spent:.3f} | {' | '.join(cells)} |")
    print(f"\n| points at one KL | k | KL, nats | {' | '.join(f'seed {n}' for n in numbers)} | mean |")
    print("|---" * (4 + len(numbers)) + "|")
    for ours, others in (lead for kind in kinds for lead in LEADS[kind]):
        for theirs in others:
            for k in (1, SERVED):
                found = [seed.lead(ours, theirs, k) for seed in seeds]
                known = [one for one in found if one is not None]
                each = [f"{one[1].mean:+.1f}" if one else "not comparable" for one in found]
                if len(known) == len(found):
                    mean = interval([one[1] for one in known])
                    each.append(f"{mean.mean:+.1f} ({mean.low:+.1f} to {mean.high:+.1f})")
                else:
                    each.append(f"comparable in {len(known)} of {len(found)} seeds")
                at = f"{np.mean([one[0] for one in known]):.3f}" if known else ""
                print(f"| {ours} over {theirs} | {k} | {at} | {' | '.join(each)} |")


def main() -> None:
    """Do what is missing and print the tables."""
    place, kind, *words = sys.argv[1:]
    if kind not in LEADS:
        raise SystemExit(f"the second word is offline or online, found {kind}")
    chosen_seeds, settings = read_words(words)
    numbers, folder = [int(seed) for seed in chosen_seeds], Path(place).absolute()
    seeds = [seed_of(folder, number, settings, online=kind == "online") for number in numbers]
    print_tables(numbers, seeds, [*LEADS] if kind == "online" else [kind])


if __name__ == "__main__":
    main()
