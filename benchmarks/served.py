"""What a vLLM serves of a plain policy of `letters.py`, beside its exact law, on 500 held-out prompts.

    vllm serve SEED/models/lora-aware --generation-config vllm …      # the policy's folder, with the adapter merged
    vllm serve REFERENCE --enable-lora --lora-modules NAME=SEED/models/lora-aware/adapter …    # the adapter by itself
    python benchmarks/served.py SEED/models/lora-aware [URL] [NAME]

SEED is the folder of a seed, and NAME what the server calls the policy, by default its folder. The server draws 32
responses per prompt. Prints how far its log-probabilities are from ours, and pass@8 of its draws and by our law. Exits
with 1 if the 95 % interval of their difference, paired by prompt, excludes 0. A few minutes on two idle cores.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from letters import packed
from pass_at_k import SERVED

from infalign.evaluation.intervals import estimate
from infalign.evaluation.pass_at_k import Metric
from infalign.models.packed import packing
from infalign.models.pretrained import load_policy
from infalign.rewards.checkers import math_verify
from infalign.sampling.engine import Sampling
from infalign.sampling.prompts import PromptTable
from infalign.sampling.server import ServerEngine, vocabulary_of

PROMPTS, K = 500, 32


@torch.no_grad()
def main() -> int:
    """Draw, compare and judge."""
    folder, *words = sys.argv[1:]
    url, name = [*words, *["http://127.0.0.1:8000", folder][len(words) :]]
    asked = PromptTable(Path(folder).parents[1] / "data" / "test_prompts.parquet", PROMPTS).read()
    answers = [json.loads(columns)["answer"] for columns in asked.columns]
    model, _ = load_policy(folder)
    with packing(model):
        law_PV = torch.cat([batch.logits(model).log_softmax(-1) for batch in packed(model, asked)])

    vocabulary = vocabulary_of(folder)
    texts = [vocabulary.tokenizer.decode([token]) for token in range(law_PV.shape[1])]
    numbers = [token for token, text in enumerate(texts) if any(map(str.isdigit, text))]  # no other one is right
    right = {answer: [t for t in numbers if any(math_verify([texts[t]], [answer]))] for answer in {*answers}}
    rate_P = np.array([float(law_PV[p, right[answer]].exp().sum()) for p, answer in enumerate(answers)])

    engine = ServerEngine(url, name, vocabulary, Sampling(1), seeded=False)
    place = {prompt_id: p for p, prompt_id in enumerate(asked.prompt_ids)}
    apart, right_PK = list[float](), np.zeros((len(answers), K), bool)
    for (prompt, _), responses in engine.sample_each((prompt, range(K)) for prompt in asked.asked()):
        p = place[prompt.prompt_id]
        drawn = [response.token_ids[0] for response in responses]
        apart += (law_PV[p, drawn] - torch.tensor([response.logprob for response in responses])).abs().tolist()
        right_PK[p] = np.isin(drawn, right[answers[p]])

    exact_P, found_P = 1.0 - (1.0 - rate_P) ** SERVED, Metric.parse(f"pass@{SERVED}").of_prompts(right_PK)
    print(
        f"log-probabilities: {np.mean(apart):.1e} nats apart on average, {max(apart):.1e} at most, {len(apart)} draws"
    )
    for what, values_P in (("drawn", found_P), ("by our law", exact_P), ("difference", found_P - exact_P)):
        found = estimate(values_P)
        print(f"pass@{SERVED} {what}: {100 * found.mean:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})")
    return int(not found.low <= 0.0 <= found.high)


if __name__ == "__main__":
    sys.exit(main())
