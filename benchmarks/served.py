"""What a vLLM serves of a plain policy of `letters.py`, beside its exact law, on 500 held-out prompts.

    NAME=SEED/models/last-layers-aware
    vllm serve $NAME --generation-config vllm …                                    # with the adapter merged
    vllm serve REFERENCE --enable-lora --lora-modules $NAME=$NAME/adapter …        # or by itself
    python benchmarks/served.py $NAME [URL]

SEED is the folder of a seed. The server, which calls the policy by its folder, draws 32 responses per prompt. Prints
how far its log-probabilities are from ours, and pass@8 of its draws and by our law. Exits with 1 if the 95 % interval
of their difference, paired by prompt, excludes 0. Minutes to an hour on two idle cores, by how fast vLLM draws there.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pass_at_k import SERVED
from run_files import test_prompts

from infalign import BestOfN, Policy, Rollouts, estimate, sample, score

PROMPTS, K = 500, 32
CHECKER = "infalign.rewards.checkers:math_verify"


def right_tokens(rollouts: Rollouts, tokenizer: Any, vocabulary: int) -> dict[str, np.ndarray]:
    """Return by answer which tokens are right, as the checker judges them for one prompt with this answer."""
    texts = [tokenizer.decode([token]) for token in range(vocabulary)]
    numbers = [token for token, text in enumerate(texts) if any(map(str.isdigit, text))]  # no other one is right
    answers = [json.loads(columns)["answer"] for columns in rollouts.asked["columns"].to_pylist()]
    asked = rollouts.asked.take([answers.index(answer) for answer in dict.fromkeys(answers)])
    said = [
        {
            "prompt_id": prompt,
            "index": i,
            "token_ids": [token],
            "text": texts[token],
            "finish": "length",
            "logprob": 0.0,
        }
        for prompt in asked["prompt_id"].to_pylist()
        for i, token in enumerate(numbers)
    ]
    drawn = pa.Table.from_pylist(said, schema=rollouts.drawn.schema)
    verdicts = score(CHECKER, replace(rollouts, asked=asked, drawn=drawn))
    return {answer: np.array(numbers)[row == 1] for answer, row in zip(dict.fromkeys(answers), verdicts, strict=True)}


@torch.no_grad()
def main() -> int:
    """Draw, compare and judge."""
    folder, url, *_ = [*sys.argv[1:], "http://127.0.0.1:8000"]
    asked = test_prompts(Path(folder).parents[1], PROMPTS)
    answers = [json.loads(columns)["answer"] for columns in asked["columns"]]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(asked["prompt"], answers, strict=True)]
    rollouts = sample(folder, rows, K, max_new_tokens=1, engine={"kind": "server", "url": url, "seed": "none"})
    model, tokenizer = Policy.of(folder)
    ids = rollouts.asked["token_ids"].to_pylist()
    law_PV = torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in ids]).numpy()

    right = right_tokens(rollouts, tokenizer, law_PV.shape[1])
    rate_P = np.array([np.exp(law_PV[p, right[answer]]).sum() for p, answer in enumerate(answers)])
    tokens_PK = np.reshape([token for (token,) in rollouts.drawn["token_ids"].to_pylist()], (-1, K))
    logprobs_PK = rollouts.drawn["logprob"].to_numpy().reshape(-1, K)
    apart_PK = np.abs(np.take_along_axis(law_PV, tokens_PK, axis=1) - logprobs_PK)
    right_PK = score(CHECKER, rollouts)

    found_P = (BestOfN(SERVED).weights(right_PK) * right_PK).sum(axis=1)
    exact_P = 1.0 - (1.0 - rate_P) ** SERVED
    print(
        f"log-probabilities: {apart_PK.mean():.1e} nats apart on average, {apart_PK.max():.1e} at most, {apart_PK.size}"
    )
    for what, values_P in (("drawn", found_P), ("by our law", exact_P), ("difference", found_P - exact_P)):
        found = estimate(values_P)
        print(f"pass@{SERVED} {what}: {100 * found.mean:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})")
    return int(not found.low <= 0.0 <= found.high)


if __name__ == "__main__":
    sys.exit(main())
