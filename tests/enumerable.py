"""A real language model whose responses can all be listed, so that every law about it is exact.

Responses have two tokens at most: seven letters and the end make 57 of them. Prompts have letters of their own, which
a bias of the output layer keeps out of responses. Reference and rewards are arbitrary, and differ between prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

from infalign.calibration import Array
from infalign.finite import FiniteModel
from infalign.likelihood import token_logprobs
from infalign.procedures import BestOfN, Distortion, WorstOfN
from infalign.rollouts import load_policy
from infalign.training.common import save_model
from infalign.transforms import Transformation, normalised_beta

PAD, START, END = "<pad>", "<start>", "<end>"
LETTERS, PROMPT_LETTERS = "abcdefg", "pqrs"
PROMPTS = ("p q", "q r s", "r p p")
COPIES = 10  # of each prompt, under different names: one of ten prompts is held out, and it must not be a new one
NEVER = -1e4  # a logit whose probability rounds to 0


@dataclass(frozen=True)
class Enumerable:
    """The saved reference, its prompts and responses as token ids, its law and the rewards."""

    folder: Path
    prompt_ids: list[list[int]]
    responses: list[list[int]]
    log_reference: Array  # (P, Y), nats
    rewards: Array  # (P, Y), distinct within a prompt

    def finite(self) -> list[FiniteModel]:
        """Return each prompt as a finite model."""
        return [
            FiniteModel(np.exp(row), rewards) for row, rewards in zip(self.log_reference, self.rewards, strict=True)
        ]

    def laws(self, model: Any) -> Array:
        """Return log π of every response to every prompt, shape (P, Y), in nats."""
        p, y = self.log_reference.shape
        return _laws(model, self.prompt_ids, self.responses).reshape(p, y)

    def rollouts(self, k: int) -> list[dict[str, Any]]:
        """Return k rollouts of each of the copies of each prompt, as a run stores them.

        They are drawn systematically: a response of probability p is drawn k·p times, rounded up or down, and all
        copies together are one systematic draw of k × ``COPIES``.
        """
        rows: list[dict[str, Any]] = []
        for copy in range(COPIES):
            points = (np.arange(k) + (copy + 0.5) / COPIES) / k
            for p, logprobs in enumerate(self.log_reference):
                cdf = np.exp(logprobs).cumsum()
                drawn = np.searchsorted(cdf / cdf[-1], points)
                rows += [
                    {
                        "prompt_id": f"{PROMPTS[p]} {copy}",
                        "prompt_ids": self.prompt_ids[p],
                        "completion_ids": self.responses[y],
                        "reference_logprob": float(logprobs[y]),
                        "reward": float(self.rewards[p, y]),
                    }
                    for y in drawn
                ]
        # the copies that are held out, every tenth name, are one of each prompt
        return sorted(rows, key=lambda row: (row["prompt_id"][:-2], row["prompt_id"]))


def enumerable(folder: Path, *, seed: int = 0) -> Enumerable:
    """Save a tiny random causal language model to ``folder`` and return all that there is to know about it."""
    vocabulary = {word: i for i, word in enumerate([PAD, START, END, *LETTERS, *PROMPT_LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, vocabulary[START])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END, model_max_length=16
    )
    torch.manual_seed(seed)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            initializer_range=0.1,  # log-probabilities that spread over some nats
            pad_token_id=vocabulary[PAD],
            bos_token_id=vocabulary[START],
            eos_token_id=vocabulary[END],
        )
    )
    letters = [vocabulary[letter] for letter in LETTERS]
    end = vocabulary[END]
    with torch.no_grad():
        never = torch.full((len(vocabulary),), NEVER)
        never[[*letters, end]] = 0.0
        model.lm_head.bias.copy_(never)
    save_model(model, tokenizer, folder)
    prompt_ids = [list(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    responses = [[end], *([letter, end] for letter in letters), *([a, b] for a in letters for b in letters)]
    reference, _ = load_policy(folder)
    logprobs = _normalised(
        _laws(reference, prompt_ids, responses).reshape(len(PROMPTS), -1)
    )  # but for rounding, it was
    rng = np.random.default_rng(seed)
    first, second, own = (rng.normal(size=(len(PROMPTS), size)) for size in (len(vocabulary),) * 2 + (len(responses),))
    rewards = first[:, [ids[0] for ids in responses]] + second[:, [ids[-1] for ids in responses]] + 0.3 * own
    return Enumerable(folder, prompt_ids, responses, logprobs, rewards)


def _laws(model: Any, prompt_ids: list[list[int]], responses: list[list[int]]) -> Array:
    prompts = [prompt for prompt in prompt_ids for _ in responses]
    return token_logprobs(model, prompts, responses * len(prompt_ids), pad_id=0, batch_tokens=4096)


# What a method would learn if it could be any distribution


def tilted(case: Enumerable, transform: Transformation, beta: float) -> Array:
    """Return log π* of π* = π_ref·e^{Φ(C)/β}/Z, (P, Y), with exact calibration and β for the paper's raw Φ."""
    phi = np.stack([transform(model.calibrated()) for model in case.finite()])
    return _normalised(case.log_reference + phi / normalised_beta(transform, beta))


def best_of_n(case: Enumerable, n: int) -> Array:
    """Return the log-law of what Best-of-n serves, (P, Y)."""
    return np.log([model.served(model.reference, BestOfN(n)) for model in case.finite()])


def pair_optimum(case: Enumerable, tau: float, *, length_averaged: bool = False) -> Array:
    """Return the log-law that minimises the expected loss of IPO over independent pairs, found numerically, (P, Y)."""
    lengths = torch.tensor([len(ids) for ids in case.responses]).double()
    scale = lengths if length_averaged else torch.ones_like(lengths)

    def loss(h: torch.Tensor, p: int) -> torch.Tensor:
        reference, rewards = torch.tensor(np.exp(case.log_reference[p])), torch.tensor(case.rewards[p])
        label = torch.sign(rewards[:, None] - rewards) / (2.0 * tau)
        ratio = h / scale
        return reference @ (ratio[:, None] - ratio - label).square() @ reference

    return _tabular(case, loss)


def best_worst_optimum(case: Enumerable, n: int, *, alpha: float = 0.005, released_code: bool = False) -> Array:
    """Return the log-law that minimises the expected loss of BoNBoN, found numerically, (P, Y)."""
    margin = (n - 1) * sum(1.0 / k for k in range(1, n))

    def loss(h: torch.Tensor, p: int) -> torch.Tensor:
        # P(worst ≥ a, best ≤ b) = P(a..b)^n; its differences are the joint law of the two (rewards are distinct)
        ranks = case.rewards[p].argsort()
        edges = np.append(0.0, np.exp(case.log_reference[p][ranks]).cumsum())
        within = np.maximum(edges[None, :] - edges[:, None], 0.0) ** n
        joint = torch.tensor(within[:-1, 1:] - within[1:, 1:] - within[:-1, :-1] + within[1:, :-1])
        joint = joint.clamp(min=0.0)
        worst, best = h[ranks.copy()][:, None], h[ranks.copy()][None, :]
        gap = best - worst
        contrast = torch.nn.functional.softplus(-gap / (2.0 * margin)) if released_code else (gap - margin).square()
        contrast = contrast.masked_fill(torch.eye(len(ranks), dtype=torch.bool), 0.0)  # one response is both
        return (joint * (-alpha * best + (1.0 - alpha) * contrast)).sum()

    return _tabular(case, loss)


def _tabular(case: Enumerable, loss: Callable[[torch.Tensor, int], torch.Tensor]) -> Array:
    """Return log π of the policy with the least loss of h = log π/π_ref, prompt by prompt, (P, Y)."""
    laws = []
    for p, logprobs in enumerate(case.log_reference):
        reference = torch.tensor(logprobs)

        def value(theta: Array, p: int = p, reference: torch.Tensor = reference) -> tuple[float, Array]:
            logits = torch.tensor(theta, requires_grad=True)
            found = loss((reference + logits).log_softmax(0) - reference, p)
            found.backward()
            assert logits.grad is not None
            return found.item(), logits.grad.numpy()

        options = {"maxiter": 20000, "maxfun": 40000, "gtol": 1e-9, "ftol": 1e-15}
        theta = minimize(value, np.zeros(len(logprobs)), jac=True, method="L-BFGS-B", options=options).x
        laws.append(_normalised(logprobs + theta))
    return np.stack(laws)


def _normalised(logits: Array) -> Array:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


# Comparing laws


def kl(log_p_PY: Array, log_q_PY: Array) -> float:
    """Return KL(p ‖ q), the mean over prompts, in nats."""
    return float((np.exp(log_p_PY) * (log_p_PY - log_q_PY)).sum(1).mean())


def win_rate(case: Enumerable, log_policy_PY: Array, procedure: Distortion) -> float:
    """Return the exact win rate against the reference, both served by ``procedure``, the mean over prompts."""
    policies = np.exp(_normalised(log_policy_PY))
    return float(np.mean([model.win_rate(row, procedure) for model, row in zip(case.finite(), policies, strict=True)]))


def row(case: Enumerable, log_policy_PY: Array) -> tuple[float, float, float]:
    """Return KL(π ‖ π_ref), Best-of-4 and Worst-of-4 win rate."""
    served = (win_rate(case, log_policy_PY, procedure) for procedure in (BestOfN(4), WorstOfN(4)))
    return (kl(log_policy_PY, case.log_reference), *served)  # type: ignore[return-value]
