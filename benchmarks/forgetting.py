"""What KL costs elsewhere: a real model is trained on one task, and measured on five things that nobody trained.

``INFALIGN_DATA=… python benchmarks/forgetting.py FOLDER SEED SEED … [key=value …]``

LoRA adapters on the last ten layers of SmolLM2-135M-Instruct, on the recipe `smollm2-letters`: for pass@8, as ordinary
RLHF, and by fine-tuning on the best of n (`POLICIES`), each trained for its KL and as the run saves it; and on-policy
without KL, from `PASSES` times as many responses, at two rates (`WITHOUT_KL`). On the task: KL, pass@1 and pass@8.
Elsewhere: pass@1 in `TASKS`, with examples; the log-likelihood of the replies of dialogues, in nats per token; KL and
length of replies to the first turns of others. All as differences to the reference.
INFALIGN_DATA is the folder of Anthropic's hh-rlhf, with ``hh/helpful-base/test.jsonl.gz``. Printed: means over seeds
with Student's 95 % intervals, and Spearman's correlation of each loss with the KL on the task, over all policies and
seeds. ``FOLDER/forgetting.svg`` shows the losses over the gain. Models draw with the same random numbers, in bfloat16;
KL and log-likelihood are in float32. What is done is not repeated. Further words are settings, such as
compute.processes=1. Five hours per seed of an idle core that computes in bfloat16.
"""

import gzip
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from candidates import LONGEST, REFERENCE, check, rows_of
from letters import RECIPE, train_on_letters
from matplotlib import rc_context
from pass_at_k import SERVED, Rival, train_offline
from plots import INK, LOOKS, STYLE, panels, save
from run_files import test_prompts, written
from scipy.stats import spearmanr
from seeds import half_width, mean_over_seeds, read_words
from transformers import AutoModelForCausalLM

from infalign import Policy, Rollouts, pass_at_k, rao_blackwell_kl, sample, score

BUDGETS, NS = (0.05, 0.3, 1.5), (2, 6, 30)  # nats; of Best-of-n, which has no budget
FIT = "fit: {lora: {rank: 16, layers: 10}, learning_rate: 2.0e-4, batch_size: 64, epochs: 1, bf16: true}"
POLICIES = {
    **{f"aware-{100 * kl:.0f}": f"{{transform: optimal, kl_budget: {kl}, solver: qrpo, {FIT}}}" for kl in BUDGETS},
    **{f"ordinary-{100 * kl:.0f}": f"{{transform: raw, kl_budget: {kl}, solver: qrpo, {FIT}}}" for kl in BUDGETS},
    **{f"best-of-n-{n}": f"{{solver: bon-sft, n: {n}, {FIT}}}" for n in NS},
}
FREE, RATES, PASSES = ("grpo", "maxrl", "pass@8"), (1.0e-4, 5.0e-4), 8
WITHOUT_KL = {f"{name} without KL at {rate:g}": Rival(name, name, 0.0, rate) for name in FREE for rate in RATES}
METHODS = ("aware", "ordinary", "best-of-n", *(f"{name} without KL" for name in FREE))
TASKS = ("number_sequence", "evens", "weekday")  # of `candidates.py`, which the reference solves at times
CHECKER = "infalign.rewards.checkers:math_verify"
ON_TASK, ELSEWHERE, SAMPLES = 200, 48, 8  # prompts, and samples of each model for each of a task elsewhere
DIALOGUES, MOST_CHARACTERS = 48, 1200
REPLY, OF_KL, WITH_KL = 256, 64, 100  # tokens of a general reply, those of its KL, and prompts of a KL, at most
GAINS = ("KL on the task", "pass@1", f"pass@{SERVED}")
NATS = ("KL on the task", "log-likelihood", "KL elsewhere")  # the others are points, and tokens
LOSSES = (*TASKS, "log-likelihood", "KL elsewhere", "length")
Measured = dict[str, float]


class Dialogue(NamedTuple):
    """The turns of a conversation up to the last reply, and that reply."""

    prompt: list[dict[str, str]]
    reply: str


def dialogues() -> Iterator[Dialogue]:
    """Yield short dialogues of the data, as far as they end with a reply. Ends the program if there are none."""
    place = Path(os.environ.get("INFALIGN_DATA", "")) / "hh" / "helpful-base" / "test.jsonl.gz"
    if not place.is_file():
        raise SystemExit(f"{place} does not exist; set INFALIGN_DATA to the folder of Anthropic's hh-rlhf")
    with gzip.open(place, "rt", encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["chosen"]
            said = re.split(r"\n\n(Human|Assistant): ?", text)[1:]
            roles, texts = said[::2], [one.strip() for one in said[1::2]]
            fits = len(text) <= MOST_CHARACTERS and all(texts)
            if fits and roles == ["Human", "Assistant"] * (len(roles) // 2):
                names = {"Human": "user", "Assistant": "assistant"}
                turns = [{"role": names[role], "content": one} for role, one in zip(roles, texts, strict=True)]
                yield Dialogue(turns[:-1], texts[-1])


@torch.no_grad()
def likelihood(policy: Policy, rows: Sequence[Dialogue]) -> float:
    """Return the mean over dialogues of the mean log-likelihood of the reply's tokens, in nats."""
    found = list[float]()
    for row in rows:
        turns = [*row.prompt, {"role": "assistant", "content": row.reply}]
        render = policy.tokenizer.apply_chat_template
        before = render(row.prompt, add_generation_prompt=True)["input_ids"]
        ids = render(turns)["input_ids"]
        assert ids[: len(before)] == before, "the chat template renders the prompt in another way with its reply"
        logprobs = policy.model(torch.tensor([ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        found.append(float(logprobs.gather(1, torch.tensor(ids[len(before) :])[:, None]).mean()))
    return float(np.mean(found))


def drawn_kl(policy: Policy, reference: Policy, drawn: Rollouts) -> float:
    """Return the KL of a policy to the reference along the start of its first responses to prompts, in nats."""
    first = [ids[:OF_KL] for ids in drawn.drawn["token_ids"].to_pylist()[:: drawn.k]][:WITH_KL]
    return float(rao_blackwell_kl(policy.model, reference.model, drawn.prompts.token_ids[:WITH_KL], first).mean())


def in_bfloat16(policy: Policy) -> Policy:
    """Return a policy as it is served on a machine that computes in bfloat16, which halves the time of sampling."""
    place = policy.model.name_or_path
    return Policy(AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval(), policy.tokenizer)


def measure(root: Path, place: str | Path, seed: int) -> Measured:
    """Return what a model has on the task, and elsewhere."""
    policy, reference = Policy.of(place), Policy.of(REFERENCE)
    served = in_bfloat16(policy)
    asked = test_prompts(root, ON_TASK)
    answers = [json.loads(columns)["answer"] for columns in asked["columns"]]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(asked["prompt"], answers, strict=True)]
    own = sample(served, rows, 2 * SERVED, seed=seed, max_new_tokens=1)
    right = score(CHECKER, own)
    found = {"KL on the task": drawn_kl(policy, reference, own)}
    found |= {f"pass@{k}": 100.0 * pass_at_k(right, k).mean for k in (1, SERVED)}
    for task in TASKS:
        others = sample(served, rows_of(task, ELSEWHERE, seed), SAMPLES, seed=seed, max_new_tokens=LONGEST)
        found[task] = 100.0 * score(check, others).mean()
    every = dialogues()
    known = [*islice(every, DIALOGUES)]
    found["log-likelihood"] = likelihood(policy, known)
    firsts = {one.prompt[0]["content"]: None for one in known}
    general = [text for one in every if (text := one.prompt[0]["content"]) not in firsts]
    said = sample(served, [*dict.fromkeys(general)][:ELSEWHERE], 1, seed=seed, max_new_tokens=REPLY)
    found["KL elsewhere"] = drawn_kl(policy, reference, said)
    found["length"] = np.mean([len(ids) for ids in said.drawn["token_ids"].to_pylist()])
    return {key: float(value) for key, value in found.items()}


def seed_of(folder: Path, seed: int, settings: Sequence[str]) -> dict[str, Measured]:
    """Do what is missing of a seed, and return what each policy has more than the reference."""
    without = [f"policies.{name}=null" for name in ("aware", "ordinary")]  # the recipe's guides
    root = train_offline(RECIPE, folder, seed, POLICIES, [*without, *settings])
    train_on_letters(root, seed, WITHOUT_KL, PASSES)
    places: dict[str, str | Path] = {"reference": REFERENCE}
    places |= {name: root / "models" / name for name in POLICIES}
    places |= {name: root / "models" / name / "adapter" for name in WITHOUT_KL}
    (stored := root / "elsewhere").mkdir(exist_ok=True)
    found = dict[str, Measured]()
    for name, place in places.items():
        file = stored / f"{name}.json"
        if not file.exists():
            with written(file) as part:
                part.write_text(json.dumps(measure(root, place, seed), indent=1))
        found[name] = json.loads(file.read_bytes())
    base = found.pop("reference")
    return {name: {key: value - base[key] for key, value in own.items()} for name, own in found.items()}


def print_tables(seeds: Sequence[Mapping[str, Measured]]) -> None:
    """Print gains and losses of policies, those of `aware` over `ordinary`, and how well the KL tells the losses."""
    columns = (*GAINS, *LOSSES)
    print(f"| policy | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    rows = {name: [seed[name] for seed in seeds] for name in seeds[0]}
    for kl in BUDGETS:
        ours, theirs = (f"{method}-{100 * kl:.0f}" for method in METHODS[:2])
        pairs = [(seed[ours], seed[theirs]) for seed in seeds]
        rows[f"{ours} − {theirs}"] = [
            {column: ours[column] - theirs[column] for column in columns} for ours, theirs in pairs
        ]
    for name, each in rows.items():
        cells = [mean_over_seeds([one[column] for one in each], 3 if column in NATS else 1) for column in columns]
        print(f"| {name} | {' | '.join(cells)} |")
    every = [measured for seed in seeds for measured in seed.values()]
    spent = [one[GAINS[0]] for one in every]
    print(f"\n| Spearman's correlation with | {' | '.join(LOSSES)} |\n|{'---|' * (1 + len(LOSSES))}")
    told = [float(spearmanr(spent, [one[loss] for one in every]).statistic) for loss in LOSSES]
    print(f"| KL on the task | {' | '.join(f'{one:+.2f}' for one in told)} |")


def draw(seeds: Sequence[Mapping[str, Measured]], path: Path) -> None:
    """Draw each loss over the gain on the task; a line per method, means over seeds with their intervals."""
    with rc_context(STYLE):
        figure, grid = panels(2, 3, (9.6, 5.6))
        for loss, axes in zip(LOSSES, grid.flat, strict=True):
            for method, (color, marker) in zip(METHODS, LOOKS, strict=False):
                names = [name for name in seeds[0] if name.startswith(method)]
                found = [[[seed[name][one] for seed in seeds] for name in names] for one in (GAINS[2], loss)]
                looks = {"marker": marker, "color": color, "label": method, "elinewidth": 0.8, "capsize": 2}
                axes.errorbar(*np.mean(found, axis=2), [half_width(each) for each in found[1]], **looks)
            axes.axhline(0.0, color=INK, linewidth=0.6)
            axes.set(xlabel=f"{GAINS[2]} on the task, points more", ylabel=f"{loss}, change")
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
        save(figure, path)


def main() -> None:
    """Do what is missing, print the tables and draw the figure."""
    folder, *words = sys.argv[1:]
    next(dialogues())  # fails now, not after an hour
    numbers, settings = read_words(words)
    seeds = [seed_of(Path(folder), int(number), settings) for number in numbers]
    print_tables(seeds)
    draw(seeds, Path(folder) / "forgetting.svg")


if __name__ == "__main__":
    main()
