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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from small_models import llama, word_tokenizer, words
from torch import Tensor
from transformers import AutoModel, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from infalign import Rollouts, sample
from infalign.models.guided import GuidedForCausalLM  # without the training that `fit` and a recipe add
from infalign.models.packed import PackedBatch, StoredStates, packing  # the passes of a training, measured alone
from infalign.models.top_layers import starting_from_states  # the same

PROMPT, RESPONSE, ROUNDS, VOCABULARY, TOP_TOKENS = 64, 64, 3, 32000, 128


def reference(hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a random Llama."""
    heads = hidden // 64
    return llama(VOCABULARY, hidden, layers, num_attention_heads=heads, num_key_value_heads=heads)


def with_trunk(base: PreTrainedModel, config: PreTrainedConfig | None = None, top_tokens: int = 0) -> GuidedForCausalLM:
    """Return a guide with a new trunk, by default of the reference's size."""
    trunk = AutoModel.from_config(config or base.config)
    return GuidedForCausalLM.with_network(base, trunk, top_tokens)


def on_states(base: PreTrainedModel, top_tokens: int = 0) -> GuidedForCausalLM:
    """Return a guide on the states of three layers, which tells so many tokens apart."""
    return GuidedForCausalLM.with_side_network(base, hidden=192, layers=2, reads=3, top_tokens=top_tokens)


def adapted(base: PreTrainedModel, layers: int | None = None) -> Any:
    """Return the reference with an adapter of rank 16 on all or its last layers."""
    below = 0 if layers is None else base.config.num_hidden_layers - layers
    on = {"target_modules": "all-linear"}
    if below:
        on["exclude_modules"] = rf".*\.layers\.({'|'.join(map(str, range(below)))})\..*"
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32.0, task_type=TaskType.CAUSAL_LM, **on))


def last_third(base: LlamaForCausalLM) -> int:
    """Return a third of the layers."""
    return base.config.num_hidden_layers // 3


# Of each form the model, whether states of the reference are stored, and how many last layers start from them.
FORMS: dict[str, Callable[[LlamaForCausalLM], tuple[Any, bool, int]]] = {
    "reference, all trained": lambda base: (base, False, 0),
    "guide, own trunk": lambda base: (with_trunk(base), False, 0),
    "guide on states": lambda base: (on_states(base), False, 0),
    "guide on stored states": lambda base: (on_states(base), True, 0),
    "  for the likeliest 128": lambda base: (on_states(base, TOP_TOKENS), True, 0),
    "adapter": lambda base: (adapted(base), False, 0),
    "adapter, last third": lambda base: (adapted(base, last_third(base)), False, 0),
    "adapter, stored states": lambda base: (adapted(base, last_third(base)), True, last_third(base)),
}


def fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def pack(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: Any = "cpu",
    states: Sequence[Tensor] = (),
) -> PackedBatch:
    """Return responses with their prompts, each of which is computed once, and stored states of both, if there are."""
    pairs = zip(states, responses, strict=True) if states else ()
    stored = [StoredStates(*of.split([len(of) - len(said), len(said)])) for of, said in pairs]
    return PackedBatch.pack(prompts, responses, stored=stored).to(device)


@torch.no_grad()
def logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """Return the log-probability of each response by a packed pass."""
    with packing(model):
        return batch.logprobs(model)


@torch.no_grad()
def token_logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """Return log π of every token, or class of tokens, at each token of the responses."""
    with packing(model):
        return batch.logits(model).log_softmax(-1)


@torch.no_grad()
def with_stored(model: Any, batch: PackedBatch, last: int = 0) -> PackedBatch:
    """Return a batch with what is stored of the reference: states that a guide reads, or those below last layers."""
    with packing(model):
        if not last:
            return model.read_once(batch)
        found = batch.run(model.base_model, output_hidden_states=True).hidden_states
        return replace(batch, states=found[model.config.num_hidden_layers - last][0])


def gradients(model: Any, batches: Sequence[PackedBatch], last: int = 0) -> None:
    """Compute the gradients of the log-probabilities; of the last layers only, over stored states."""
    with packing(model), starting_from_states(model, last) if last else nullcontext():
        for batch in batches:
            batch.logprobs(model).sum().backward()


def main() -> None:
    """Print a row for each form, and its ratio to the reference."""
    hidden, layers = map(int, sys.argv[1:] or (640, 12))
    torch.set_num_threads(1)
    tokenizer, rng = word_tokenizer(VOCABULARY), torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY - 1, (4, PROMPT), generator=rng).tolist()
    responses = torch.randint(VOCABULARY - 1, (32, RESPONSE), generator=rng).tolist()
    plain = pack([prompts[i // 8] for i in range(32)], responses)
    first: list[float] = []
    for name, form in FORMS.items():
        base = reference(hidden, layers)
        model, stored, last = form(base)
        packed = with_stored(base if last else model, plain, last) if stored else plain
        model.eval()
        weights = sum(weight.numel() for weight in model.parameters())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)

        def step(model: Any = model, packed: PackedBatch = packed, last: int = last) -> None:
            gradients(model, [packed], last)
            model.zero_grad()

        def draw(model: Any = model) -> Rollouts:
            return sample((model, tokenizer), [words(prompts[0])], 32, max_new_tokens=RESPONSE)

        drawn = sum(map(len, draw().drawn["token_ids"].to_pylist()))
        rates = [32 * RESPONSE / fastest(step), drawn / fastest(draw)]
        row = [4 * weights / 2**20, 4 * (weights + 3 * trained) / 2**20, *rates]
        first = first or row
        said = [f"{value:,.0f} ({value / base:.2f})" for value, base in zip(row, first, strict=True)]
        units = ("MiB of weights", "MiB to train", "tokens/s trained", "tokens/s drawn")
        print(f"{name:24} " + "  ".join(f"{unit} {text}" for unit, text in zip(units, said, strict=True)), flush=True)


if __name__ == "__main__":
    main()
