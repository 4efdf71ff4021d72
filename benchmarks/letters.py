"""pass@k by the truth of a real model's policies at one KL, exact: ``python benchmarks/letters.py FOLDER SEED SEED …``.

For each seed: the reference, rollouts and policies of the recipe `smollm2-letters`, and those of `OFFLINE` besides. A
response is one token, and guides tell the reference's 128 likeliest tokens apart, so the law over these and all others
as one class is exact, and with it pass@k and KL on 200 held-out prompts. Tables as of `pass_at_k.py`, and one by
how large the answer is. What is done is not repeated.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from pass_at_k import SERVED, Seed, at_kl, cell, print_tables, train_offline
from seeds import Trained

from infalign.models.packed import packed_batches, packing
from infalign.models.pretrained import load_policy
from infalign.rewards.checkers import math_verify
from infalign.sampling.prompts import PromptTable

KLS, PROMPTS, BATCH_TOKENS = (0.1, 0.2, 0.4), 200, 4096
GUIDE = "guide: {side: {}, top_tokens: 128}, fit: {epochs: 1, batch_size: 64, learning_rate: 1.0e-3}"
OFFLINE = {
    "exp10": f"{{transform: exp:10, kl_budget: 0.2, solver: qrpo, {GUIDE}}}",
    "bon-sft": f"{{solver: bon-sft, n: 8, {GUIDE}}}",
}
METHODS = ("aware", "ordinary", *OFFLINE)
KINDS = {"1": range(1, 2), "2": range(2, 3), "3 or more": range(3, 100)}  # of prompts, by their answer


@torch.no_grad()
def laws_of(folder: Path, seed: int) -> Seed:
    """Train what is missing of a seed; return log π of the likeliest tokens and of all others, by model."""
    root = train_offline("smollm2-letters", folder, seed, OFFLINE)
    asked = PromptTable(root / "data" / "test_prompts.parquet", PROMPTS).read()
    if not (stored := root / "laws.npz").exists():
        model, tokenizer = load_policy(root / "models" / METHODS[0])
        with packing(model):
            any_token = [[tokenizer.eos_token_id]] * len(asked.token_ids)
            batches = [
                model.read_once(batch) for _, batch in packed_batches(asked.token_ids, any_token, BATCH_TOKENS, model)
            ]
        top = [batch.top_tokens for batch in batches if batch.top_tokens is not None]
        ids_PA, laws = torch.cat([part.ids for part in top]), {"reference": torch.cat([part.logprobs for part in top])}
        for name in METHODS:
            model, _ = load_policy(root / "models" / name)
            with packing(model):
                laws[name] = torch.cat([batch.logits(model).log_softmax(-1) for batch in batches])
        answers = [json.loads(columns)["answer"] for columns in asked.columns]
        texts = {token: tokenizer.decode([token]) for token in ids_PA.unique().tolist()}
        with_digit = {token for token, text in texts.items() if any(map(str.isdigit, text))}  # no other one is right
        right_PA = np.array(
            [
                [token in with_digit and bool(*math_verify([texts[token]], [answer])) for token in row]
                for row, answer in zip(ids_PA.tolist(), answers, strict=True)
            ]
        )
        np.savez(stored, right=right_PA, **{name: law.double().numpy() for name, law in laws.items()})
    found = dict(np.load(stored))
    return Seed(asked.prompt_ids, found.pop("right"), found)


def print_by_answer(folder: Path, numbers: list[int], seeds: list[Seed], nats: float) -> None:
    """Print pass@1 and pass@N at a KL for prompts with a small and with a large answer."""
    print(f"\n| at {nats:g} nats, answer | prompts | pass@k | reference | aware | ordinary |\n" + "|---" * 6 + "|")
    asked = [
        PromptTable(folder / f"seed-{number}" / "data" / "test_prompts.parquet", PROMPTS).read() for number in numbers
    ]
    answers = [np.array([int(json.loads(columns)["answer"]) for columns in each.columns]) for each in asked]
    for kind, values in KINDS.items():
        chosen = [np.flatnonzero(np.isin(answer_P, values)) for answer_P in answers]
        for k in (1, SERVED):
            cells = []
            for name in ("reference", "aware", "ordinary"):
                found = []
                for (ids, right_PA, laws), rows in zip(seeds, chosen, strict=True):
                    base = laws["reference"]
                    law = base if name == "reference" else at_kl(laws[name], base, nats)[0]
                    right_P = (np.exp(law)[:, :-1] * right_PA).sum(axis=1)[rows]
                    found.append(Trained([ids[row] for row in rows.tolist()], 100.0 * (1.0 - (1.0 - right_P) ** k)))
                cells.append(cell(found))
            mean = np.mean([rows.size for rows in chosen])
            print(f"| {kind} | {mean:.0f} | {k} | {' | '.join(cells)} |")


if __name__ == "__main__":
    folder, *seeds = sys.argv[1:]
    numbers = [int(seed) for seed in seeds]
    laws = [laws_of(Path(folder), number) for number in numbers]
    print_tables(numbers, laws, KLS)
    print_by_answer(Path(folder), numbers, laws, KLS[1])
