"""What guides and adapters cost beside training all of the reference: ``python benchmarks/guides.py [HIDDEN LAYERS]``.

Prints MiB of the weights, MiB in training (weights, gradients and AdamW's two moments), and tokens of responses a
second in training (packed, 4 prompts × 8 responses) and in draws (shared prefix, 32 responses), on one thread, for a
guide with a trunk of the reference's size, with an adapter of rank 16, and on the reference's states, computed or
stored, for all tokens or the 128 likeliest; for an adapter on the reference, and on its last third over stored states;
each with its ratio to training the reference itself. Random weights of a Llama; a few minutes for the default of 100 M
parameters.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from infalign.models.guided import GuidedForCausalLM
from infalign.models.packed import PackedBatch, packing
from infalign.models.scratch import train_tokenizer
from infalign.models.settings import Scratch
from infalign.models.top_layers import starting_from_states
from infalign.models.top_tokens import TopTokens
from infalign.sampling.engine import Sampling
from infalign.sampling.shared_prefix import SharedPrefixEngine

PROMPT, RESPONSE, ROUNDS, VOCABULARY, TOP_TOKENS = 64, 64, 3, 32000, 128


def reference(hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a random Llama."""
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=1, pad_token_id=0, **shape, **heads)).eval()


def with_trunk(base: LlamaForCausalLM) -> GuidedForCausalLM:
    """Return a guide with a trunk of the reference's size."""
    trunk = AutoModel.from_config(base.config)
    return GuidedForCausalLM.with_network(base, trunk)


def on_states(base: LlamaForCausalLM, top_tokens: int = 0) -> GuidedForCausalLM:
    """Return a guide on the states of three layers, which tells so many tokens apart."""
    return GuidedForCausalLM.with_side_network(base, hidden=192, layers=2, reads=3, top_tokens=top_tokens)


def adapted(base: PreTrainedModel, layers: int | None = None) -> Any:
    """Return the reference with an adapter of rank 16 on all or its last layers."""
    below = 0 if layers is None else base.config.num_hidden_layers - layers
    on = {"target_modules": "all-linear"}
    if below:
        on["exclude_modules"] = rf".*\.layers\.({'|'.join(map(str, range(below)))})\..*"
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32.0, task_type=TaskType.CAUSAL_LM, **on))


def last(base: LlamaForCausalLM) -> int:
    """Return a third of the layers."""
    return base.config.num_hidden_layers // 3


# Of each form the model, how many layers' states are stored, and how many last layers start from them.
FORMS: dict[str, Callable[[LlamaForCausalLM], tuple[Any, int, int]]] = {
    "reference, all trained": lambda base: (base, 0, 0),
    "guide, own trunk": lambda base: (with_trunk(base), 0, 0),
    "guide on states": lambda base: (on_states(base), 0, 0),
    "guide on stored states": lambda base: (on_states(base), 3, 0),
    "  for the likeliest 128": lambda base: (on_states(base, TOP_TOKENS), 3, 0),
    "adapter": lambda base: (adapted(base), 0, 0),
    "adapter, last third": lambda base: (adapted(base, last(base)), 0, 0),
    "adapter, stored states": lambda base: (adapted(base, last(base)), 1, last(base)),
}


def fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Print a row for each form, and its ratio to the reference."""
    hidden, layers = map(int, sys.argv[1:] or (640, 12))
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(["a b c"] * 9, Scratch(vocabulary=300))
    prompts = torch.randint(3, VOCABULARY, (4, PROMPT)).tolist()
    plain = PackedBatch.pack(
        [prompts[i // 8] for i in range(32)], torch.randint(3, VOCABULARY, (32, RESPONSE)).tolist()
    )
    top = TopTokens.of_logits(torch.randn(len(plain.targets), VOCABULARY), plain.targets, TOP_TOKENS)
    first: list[float] = []
    for name, form in FORMS.items():
        model, stored, started = form(reference(hidden, layers))
        states = torch.randn(len(plain.tokens), stored * hidden)
        is_apart = isinstance(model, GuidedForCausalLM) and model.config.guide.get("top_tokens")
        packed = replace(plain, states=states, top_tokens=top if is_apart else None) if stored else plain
        model.eval()
        weights = sum(weight.numel() for weight in model.parameters())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        engine = SharedPrefixEngine(model, tokenizer, Sampling(RESPONSE, seed=0))

        def step(model: Any = model, packed: PackedBatch = packed, started: int = started) -> None:
            with packing(model), starting_from_states(model, started) if started else nullcontext():
                packed.logprobs(model).sum().backward()
            model.zero_grad()

        drawn = sum(len(response.token_ids) for response in engine.sample(prompts[0], "p", range(32)))
        rates = [
            32 * RESPONSE / fastest(step),
            drawn / fastest(lambda engine=engine: engine.sample(prompts[0], "p", range(32))),
        ]
        row = [4 * weights / 2**20, 4 * (weights + 3 * trained) / 2**20, *rates]
        first = first or row
        said = [f"{value:,.0f} ({value / base:.2f})" for value, base in zip(row, first, strict=True)]
        units = ("MiB of weights", "MiB to train", "tokens/s trained", "tokens/s drawn")
        print(f"{name:24} " + "  ".join(f"{unit} {text}" for unit, text in zip(units, said, strict=True)), flush=True)


if __name__ == "__main__":
    main()
