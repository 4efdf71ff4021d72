"""Print the spread of log-ratios and of Rao–Blackwell's KL: ``python benchmarks/kl_estimators.py``.

A random Llama with 12 tokens and copies near and far from it, on the same samples; the exact KL sums over all 16,105
responses. Exits with 1 if a mean is more than 4 standard errors off, or the Rao–Blackwellised estimate is not the one
that varies least. One thread.
"""

import copy
import itertools
import math
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infalign import rao_blackwell_kl

VOCABULARY, EOS, LENGTH, PROMPT = 12, 1, 4, [2, 5]
SAMPLES = 4000
NOISES = 0.01, 0.05  # standard deviations of the change of a weight; weights have 0.3


def pair(noise: float) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a reference and a policy, which is a perturbed copy."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        eos_token_id=EOS,
    )
    reference = LlamaForCausalLM(config).eval()
    policy = copy.deepcopy(reference)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += noise * torch.randn_like(weight)
    return reference, policy


def every_response() -> list[list[int]]:
    """Return all responses: up to the first EOS, or ``LENGTH`` tokens without one."""
    others = [token for token in range(VOCABULARY) if token != EOS]
    ended = [[*body, EOS] for n in range(LENGTH) for body in itertools.product(others, repeat=n)]
    return ended + [list(body) for body in itertools.product(others, repeat=LENGTH)]


@torch.no_grad()
def logprobs(model: LlamaForCausalLM, responses: list[list[int]]) -> np.ndarray:
    """Return the log-probability of each response after the prompt."""
    padded = torch.tensor([[*response, *[EOS] * (LENGTH - len(response))] for response in responses])
    given = torch.cat([torch.tensor([PROMPT]).expand(len(padded), -1), padded], dim=1)
    found = model(given, logits_to_keep=LENGTH + 1).logits[:, :-1].log_softmax(-1).gather(-1, padded[..., None])[..., 0]
    said = torch.arange(LENGTH) < torch.tensor([*map(len, responses)])[:, None]
    return (found * said).sum(1).numpy()


def spread(noise: float) -> bool:
    """Print mean and standard deviation of the estimates, and return whether they are right."""
    reference, policy = pair(noise)
    responses = every_response()
    log_q, log_p = (logprobs(model.double(), responses) for model in (reference, policy))
    exact = np.exp(log_p) @ (log_p - log_q)
    places = np.random.default_rng(0).choice(len(responses), SAMPLES, p=np.exp(log_p) / np.exp(log_p).sum())
    drawn = [responses[place] for place in places]
    found = {
        "log-ratio": (log_p - log_q)[places],
        "Rao–Blackwell": rao_blackwell_kl(policy, reference, [PROMPT] * SAMPLES, drawn, batch_tokens=16384),
    }
    print(f"weights moved by {noise}; {SAMPLES:,} samples of {np.mean([*map(len, drawn)]):.2f} tokens on average")
    print(f"{'':16}{'mean':>9}{'± s.e.':>9}{'s.d.':>9}   samples needed, of Rao–Blackwell's")
    print(f"{'exact':16}{exact:9.5f}")
    right = True
    deviations = {name: kl.std(ddof=1) for name, kl in found.items()}
    for name, deviation in deviations.items():
        mean, error = found[name].mean(), deviation / math.sqrt(SAMPLES)
        more = (deviation / deviations["Rao–Blackwell"]) ** 2
        print(f"{name:16}{mean:9.5f}{error:9.5f}{deviation:9.5f}   {more:.1f} ×")
        right &= abs(mean - exact) < 4 * error
    return right and deviations["Rao–Blackwell"] == min(deviations.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(not all([*map(spread, NOISES)]))
