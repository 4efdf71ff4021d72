"""pass@k by the truth of methods at one KL, exact: ``python benchmarks/pass_at_k.py FOLDER SEED SEED … [WORD]``.

For each seed: the reference, rollouts and offline policies of the recipe `demo`, those of `OFFLINE` besides, and rivals
on-policy (`ON_POLICY`), which draw 500 × 512 responses where the offline ones have 4,000 × 32. All 81 answers ``Take a
b`` to each of 500 held-out prompts are enumerated, anything else is one class, so pass@k is exact, and every policy is
brought to one KL by a factor on its log-ratio to the reference. `most pass@8` is the best that any policy has there,
`most pass@1` what ordinary RLHF would end at. A last table has the N whose pass@N is our pass@8. On-policy methods with
a KL term have it in the reward, and β is steered to the KL while they train; the others spend what they spend. ``demo``
trains none but the demo's own, ``snips`` besides them a guide by that solver, ``forms`` a student of `aware` and plain
models (`FORMS`). ``converged`` has on-policy methods of up to 2,000 steps with rates of their own, which ``tune`` finds
on a seed that is not reported. ``FOLDER/demo.png`` shows the demo's policies. What is done is not repeated. Intervals:
95 %, over seeds and prompts. Twenty minutes of a core per seed, five with ``demo``, eight with ``forms`` or ``snips``,
half an hour with the others.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
import torch
from run_files import written
from scipy.optimize import brentq
from scipy.optimize.elementwise import find_root
from scipy.special import expit, log_expit, logit
from seeds import Trained, mean_over_seeds, over_seeds
from torch import Tensor

from infalign import Policy, advantages, estimate

KS = [2**j for j in range(7)]
SERVED, KLS = 8, (0.05, 0.1)
AWARE = "aware", "student", "student-aware", "lora-aware", "last-layers-aware"
OURS = *AWARE, "snips", "last-layers-snips", "pass@8", "on-policy pass@8"  # whose leads are printed
NO_KL = 1e-9  # nats, between two ways to compute one law
COLORS = {"reference": "#85898f", "ordinary": "#d55e00", "aware": "#0072b2"}  # in the figure
ANSWERS = [f"Take {a} {b}" for a in range(1, 10) for b in range(1, 10)]
GUIDE = "guide: {trunk: reference}, fit: {epochs: 1, batch_size: 512, learning_rate: 2.0e-3}"
OFFLINE = {
    "exp10": f"{{transform: exp:10, kl_budget: 0.05, solver: qrpo, {GUIDE}}}",
    "bon-sft": f"{{solver: bon-sft, n: 8, {GUIDE}}}",
}
WHOLE, LORA = "{batch_size: 512, learning_rate: 5.0e-4}", "{lora: {rank: 16}, batch_size: 512, learning_rate: 2.0e-3}"
FORMS = {
    "student": "{solver: distil, teacher: aware, fit: {epochs: 4, batch_size: 128, learning_rate: 4.0e-4}}",
    "whole-aware": f"{{transform: optimal, kl_budget: 0.05, solver: qrpo, fit: {WHOLE}}}",
    "lora-aware": f"{{transform: optimal, kl_budget: 0.05, solver: qrpo, fit: {LORA}}}",
    "lora-ordinary": f"{{transform: raw, kl_budget: 0.05, solver: qrpo, fit: {LORA}}}",
}
SNIPS = {"snips": f"{{solver: snips, kl_budget: 0.05, {GUIDE}}}"}


class Rival(NamedTuple):
    """An on-policy method: its objective in the first and in the second half, and β; None is steered to a KL."""

    first: str
    second: str
    beta: float | None = None
    rate: float | None = None  # None: of `RATES`
    steps: int = 500


ON_POLICY = {
    "pass@8": Rival("pass@8", "pass@8"),
    "rloo": Rival("rloo", "rloo"),
    "grpo": Rival("grpo", "grpo", beta=0.0),
    "grpo with KL": Rival("grpo", "grpo"),
    "pkpo": Rival("pass@8", "pass@8", beta=0.0),
    "pkpo, annealed": Rival("pass@8", "rloo", beta=0.0),
    "maxrl": Rival("maxrl", "maxrl"),
}
PROMPTS, GROUP, LENGTH = 32, 16, 4
RATES = {True: 2e-3, False: 5e-4}  # with and without a KL term: the better of the two, seed 0
OBJECTIVES = "pass@8", "rloo", "grpo", "maxrl"
TRIED = {True: (1e-3, 2e-3, 4e-3), False: (5e-4, 1e-3, 2e-3)}  # rates with and without a KL term
TUNE = {  # by seed 10, which is not reported: pass@8 at .1 nats after 1,000 steps, without a KL term as trained
    f"{name}{'' if kl else ' without KL'} at {rate:g}": Rival(name, name, *((None, rate, 1000) if kl else (0.0, rate)))
    for kl, rates in TRIED.items()
    for name in OBJECTIVES
    for rate in rates
}
TUNED = {  # what that found
    True: {"pass@8": 2e-3, "rloo": 2e-3, "grpo": 1e-3, "maxrl": 2e-3},
    False: {"pass@8": 2e-3, "rloo": 5e-4, "grpo": 1e-3, "maxrl": 5e-4},
}
CONVERGED = {
    f"{name}, {steps:,} steps": Rival(name, name, None, TUNED[True][name], steps)
    for name in OBJECTIVES
    for steps in (500, 1000, 2000)
}


class Steered(NamedTuple):
    """The KL in nats that β is steered to, β at the start, and how much of log β changes in a step at most."""

    kl: float
    start: float
    speed: float


STEERED = Steered(0.3, float(np.exp(-2.0)), 0.03)


class Drawn(NamedTuple):
    """`GROUP` responses to each of some prompts: log π with its gradient, log π of the reference, rewards; all (R,)."""

    now: Tensor
    before: Tensor
    rewards: list[float]


class World:
    """A seed's run: its reference, prompts, and the law of a model over all answers to the held-out prompts."""

    def __init__(self, root: Path) -> None:
        self.root, self.models = root, root / "models"
        self.reference, self.tokenizer = load(self.models / "reference")
        self.test = prompts_of(root / "data" / "test_prompts.parquet")[:500]
        self.train = prompts_of(root / "calibrated.parquet")
        self.end = self.tokenizer.eos_token_id
        self.answers = [[*ids, self.end] for ids in self.tokenizer(ANSWERS, add_special_tokens=False)["input_ids"]]
        self.asked = [prompt[-1]["content"] for prompt in self.test]
        self.right_PA = np.array([[answer in right_answers(text) for answer in ANSWERS] for text in self.asked])
        self.test_ids = self.prompt_ids(self.test)

    def prompt_ids(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        """Return prompts as the chat template renders them, with the opening of a reply."""
        return self.tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]

    @torch.no_grad()
    def law(self, model: Any) -> np.ndarray:
        """Return log π of each answer and of all else, (prompts, answers + 1)."""
        given, parts = torch.tensor(self.answers), []
        for start in range(0, len(self.test_ids), 50):
            asked = self.test_ids[start : start + 50]
            _, found = self.respond(model, asked, len(given), given.repeat(len(asked), 1))
            parts.append(found.view(len(asked), -1).double().numpy())
        found_PA = np.concatenate(parts)
        other_P1 = np.log(np.maximum(1.0 - np.exp(found_PA).sum(axis=1, keepdims=True), 1e-12))
        return np.hstack([found_PA, other_P1])

    def respond(
        self, model: Any, asked: Sequence[Sequence[int]], each: int, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``each`` responses per prompt, drawn or ``given``, as rows of ids up to EOS, and their log π.

        Responses with the same tokens so far share a row of the cache.
        """
        padded = self.tokenizer.pad({"input_ids": list(asked)}, padding_side="left", return_tensors="pt")
        mask = padded["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = model(**padded, position_ids=positions, use_cache=True, logits_to_keep=1)
        cache, logits, last = found.past_key_values, found.logits[:, -1], positions[:, -1:]
        rows = torch.arange(len(asked)).repeat_interleave(each)  # of the cache, of each response
        total, running, drawn = logits.new_zeros(len(rows)), torch.ones_like(rows), []
        for t in range(LENGTH):
            logprobs = logits.log_softmax(1)
            tokens = logprobs.detach().exp()[rows].multinomial(1)[:, 0] if given is None else given[:, t]
            total = total + running * logprobs[rows, tokens]
            drawn.append(tokens)
            running = running * (tokens != self.end)
            if t + 1 < LENGTH:
                size = logits.shape[1]
                pairs, rows = torch.unique(running * (rows * size + tokens), return_inverse=True)  # 0 of ended ones
                parents, asked_next = pairs // size, pairs[:, None] % size
                cache.batch_select_indices(parents)
                mask, last = torch.cat([mask[parents], torch.ones_like(asked_next)], 1), last[parents] + 1
                more = {"attention_mask": mask, "position_ids": last, "past_key_values": cache}
                logits = model(asked_next, use_cache=True, **more).logits[:, -1]
        return torch.stack(drawn, 1), total

    def train_rival(self, rival: Rival, seed: int) -> Iterator[tuple[Any, dict[str, float]]]:
        """Train a copy of the reference on-policy; after each step yield it with β and the KL of the last steps."""
        torch.manual_seed(seed)
        model, _ = load(self.models / "reference")
        all_ids, right = self.prompt_ids(self.train), [right_answers(prompt[-1]["content"]) for prompt in self.train]

        def draw(rows: np.ndarray) -> Drawn:
            asked = [all_ids[row] for row in rows]
            drawn, now = self.respond(model, asked, GROUP)
            with torch.no_grad():
                _, before = self.respond(self.reference, asked, GROUP, drawn)
            ends = [row.index(self.end) + 1 if self.end in row else LENGTH for row in drawn.tolist()]
            said = [row[:end] for row, end in zip(drawn.tolist(), ends, strict=True)]
            texts = self.tokenizer.batch_decode(said, skip_special_tokens=True)
            asked_of = np.repeat(rows, GROUP)
            return Drawn(now, before, [float(text in right[row]) for row, text in zip(asked_of, texts, strict=True)])

        rival = rival._replace(rate=rival.rate or RATES[rival.beta != 0.0])
        for notes in train_on_policy(model, rival, draw, len(right), seed):
            yield model, notes


def train_on_policy(
    model: Any,
    rival: Rival,
    draw: Callable[[np.ndarray], Drawn],
    count: int,
    seed: int,
    prompts: int = PROMPTS,
    steered: Steered = STEERED,
) -> Iterator[dict[str, float]]:
    """Train on what ``draw`` gives for the numbers of some of ``count`` prompts; yield β and the last steps' KL."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, rival.rate, weight_decay=0.0)
    passes = -(-rival.steps * prompts // count)
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(count), (passes, 1)), axis=1).ravel()
    beta, kl = steered.start if rival.beta is None else rival.beta, 0.0
    groups, warm = np.repeat(np.arange(prompts), GROUP), min(50, -(-rival.steps // 10))
    for step in range(rival.steps):
        for group in optimizer.param_groups:
            group["lr"] = rival.rate * min(1.0, (step + 1) / warm) * (1.0 - 0.9 * step / rival.steps)
        now, before, rewards = draw(order[step * prompts : (step + 1) * prompts])
        ratio = (now.detach() - before).double().numpy()
        share = advantages(rewards, groups, rival.first if step < rival.steps // 2 else rival.second)
        if beta:
            share = share - beta * advantages(ratio, groups, "rloo")
        loss = -(torch.from_numpy(share).float() * now).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        kl = ratio.mean() if step == 0 else 0.9 * kl + 0.1 * ratio.mean()
        if rival.beta is None:
            beta *= np.exp(steered.speed * np.clip((kl - steered.kl) / steered.kl, -1.0, 1.0))
        yield {"beta": float(beta), "kl": float(kl)}


def right_answers(prompt: str) -> set[str]:
    """Return the answers that take two of the prompt's numbers which add up to its total, in both orders."""
    total, *numbers = map(int, re.findall(r"\d+", prompt))
    return {f"Take {a} {b}" for a in numbers for b in numbers if a != b and a + b == total}


def load(folder: Path) -> Policy:
    """Return a model on the CPU, in evaluation mode, with its tokenizer."""
    model, tokenizer = Policy.of(folder)
    return Policy(model.cpu(), tokenizer)


def prompts_of(table: Path) -> list[list[dict[str, str]]]:
    """Return the conversations of a run's table, here of one turn each."""
    cells = pq.read_table(table, columns=["prompt"])["prompt"].to_pylist()
    return [[{"role": turn["role"], "content": turn["content"]} for turn in cell] for cell in cells]


def at_kl(law_PA: np.ndarray, base_PA: np.ndarray, nats: float) -> tuple[np.ndarray, float]:
    """Return log π of a policy whose log-ratio is scaled to a mean KL, and the factor."""

    def scaled(factor: float) -> tuple[np.ndarray, float]:
        found = base_PA + factor * (law_PA - base_PA)
        found -= np.logaddexp.reduce(found, axis=1, keepdims=True)
        return found, mean_kl(found, base_PA)

    factor = float(brentq(lambda factor: scaled(factor)[1] - nats, 0.0, 30.0, xtol=1e-9))
    return scaled(factor)[0], factor


def best_at_kl(base_PA: np.ndarray, right_PA: np.ndarray, n: int, nats: float) -> np.ndarray:
    """Return log π of the policy with the largest pass@n at a mean KL; logit q = logit p + n(1 − q)^(n − 1)/β."""
    p_P = np.clip((np.exp(base_PA[:, :-1]) * right_PA).sum(axis=1), 1e-12, 1.0 - 1e-12)
    start_P = logit(p_P)

    def law(log_beta: float) -> np.ndarray:
        most = n / np.exp(log_beta)
        bracket = start_P - 1.0, start_P + most + 1.0
        logit_P = find_root(lambda x, start: x - start - most * expit(-x) ** (n - 1), bracket, args=(start_P,)).x
        factors = log_expit(logit_P) - np.log(p_P), log_expit(-logit_P) - np.log1p(-p_P)
        return base_PA + np.where(np.pad(right_PA, ((0, 0), (0, 1))), *(factor[:, None] for factor in factors))

    return law(float(brentq(lambda log_beta: mean_kl(law(log_beta), base_PA) - nats, -30.0, 5.0)))


def mean_kl(law_PA: np.ndarray, base_PA: np.ndarray) -> float:
    """Return the mean KL of a policy to the reference, in nats."""
    return float((np.exp(law_PA) * (law_PA - base_PA)).sum(axis=1).mean())


class Seed(NamedTuple):
    """The ids of a seed's prompts, which answers are right, (P, A), and log π of all answers and all else by model.

    ``brought`` are laws of policies at a KL, None as trained, with the factor or the KL: of those that no factor on the
    log-ratio over these answers brings there.
    """

    prompt_ids: Sequence[str]
    right_PA: np.ndarray
    laws: dict[str, np.ndarray]
    brought: Mapping[tuple[str, float | None], tuple[np.ndarray, float]] = {}

    def at(self, name: str, nats: float | None) -> tuple[np.ndarray, float]:
        """Return log π of a policy at a KL and its factor, or as trained and its KL; what is the reference stays it."""
        if (name, nats) in self.brought:
            return self.brought[name, nats]
        law, base = self.laws[name], self.laws["reference"]
        kl = mean_kl(law, base)
        return at_kl(law, base, nats) if nats and kl > NO_KL else (law, kl)

    def passed(self, name: str, nats: float | None, k: int) -> np.ndarray:
        """Return pass@k of a policy at a KL for each prompt, in per cent."""
        right_P = (np.exp(self.at(name, nats)[0])[:, :-1] * self.right_PA).sum(axis=1)
        return 100.0 * (1.0 - (1.0 - right_P) ** k)


def train_offline(
    recipe: str, folder: Path, seed: int, policies: Mapping[str, str], settings: Sequence[str] = ()
) -> Path:
    """Train a recipe's policies and further ones, and return the run directory."""
    root = folder / f"seed-{seed}"
    more = [f"policies.{name}={policy}" for name, policy in policies.items()]
    command = [sys.executable, "-m", "infalign", "run", recipe, "--until", "train"]
    changes = [f"run_dir={root}", f"seed={seed}", *more, *settings]
    subprocess.run(command + [word for change in changes for word in ("--set", change)], check=True)
    return root


def laws_of(folder: Path, seed: int, methods: Sequence[str]) -> Seed:
    """Train those of ``methods`` that are missing of a seed; return the law of each, from its file in ``laws``."""
    offline = {name: policy for name, policy in (OFFLINE | FORMS | SNIPS).items() if name in methods}
    root = train_offline("demo", folder, seed, offline)
    world, stored = World(root), root / "laws"
    stored.mkdir(exist_ok=True)
    for name in methods:
        if not (stored / f"{name}.npy").exists():
            rival = (ON_POLICY | TUNE | CONVERGED).get(name)
            trained = world.train_rival(rival, seed) if rival else [(load(world.models / name).model, {})]
            *_, (model, notes) = trained
            with written(stored / f"{name}.npy") as file:
                np.save(file, world.law(model))
            print(f"seed {seed}: {name} {notes}", flush=True)
    laws = {name: np.load(stored / f"{name}.npy") for name in methods}
    return Seed(world.asked, world.right_PA, laws)


def main() -> int:
    """Train what is missing and print the tables."""
    folder, *words = sys.argv[1:]
    further = {"demo": [], "forms": [*FORMS], "tune": [*TUNE], "converged": [*CONVERGED], "snips": [*SNIPS]}
    numbers = [int(word) for word in words if word not in further]
    others = next((further[word] for word in words if word in further), [*OFFLINE, *ON_POLICY])
    seeds = [laws_of(Path(folder), number, ["reference", "aware", "ordinary", *others]) for number in numbers]
    print_tables(numbers, seeds, KLS)
    draw(seeds, Path(folder) / "demo.png")
    return 0


def draw(seeds: Sequence[Seed], path: Path) -> None:
    """Draw pass@k of the demo's policies at its KL, and the lead of `aware`: means over seeds with their intervals."""
    figure, (all_of_them, lead) = plt.subplots(1, 2, figsize=(8.0, 3.2), layout="constrained", width_ratios=(3, 2))

    def line(axes: Any, label: str, color: str, by_seed: Callable[[Seed, int], np.ndarray]) -> None:
        found = [interval([Trained(seed.prompt_ids, by_seed(seed, k)) for seed in seeds]) for k in KS]
        axes.plot(KS, [one.mean for one in found], marker="o", markersize=4, color=color, label=label)
        axes.fill_between(KS, [one.low for one in found], [one.high for one in found], color=color, alpha=0.2, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(KS, map(str, KS))
        axes.set_xlabel("k")
        axes.spines[["top", "right"]].set_visible(False)

    for name, color in COLORS.items():
        line(all_of_them, name, color, lambda seed, k, name=name: seed.passed(name, KLS[0], k))
    line(
        lead, "", COLORS["aware"], lambda seed, k: seed.passed("aware", KLS[0], k) - seed.passed("ordinary", KLS[0], k)
    )
    lead.axhline(0.0, color=COLORS["reference"], linewidth=0.8)
    all_of_them.set_ylabel("pass@k, %")
    all_of_them.legend(frameon=False)
    lead.set_ylabel("aware − ordinary, points")
    figure.savefig(path, dpi=200, metadata={"Software": None})


def interval(seeds: Sequence[Trained]) -> Any:
    """Return the mean with its interval over seeds and prompts, of one seed over prompts."""
    return over_seeds(seeds) if len(seeds) > 1 else estimate(seeds[0].values)


def cell(seeds: Sequence[Trained]) -> str:
    """Return the mean over seeds with the larger half of its interval."""
    found = interval(seeds)
    return f"{found.mean:.1f} ± {max(found.high - found.mean, found.mean - found.low):.1f}"


def print_tables(numbers: Sequence[int], seeds: Sequence[Seed], kls: Sequence[float]) -> None:
    """Print KLs as trained, pass@k as trained and at each KL, and the leads of `OURS`."""
    methods = [*seeds[0].laws]
    rates = defaultdict[tuple[float | None, str, int], list[Trained]](list)  # by KL, method and k
    seconds = defaultdict[tuple[float | None, str], list[float]](list)  # KL as trained, or the factor to a KL
    for seed in seeds:
        base, right_PA = seed.laws["reference"], seed.right_PA
        for nats in (None, *kls):
            best = {f"most pass@{n}": (best_at_kl(base, right_PA, n, nats), 1.0) for n in (SERVED, 1)} if nats else {}
            for name, (law, second) in ({name: seed.at(name, nats) for name in methods} | best).items():
                seconds[nats, name].append(second)
                right_P = (np.exp(law)[:, :-1] * right_PA).sum(axis=1)
                for k in KS:
                    rates[nats, name, k].append(Trained(seed.prompt_ids, 100.0 * (1.0 - (1.0 - right_P) ** k)))
    columns = f"{' | '.join(f'seed {number}' for number in numbers)} | mean |\n" + "|---" * (2 + len(numbers)) + "|"
    print(f"\n| KL as trained, nats | {columns}")
    for name in methods[1:]:
        spent = seconds[None, name]
        print(f"| {name} | {' | '.join(f'{one:.3f}' for one in spent)} | {np.mean(spent):.3f} |")
    for nats in (None, *kls):
        title, second = (f"at {nats:g} nats", "×") if nats else ("as trained", "KL, nats")
        print(f"\n| {title} | {second} | {' | '.join(f'pass@{k}' for k in KS)} |")
        print("|---" * (2 + len(KS)) + "|")
        for name in (name for kl, name in seconds if kl == nats):
            cells = [cell(rates[nats, name, k]) for k in KS]
            print(f"| {name} | {np.mean(seconds[nats, name]):.3f} | {' | '.join(cells)} |")
        for ours in (name for name in OURS if nats and name in methods):
            print(f"\n| pass@{SERVED} of {ours} over, {title} | {columns}")
            for name in (name for kl, name in seconds if kl == nats and name != ours):
                pairs = zip(rates[nats, ours, SERVED], rates[nats, name, SERVED], strict=True)
                ahead = [Trained(mine.prompt_ids, mine.values - other.values) for mine, other in pairs]
                mean = interval(ahead)
                cells = [
                    *(f"{one.mean:+.1f}" for one in ahead),
                    f"{mean.mean:+.1f} ({mean.low:+.1f} to {mean.high:+.1f})",
                ]
                print(f"| {name} | {' | '.join(cells)} |")
            print(f"\n| N whose pass@N is pass@{SERVED} of {ours}, {title} | {columns}")
            aims = [mine.mean for mine in rates[nats, ours, SERVED]]
            in_its_form = ours.replace("aware", "ordinary") if "aware" in ours else "ordinary"
            for name in ("reference", *([in_its_form] if in_its_form in methods else [])):
                needed = [draws_for(one.values, aim) for one, aim in zip(rates[nats, name, 1], aims, strict=True)]
                print(f"| {name} | {' | '.join(f'{one:.1f}' for one in needed)} | {mean_over_seeds(needed, 1)} |")


def draws_for(right_P: np.ndarray, aim: float) -> float:
    """Return the N, not rounded, whose pass@N is ``aim``; both in percent."""
    return float(brentq(lambda n: 100.0 * np.mean(1.0 - (1.0 - right_P / 100.0) ** n) - aim, 1.0, 1000.0))


if __name__ == "__main__":
    sys.exit(main())
