"""Compare `sample` with transformers' ``generate`` on a 3M-parameter Llama, one CPU thread.

Run ``python benchmarks/sampler.py [pairs]``. The two take turns in one process, and speeds are tokens per second of CPU
time, so that other work on the machine disturbs the ratio little. The target: at least 2.5 times as fast, with
log-probabilities of whole responses within 1e-5 of the model's own.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from small_models import llama, word_tokenizer, words
from transformers import GenerationConfig, LlamaForCausalLM

from infalign import Rollouts, sample

PROMPT = list(range(64))
NEW_TOKENS = 128
ROWS = 100
EOS = 4095
SHAPE = {
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def generate(model: LlamaForCausalLM) -> int:
    """Draw with ``generate`` and return the number of tokens."""
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    prompts = torch.tensor([PROMPT] * ROWS)
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    return int(((out[:, len(PROMPT) :] == EOS).cumsum(1) <= 1).sum())


def speed(draw: Callable[[], int]) -> float:
    """Return the tokens per second of CPU time of one call."""
    start = time.process_time()
    return draw() / (time.process_time() - start)


@torch.no_grad()
def largest_gap(model: LlamaForCausalLM, rollouts: Rollouts) -> float:
    """Return max |Δ| between the responses' log-probabilities and those of a plain forward pass."""
    gaps = []
    for response in rollouts.drawn.to_pylist():
        ids = torch.tensor([[*PROMPT, *response["token_ids"]]])
        logprobs = model(ids).logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1)
        own = logprobs.gather(1, ids[0, len(PROMPT) :, None]).sum()
        gaps.append(abs(float(own) - response["logprob"]))
    return max(gaps)


def main(pairs: int) -> None:
    """Print both speeds, their ratio over pairs of turns, and the largest difference to the model."""
    torch.set_num_threads(1)
    model, tokenizer = llama(EOS + 1, hidden=192, layers=5, **SHAPE), word_tokenizer(EOS + 1)
    print(f"{model.num_parameters():,} parameters, prompt {len(PROMPT)}, {NEW_TOKENS} new tokens, n = {ROWS}")
    drawn: list[Rollouts] = []

    def shared_prefix() -> int:
        drawn[:] = [sample((model, tokenizer), [words(PROMPT)], ROWS, max_new_tokens=NEW_TOKENS)]
        return sum(map(len, drawn[0].drawn["token_ids"].to_pylist()))

    turns = [(speed(shared_prefix), speed(lambda: generate(model))) for _ in range(pairs + 1)]
    speeds = turns[1:]  # the first warms up
    for name, values in zip(("shared prefix", "generate"), zip(*speeds, strict=True), strict=True):
        print(f"{name:>14}: {statistics.median(values):7,.0f} tokens/s")
    ratios = sorted(ours / theirs for ours, theirs in speeds)
    print(f"{'ratio':>14}: min {ratios[0]:.2f}, median {statistics.median(ratios):.2f}, max {ratios[-1]:.2f}")
    print(f"max |Δ log-probability| of a response: {largest_gap(model, drawn[0]):.1e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
