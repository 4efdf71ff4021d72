"""Draw many responses to a prompt fast: they share one computation and one cache of the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from infalign.core.errors import ConfigError, first_line
from infalign.models.attention import check_plain, odd_layers
from infalign.models.pretrained import eos_token_id, load_policy
from infalign.sampling.engine import (
    NO_POLICY,
    Asked,
    Engine,
    EngineSettings,
    Prompt,
    Response,
    Sampling,
    as_responses,
    check_evaluating,
    check_prompt,
    pick_tokens,
    token_uniforms,
)

if TYPE_CHECKING:
    from torch import Tensor


SUFFIX_BLOCK = 32
USE_GENERIC = "; set `rollout.engine.kind: transformers`, which is slower and takes any causal language model"


class SharedPrefixEngine:
    """Draw many responses to a prompt fast: they share one computation and one cache of the prompt.

    Takes any transformers decoder in which every layer attends to all earlier tokens through the attention interface
    (Llama, Qwen, Mistral without a window, Gemma, GPT-2, …); raises `ConfigError` for others. A response depends on
    (seed, prompt_id, index) only, up to rounding in matrix products, which depends on the batch size.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.eos = eos_token_id(tokenizer)
        _check_shares_prefix(model)

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return rollouts number ``indices`` of the prompt, in that order."""
        (found,) = self.sample_together([(Prompt(prompt_id, prompt_ids), indices)])
        return found

    def sample_together(self, asked: Sequence[Asked]) -> list[list[Response]]:
        """Return the rollouts of each of ``asked``, which are drawn in one batch."""
        import torch

        for (prompt_id, prompt_ids), _ in asked:
            check_prompt(prompt_ids, prompt_id, self.model, self.sampling)
        counts = [len(indices) for _, indices in asked]
        n, steps = sum(counts), self.sampling.max_new_tokens
        device = self.model.device
        streams = [token_uniforms(self.sampling, prompt.prompt_id, indices) for prompt, indices in asked]
        uniforms = torch.from_numpy(np.concatenate(streams)).to(device)
        tokens = torch.full((n, steps), self.eos, device=device)
        lengths = torch.full((n,), steps, device=device)
        logprobs = torch.zeros(n, dtype=torch.float64, device=device)
        rows = torch.arange(n, device=device)  # the response that each row of the batch belongs to
        done = torch.zeros(n, dtype=torch.bool, device=device)
        with torch.no_grad():
            after, prefixes = zip(*(prefill(self.model, prompt.token_ids) for prompt, _ in asked), strict=True)
            cache = _SharedPrefixCache(list(map(_layers, prefixes)), counts)
            logits = torch.cat([one.expand(count, -1) for one, count in zip(after, counts, strict=True)])
            with _attention(self.model, _register()):
                for step in range(steps):
                    picked, logprob = pick_tokens(logits, uniforms[rows, step], self.sampling)
                    picked = picked.where(~done, self.eos)
                    tokens[rows, step] = picked
                    logprobs[rows] += logprob.where(~done, 0.0)
                    ended = ~done & (picked == self.eos)
                    lengths[rows[ended]] = step + 1
                    done |= ended
                    left = len(rows) - int(done.sum())
                    if left == 0 or step == steps - 1:
                        break
                    if left <= 0.75 * len(rows):  # compacting the cache is costly, so not after every finished response
                        keep = (~done).nonzero()[:, 0]
                        rows, done, picked = rows[keep], done[keep], picked[keep]
                        cache.keep(keep)
                    logits = _decode(self.model, picked, cache)
        drawn = as_responses(tokens, lengths, logprobs, self.tokenizer)
        ends = list(accumulate(counts, initial=0))
        return [drawn[begin:end] for begin, end in pairwise(ends)]


Layers = list[tuple["Tensor", "Tensor"]]
"""Keys and values of each layer."""


class _SharedPrefixCache:
    """The KV cache: keys and values of each prompt once for all of its rows, and blocks for the rows' own tokens.

    The rows of a prompt follow each other, so many as ``counts`` says.

    Whole blocks are read, unused positions included: on a CPU that is 2-3 times faster than slices of one large buffer.
    Models call only ``update`` and ``get_seq_length`` of a cache.
    """

    def __init__(self, prefixes: list[Layers], counts: list[int]) -> None:
        self.prefixes, self.counts = prefixes, counts  # per prompt and layer; 1 × KV heads × P × width
        self.suffix: list[Layers] = [[] for _ in prefixes[0]]  # per layer and block; rows × KV heads × BLOCK × width
        self.length = 0  # number of own tokens per row

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one token to each row of a layer; `_attend` reads the blocks, so only the new token is returned."""
        blocks, place = self.suffix[layer_idx], self.length % SUFFIX_BLOCK
        if place == 0:
            blocks.append((_empty_block(key), _empty_block(value)))
        for block, new in zip(blocks[-1], (key, value), strict=True):
            block[:, :, place] = new[:, :, 0]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the one being computed, of the longest row."""
        return max(self.prefix_lengths) + self.length

    @property
    def prefix_lengths(self) -> list[int]:
        """The number of tokens of each prompt."""
        return [int(layers[0][0].shape[2]) for layers in self.prefixes]

    def layers_of(self, part: slice) -> _SharedPrefixCache:
        """Return some layers as a cache of their own, for one of the models of a guided policy."""
        found = _SharedPrefixCache([layers[part] for layers in self.prefixes], self.counts)
        found.suffix, found.length = self.suffix[part], self.length
        return found

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, in their order."""
        prompt_of = [prompt for prompt, count in enumerate(self.counts) for _ in range(count)]
        kept = Counter(prompt_of[row] for row in rows.tolist())
        self.prefixes = [self.prefixes[prompt] for prompt in kept]
        self.counts = list(kept.values())
        self.suffix = [[(keys[rows], values[rows]) for keys, values in blocks] for blocks in self.suffix]


def _empty_block(new: Tensor) -> Tensor:
    return new.new_zeros(*new.shape[:2], SUFFIX_BLOCK, new.shape[3])


def prefill(model: Any, prompt_ids: Sequence[int]) -> tuple[Tensor, Any]:
    """Return the logits after the prompt (1 × V) and its cache, by the model's normal attention."""
    import torch
    from transformers import DynamicCache

    ids = torch.tensor([list(prompt_ids)], device=model.device)
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits, cache


def _layers(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _decode(model: Any, tokens: Tensor, cache: _SharedPrefixCache) -> Tensor:
    """Append a token to each row and return the logits after it (rows × V)."""
    lengths = tokens.new_tensor(cache.prefix_lengths).repeat_interleave(tokens.new_tensor(cache.counts))
    positions = lengths[:, None] + cache.length
    out = model(
        input_ids=tokens[:, None],
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        shared_prefix=cache,  # models pass unknown keyword arguments on to the attention function
    )
    cache.length += 1
    logits: Tensor = out.logits[:, -1]
    return logits


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    shared_prefix: _SharedPrefixCache,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from one token per row (rows × heads × 1 × width) to the row's prompt and to its own tokens."""
    import torch
    from torch.nn.functional import pad

    check_plain(kwargs)
    prefixes = [layers[module.layer_idx] for layers in shared_prefix.prefixes]
    counts, longest = shared_prefix.counts, max(shared_prefix.prefix_lengths)
    blocks = shared_prefix.suffix[module.layer_idx]
    n, kv_heads, _, width = key.shape
    query = query.reshape(n, kv_heads, -1, width) * (width**-0.5 if scaling is None else scaling)
    group = query.shape[2]

    def by_prompt(rows: Tensor, of_prompts: Iterable[Tensor]) -> list[Tensor]:
        """Return the product of each prompt's rows, one per head for all of them, which makes the engine fast."""
        found = []
        for some, of_prompt in zip(torch.split(rows, counts), of_prompts, strict=True):
            heads = some[..., : of_prompt.shape[1]].transpose(0, 1).reshape(kv_heads, len(some) * group, -1)
            found.append((heads @ of_prompt).view(kv_heads, len(some), group, -1).transpose(0, 1))
        return found

    to_prompts = by_prompt(query, (keys[0].mT for keys, _ in prefixes))
    if len(prefixes) > 1:
        to_prompts = [pad(some, (0, longest - some.shape[-1]), value=-torch.inf) for some in to_prompts]
    scores = torch.cat((torch.cat(to_prompts), *(query @ keys.mT for keys, _ in blocks)), dim=-1)
    scores[..., longest + shared_prefix.length + 1 :] = -torch.inf  # mask the unused positions of the last block
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    to_prefix, *to_blocks = torch.split(weights, [longest] + [SUFFIX_BLOCK] * len(blocks), dim=-1)
    out = torch.cat(by_prompt(to_prefix, (values[0] for _, values in prefixes)))
    for to_block, (_, values) in zip(to_blocks, blocks, strict=True):
        out = out + to_block @ values
    return out.reshape(n, 1, kv_heads * group, -1), None


def _register() -> str:
    """Make `_attend` known to transformers and return its name.

    No mask function is registered with it, so models build no mask; `_attend` knows how long each prompt is.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("infalign_shared_prefix", _attend)
    return "infalign_shared_prefix"


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Use another attention implementation in ``model`` inside the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_shares_prefix(model: Any) -> None:
    """Raise `ConfigError` unless two tokens decoded on a shared prefix get the logits of a plain forward pass."""
    import torch

    check_evaluating(model)
    name = type(model).__name__
    if odd := odd_layers(model):
        raise ConfigError(f"{name} has layers without full attention ({odd}){USE_GENERIC}")
    ids = torch.arange(1, 6, device=model.device) % model.config.get_text_config(decoder=True).vocab_size
    try:
        with torch.no_grad():
            expected = model(input_ids=ids[None], use_cache=False).logits[0, -2:].float()
            _, prefix = prefill(model, ids[:3].tolist())
            cache = _SharedPrefixCache([_layers(prefix)], [2])
            with _attention(model, _register()):
                found = torch.stack([_decode(model, token.expand(2), cache)[1] for token in ids[3:]]).float()
    except Exception as error:  # a model without the attention interface can raise any exception
        raise ConfigError(f"{name} cannot share a prefix: {first_line(error)}{USE_GENERIC}") from error
    if expected.isnan().any():
        raise ConfigError(NO_POLICY)
    gap = float((found - expected).abs().max() / (1 + expected.abs().max()))
    if not gap <= torch.finfo(model.dtype).eps ** 0.5:
        raise ConfigError(f"{name} gives other logits with a shared prefix (relative gap {gap:.1e}){USE_GENERIC}")


class Settings(EngineSettings):
    """The default: the sampler of infalign, `SharedPrefixEngine`."""

    kind: Literal["shared-prefix"] = "shared-prefix"

    @contextmanager
    def opened(self, model: str, sampling: Sampling, device: Callable[[], str], probe: Prompt) -> Iterator[Engine]:
        """Yield the engine on the loaded model. Raises ConfigError for a model that it cannot sample from."""
        yield SharedPrefixEngine(*load_policy(model, device=device(), dtype=sampling.dtype), sampling)
