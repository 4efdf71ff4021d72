"""Print the tokens per second of our rollouts from a vLLM server over those of asking it directly.

    .venv-vllm/bin/vllm serve MODEL --generation-config vllm   # of `make test-vllm`, or any other vLLM
    python benchmarks/vllm_throughput.py MODEL [URL]

"ours" is what a run does: the engine `server`, its checks of every answer, texts, Parquet shards. "directly" posts the
same bodies (token ids and log-probabilities of 8 responses of up to 32 tokens), as many at once, and counts the tokens.
The two take turns. Exits with 1 if the median of their ratios is below .9.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import numpy as np
from transformers import AutoTokenizer

from infalign import sample

PROMPTS, K, PROMPT_WORDS, TOKENS, IN_FLIGHT, ROUNDS, LIMIT = 32, 8, 32, 32, 16, 7, 0.9


def directly(url: str, model: str, tokenizer: Any, prompts: Sequence[str]) -> int:
    """Return the number of tokens that a bare client gets."""
    body = {"model": model, "n": K, "max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    body |= {"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "stop_token_ids": [tokenizer.eos_token_id]}
    body |= {"logprobs": 1, "return_token_ids": True}
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]

    async def ask_all() -> int:
        turns = asyncio.Semaphore(IN_FLIGHT)
        async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=IN_FLIGHT)) as client:

            async def ask(prompt: Sequence[int]) -> int:
                async with turns:
                    answer = await client.post(f"{url}/v1/completions", json=body | {"prompt": prompt})
                return sum(len(choice["token_ids"]) for choice in answer.raise_for_status().json()["choices"])

            return sum(await asyncio.gather(*map(ask, ids)))

    return asyncio.run(ask_all())


def ours(url: str, model: str, tokenizer: Any, prompts: Sequence[str]) -> int:
    """Return the number of tokens that we draw and store."""
    engine = {"kind": "server", "url": url, "in_flight": IN_FLIGHT, "seed": "none"}
    rollouts = sample(model, prompts, K, max_new_tokens=TOKENS, engine=engine)
    return sum(map(len, rollouts.drawn["token_ids"].to_pylist()))


def main() -> int:
    """Measure, print and judge."""
    model, url, *_ = [*sys.argv[1:], "http://127.0.0.1:8000"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng, words = np.random.default_rng(0), sorted(word for word in tokenizer.get_vocab() if word.isalpha())
    ratios = []
    print(f"{'':8}{'directly':>10}{'ours':>10}  tokens a second")
    for turn in range(-1, ROUNDS):  # the first is for imports, and for what a server does once
        speeds = []
        for way in (directly, ours) if turn % 2 else (ours, directly):
            prompts = [" ".join(rng.choice(words, PROMPT_WORDS).tolist()) for _ in range(PROMPTS)]
            start = time.perf_counter()
            speeds.append((way.__name__, way(url, model, tokenizer, prompts) / (time.perf_counter() - start)))
        found = dict(speeds)
        if turn >= 0:
            ratios.append(found["ours"] / found["directly"])
            print(f"{turn + 1:<8}{found['directly']:>10.0f}{found['ours']:>10.0f}{ratios[-1]:>8.2f}", flush=True)
    median = statistics.median(ratios)
    print(f"median ratio {median:.2f} ({min(ratios):.2f}–{max(ratios):.2f}), at least {LIMIT}")
    return int(median < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
