"""pass@k of a real model whose responses have several tokens, at one KL, from samples.

``python benchmarks/several_tokens.py FOLDER offline|online SEED SEED … [key=value …]``

The task is the one that `candidates.py` chooses, whose responses are in ``FOLDER/candidates``. For each seed: `TRAIN`
prompts with `K` rollouts each, and `HELD_OUT` others with `SAMPLES` samples of each policy. ``offline``: a guide that
reads the reference's states and a LoRA adapter of the last ten layers, each for Best-of-8 (`aware`) and as ordinary
RLHF, and such an adapter by `snips`, at `NATS` by the strength that their training chooses. ``online``: adapters of the
same form that learn from fresh responses (`ON_POLICY`), by the loop of `pass_at_k.py` with β steered to `NATS`, and are
brought there by a factor on ΔW: RLOO on the rewards of our law, the objectives of `letters.py`, at its rates. TRL's
trainer computes each prompt once per response, which takes seven times as long. Pairs are compared per prompt at the
KL that both reach, where they are comparable (`seeds.AtOneKL`). Further words are settings, such as
compute.processes=1. 95 % intervals over seeds and prompts. What is done is not repeated. Three and a half hours of an
idle core per seed with compute.dtype=bfloat16, where the CPU has it; on-policy 3.5 more.
"""

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import guides
import numpy as np
import pyarrow.parquet as pq
import torch
from candidates import LONGEST, REFERENCE, chosen, measured, rows_of
from candidates import check as is_right
from forgetting import in_bfloat16
from letters import LAST, LORA, RECIPE, TUNED, train_adapter
from own_tasks import infalign
from pass_at_k import GROUP, OBJECTIVES, SERVED, Drawn, Rival, cell, interval
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from run_files import Evaluated, load_recipe, reference_rewards, test_prompts, written
from seeds import AtOneKL, Trained, read_words

from infalign import BestOfN, CalibratedReward, Policy, Rollouts, estimate, optimum, rao_blackwell_kl, sample

TRAIN, HELD_OUT, K, SAMPLES, NATS = 1500, 400, 8, 16, 0.2
KS = (1, 2, 4, 8, 16)
STEPS, TRIES, OF_KL = 48, 3, 100  # on-policy; how often ΔW is scaled, by the KL of responses to so many prompts
OFFLINE = {  # adapters of the last ten layers train on stored states
    f"lora-{name}": LORA.format(transform, "{rank: 16, layers: 10}")
    for name, transform in (("aware", "optimal"), ("ordinary", "raw"))
} | {"lora-snips": "{solver: snips, kl_budget: 0.2, fit: {lora: {rank: 16, layers: 10}, batch_size: 64, epochs: 1}}"}
AWARE = "on-policy aware"  # RLOO on the rewards of our law
ON_POLICY = {AWARE: Rival("rloo", "rloo", rate=TUNED["rloo"], steps=STEPS)} | {
    f"on-policy {name}": Rival(name, name, rate=TUNED[name], steps=STEPS) for name in OBJECTIVES
}
LEADS = {  # each over the others
    "offline": [
        ("aware", ["ordinary"]),
        ("lora-aware", ["lora-ordinary", "aware"]),
        ("lora-snips", ["lora-ordinary", "lora-aware"]),
    ],
    "online": [
        (AWARE, [*ON_POLICY][1:]),
        ("on-policy pass@8", ["on-policy rloo", "on-policy grpo", "on-policy maxrl", "lora-aware"]),
    ],
}


class Seed(NamedTuple):
    """A seed's prompts, and of each policy its KL (P,) in nats and its right samples, (P, M)."""

    prompt_ids: Sequence[str]
    kls: Mapping[str, np.ndarray]
    right: Mapping[str, np.ndarray]

    def passed(self, k: int) -> dict[str, np.ndarray]:
        """Return pass@k of each policy and prompt, unbiased."""
        served = BestOfN(k)
        return {name: (served.weights(right_PM) * right_PM).sum(axis=1) for name, right_PM in self.right.items()}

    def lead(self, ours: str, theirs: str, k: int) -> tuple[float, Trained] | None:
        """Return the KL at which two policies are compared, and the lead in points; None where they cannot be."""
        pair, passed = {name: [name] for name in (ours, theirs)}, self.passed(k)
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


class World:
    """The reference, in float32 and as it draws, and a run's prompts with the rewards of their stored rollouts."""

    def __init__(self, root: Path) -> None:
        columns = ["prompt", "columns", "token_ids"]
        self.train_asked = pq.read_table(root / "calibrated.parquet", columns=columns).to_pydict()
        self.test_asked = test_prompts(root, HELD_OUT)
        self.rewards_PK = reference_rewards(root)
        self.shaped = CalibratedReward(is_right, optimum(self.rewards_PK, f"best-of-{SERVED}", kl=NATS).shaping)
        self.reference, self.tokenizer = Policy.of(REFERENCE)
        self.served = in_bfloat16(Policy(self.reference, self.tokenizer)).model

    @torch.no_grad()
    def sampled(self, adapter: PeftModel, asked: Mapping[str, list[Any]], each: int, seed: int) -> Rollouts:
        """Return responses of an adapter that is merged, in bfloat16."""
        for name, layer in adapter.named_modules():
            if isinstance(layer, LoraLayer):
                place = self.served.get_submodule(name.removeprefix("base_model.model."))
                place.weight.copy_(layer.weight + layer.get_delta_weight("default"))
        pairs = zip(asked["prompt"], asked["columns"], strict=True)
        rows = [{"prompt": prompt, **json.loads(columns)} for prompt, columns in pairs]
        return sample((self.served, self.tokenizer), rows, each, seed=seed, max_new_tokens=LONGEST)

    def draw(self, shaped: bool, adapter: PeftModel, rows: np.ndarray) -> Drawn:
        """Return responses of an adapter to some prompts, with right or wrong or what our law gives as rewards."""
        asked = {name: [values[row] for row in rows] for name, values in self.train_asked.items()}
        said = self.sampled(adapter, asked, GROUP, int(torch.randint(2**31, ()))).drawn
        every = {name: [value for value in values for _ in range(GROUP)] for name, values in asked.items()}
        answers = [json.loads(columns)["answer"] for columns in every["columns"]]
        texts, references = said["text"].to_pylist(), np.repeat(self.rewards_PK[rows], GROUP, axis=0).tolist()
        shape = partial(self.shaped, every["prompt"], texts, references, answer=answers)
        rewards = shape() if shaped else is_right(texts, answers)
        plain = guides.pack(every["token_ids"], said["token_ids"].to_pylist())
        with torch.autocast("cpu", torch.bfloat16):
            with adapter.disable_adapter():
                packed = guides.with_stored(self.reference, plain, LAST)
                with guides.starting_from_states(self.reference, LAST):
                    before = guides.logprobs(self.reference, packed)
            with guides.packing(self.reference), guides.starting_from_states(self.reference, LAST):
                now = packed.logprobs(adapter)
        return Drawn(now.float(), before.float(), [float(reward) for reward in rewards])

    @torch.no_grad()
    def measured(self, place: Path, seed: int) -> dict[str, np.ndarray]:
        """Return KL (P,) and right samples (P, M) of an adapter with ΔW times what brings it to `NATS`, and that."""
        reference, _ = Policy.of(REFERENCE)
        adapter = PeftModel.from_pretrained(self.reference, str(place))
        layers = [layer for layer in adapter.modules() if isinstance(layer, LoraLayer)]

        def kl_of(drawn: Rollouts) -> np.ndarray:
            first = drawn.drawn["token_ids"].to_pylist()[:: drawn.k]
            return rao_blackwell_kl(adapter, reference, drawn.prompts.token_ids, first)

        some, strength = {name: values[:OF_KL] for name, values in self.train_asked.items()}, 1.0
        for _ in range(TRIES):
            strength *= float(np.sqrt(NATS / kl_of(self.sampled(adapter, some, 1, seed)).mean()))
            for layer in layers:
                layer.set_scale("default", strength)
        drawn = self.sampled(adapter, self.test_asked, SAMPLES, seed)
        answers = [json.loads(columns)["answer"] for columns in self.test_asked["columns"] for _ in range(SAMPLES)]
        right = np.array(is_right(drawn.drawn["text"].to_pylist(), answers), float).reshape(-1, SAMPLES)
        found = {"kl": kl_of(drawn), "right": right, "strength": np.array(strength)}
        adapter.unload()
        return found


def seed_of(folder: Path, number: int, settings: Sequence[str], *, online: bool) -> Seed:
    """Do what is missing of a seed and return what was measured."""
    run_dir = run_of(folder, number, settings)
    evaluated = Evaluated(load_recipe(str(run_dir / "recipe.yaml"), [f"run_dir={run_dir}"]))
    methods = [*evaluated.recipe.policies]
    kls = {name: evaluated.kl(name) for name in methods}
    right = {name: evaluated.column(name, "reward") for name in ("reference", *methods)}
    for name in ON_POLICY if online else ():
        place = run_dir.parent / "online" / name
        if not (place / "measured.npz").exists():
            world = World(run_dir)
            if not (place / "adapter").exists():
                place.mkdir(parents=True, exist_ok=True)
                draw, count = partial(world.draw, name == AWARE), len(world.rewards_PK)
                notes = train_adapter(world.reference, ON_POLICY[name], draw, count, number, place / "adapter")
                print(f"seed {number}: {name} {notes}", flush=True)
            with written(place / "measured.npz") as file:
                np.savez(file, **world.measured(place / "adapter", number))
        found = np.load(place / "measured.npz")
        kls[name], right[name] = found["kl"], found["right"]
    return Seed(evaluated.prompt_ids, kls, right)


def print_tables(numbers: Sequence[int], seeds: Sequence[Seed], kinds: Sequence[str]) -> None:
    """Print KL and pass@k as measured, and the leads at one KL, of each seed and of all."""
    print(f"\n| as measured | KL, nats | {' | '.join(f'pass@{k}' for k in KS)} |\n|{'---|' * (2 + len(KS))}")
    passed = [{k: seed.passed(k) for k in KS} for seed in seeds]
    for name in seeds[0].right:
        spent = np.mean([seed.kls[name].mean() if name in seed.kls else 0.0 for seed in seeds])
        cells = [
            cell([Trained(seed.prompt_ids, 100.0 * of[k][name]) for seed, of in zip(seeds, passed, strict=True)])
            for k in KS
        ]
        print(f"| {name} | {spent:.3f} | {' | '.join(cells)} |")
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


def print_by_difficulty(seeds: Sequence[Seed]) -> None:
    """Print what adapters for Best-of-8 do with their KL, by the right ones of half of the reference's samples."""
    half, ours, theirs = SAMPLES // 2, "lora-aware", "lora-ordinary"
    counts = np.concatenate([seed.right["reference"][:, :half].sum(axis=1) for seed in seeds])
    right = {name: np.concatenate([seed.right[name] for seed in seeds]) for name in ("reference", ours, theirs)}
    right["reference"] = right["reference"][:, half:]  # the others, so that luck in the counts is no gain
    ahead = {"KL, nats": np.concatenate([seed.kls[ours] - seed.kls[theirs] for seed in seeds])}
    for k in (1, SERVED):
        lead = np.concatenate([seed.passed(k)[ours] - seed.passed(k)[theirs] for seed in seeds])
        ahead[f"pass@{k}"] = 100.0 * lead
    print(f"\n| right of {half} | prompts | pass@1: {', '.join(right)} | ahead: {' | '.join(ahead)} |\n{'|---' * 6}|")
    for low, high in ((0, 0), (1, 1), (2, half)):
        rows = (low <= counts) & (counts <= high)
        means = ", ".join(f"{100.0 * right_PM[rows].mean():.1f}" for right_PM in right.values())
        found = [estimate(lead[rows]) for lead in ahead.values()]
        cells = " | ".join(f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})" for one in found)
        print(f"| {low} to {high} | {rows.sum()} | {means} | {cells} |")


def main() -> None:
    """Do what is missing and print the tables."""
    place, kind, *words = sys.argv[1:]
    if kind not in LEADS:
        raise SystemExit(f"the second word is offline or online, found {kind}")
    chosen_seeds, settings = read_words(words)
    numbers, folder = [int(seed) for seed in chosen_seeds], Path(place).absolute()
    seeds = [seed_of(folder, number, settings, online=kind == "online") for number in numbers]
    print_tables(numbers, seeds, [*LEADS] if kind == "online" else [kind])
    print_by_difficulty(seeds)


if __name__ == "__main__":
    main()
