"""Engines that draw responses from a policy.

What is drawn *is* the policy: temperature 1 and no truncation unless asked for, and no setting of a model folder or a
server applies silently. Tokens are picked by inverse CDF from a random stream of each response's own, so K can grow
without redrawing. Needs the ``train`` extra; `ServerEngine` the ``serve`` extra.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from infalign.errors import ConfigError, DataError, PartialError, first_line
from infalign.pretrained import eos_token_id
from infalign.remote import may_pass, post, quoted

if TYPE_CHECKING:
    from torch import Tensor

CDF_BLOCK = 64
SUFFIX_BLOCK = 32
NO_POLICY = "the model gives NaN or infinite logits, so it defines no policy; use an earlier checkpoint"
USE_GENERIC = "; set `rollout.engine.kind: transformers`, which is slower and takes any causal language model"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that responses are drawn from; every field reaches the engine explicitly.

    ``top_k``, ``min_p`` and ``repetition_penalty`` are always off. Raises `ConfigError` for a value out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be positive and finite (1 draws from the policy)"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1] (1 draws from the policy)")


@dataclass(frozen=True, slots=True)
class Response:
    """One response: its token ids with the EOS that ended it, and its text without special tokens.

    ``finish`` is ``"stop"`` (EOS) or ``"length"``; ``logprob`` is Σ log-probability of ``token_ids`` under the
    distribution that was sampled, NaN where the engine gives none.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: str
    logprob: float


class Prompt(NamedTuple):
    """A prompt as the model sees it; ``prompt_id`` names it in every table and keys its random streams."""

    prompt_id: str
    token_ids: Sequence[int]


class Engine(Protocol):
    """Anything that draws responses to a prompt."""

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return rollouts number ``indices`` of the prompt, in that order."""
        ...


def _check_prompt(prompt_ids: Sequence[int], prompt_id: str, model: Any, sampling: Sampling) -> None:
    """Raise if ``model`` cannot answer the prompt with ``max_new_tokens`` tokens."""
    _check_not_empty(prompt_ids, prompt_id)
    _check_evaluating(model)
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and len(prompt_ids) + sampling.max_new_tokens > context:
        raise DataError(
            f"prompt {prompt_id!r} has {len(prompt_ids)} tokens, which with max_new_tokens {sampling.max_new_tokens} "
            f"exceeds the model's context of {context}; drop the prompt or lower max_new_tokens"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < config.vocab_size:
        raise DataError(f"prompt {prompt_id!r} has token ids outside the model's vocabulary of {config.vocab_size}")


def _check_evaluating(model: Any) -> None:
    if model.training:
        raise ConfigError("the model is in training mode, so dropout would change the policy; call model.eval()")


def _check_not_empty(prompt_ids: Sequence[int], prompt_id: str) -> None:
    if len(prompt_ids) == 0:
        raise DataError(f"prompt {prompt_id!r} is empty; give it at least a BOS token or drop it")


# Sampling


def _uniforms(sampling: Sampling, prompt_id: str, indices: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return one uniform on [0, 1) for each response and token (indices × max_new_tokens), from Philox streams."""

    def stream(index: int) -> np.random.Generator:
        name = json.dumps([sampling.seed, prompt_id, int(index)]).encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
        return np.random.Generator(np.random.Philox(key=key))

    return np.stack([stream(index).random(sampling.max_new_tokens) for index in indices])


def _pick(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return a token and its log-probability for each row of ``logits`` (rows × V), by inverse CDF at ``uniforms``."""
    import torch
    from torch.nn.functional import pad

    logits = logits.float() if sampling.temperature == 1 else logits.float() / sampling.temperature
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        probabilities = probabilities.scatter(-1, order, ordered.where(before < sampling.top_p, 0.0))
    # In two levels, a block of tokens and then a token: a running sum over the vocabulary is slow and rounds more.
    padding = -probabilities.shape[-1] % CDF_BLOCK
    padded = pad(probabilities, (0, padding)) if padding else probabilities
    blocks = padded.view(len(padded), -1, CDF_BLOCK)
    mass = blocks.sum(dim=-1).double()
    cdf = mass.cumsum(dim=-1)
    target = uniforms[:, None] * cdf[:, -1:]
    # right=True steps over what has probability 0; only NaN reaches the clamps, and `_responses` reports it.
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)
    inside = blocks.take_along_dim(block[..., None], dim=1)[:, 0].double().cumsum(dim=-1)
    fraction = (target - (cdf - mass).gather(-1, block)) / mass.gather(-1, block)
    below = (fraction * inside[:, -1:]).minimum(inside[:, -1:].nextafter(inside.new_zeros(())))
    tokens = block * CDF_BLOCK + torch.searchsorted(inside, below, right=True)
    tokens.clamp_(max=probabilities.shape[-1] - 1)
    return tokens[:, 0], (probabilities.gather(-1, tokens).double() / cdf[:, -1:]).log()[:, 0]


def _responses(tokens: Tensor, lengths: Tensor, logprobs: Tensor, tokenizer: Any) -> list[Response]:
    """Return rows of ``tokens`` (responses × T), cut to ``lengths``, as responses."""
    if not logprobs.isfinite().all():
        raise ConfigError(NO_POLICY)
    ids = [tuple(row[:length]) for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    finishes = ["stop" if row[-1] == tokenizer.eos_token_id else "length" for row in ids]
    return [Response(*fields) for fields in zip(ids, texts, finishes, logprobs.tolist(), strict=True)]


class SharedPrefixEngine:
    """Draw many responses to one prompt fast: the prompt is computed and kept once for all of them.

    Takes any transformers decoder in which every layer attends to all earlier tokens through the attention interface
    (Llama, Qwen, Mistral without a window, Gemma, GPT-2, …); raises `ConfigError` for others. A response depends on
    (seed, prompt_id, index) only, up to the rounding of matrix products in batches of another size.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.eos = eos_token_id(tokenizer)
        _check_shares_prefix(model)

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return rollouts number ``indices`` of the prompt, in that order."""
        import torch

        _check_prompt(prompt_ids, prompt_id, self.model, self.sampling)
        n, steps = len(indices), self.sampling.max_new_tokens
        device = self.model.device
        uniforms = torch.from_numpy(_uniforms(self.sampling, prompt_id, indices)).to(device)
        tokens = torch.full((n, steps), self.eos, device=device)
        lengths = torch.full((n,), steps, device=device)
        logprobs = torch.zeros(n, dtype=torch.float64, device=device)
        rows = torch.arange(n, device=device)  # the response that each row of the batch belongs to
        done = torch.zeros(n, dtype=torch.bool, device=device)
        with torch.no_grad():
            logits, prefix = _prefill(self.model, prompt_ids)
            cache = _SharedPrefixCache(prefix)
            logits = logits.expand(n, -1)
            with _attention(self.model, _register()):
                for step in range(steps):
                    picked, logprob = _pick(logits, uniforms[rows, step], self.sampling)
                    picked = picked.where(~done, self.eos)
                    tokens[rows, step] = picked
                    logprobs[rows] += logprob.where(~done, 0.0)
                    ended = ~done & (picked == self.eos)
                    lengths[rows[ended]] = step + 1
                    done |= ended
                    left = len(rows) - int(done.sum())
                    if left == 0 or step == steps - 1:
                        break
                    if left <= 0.75 * len(rows):  # moving the cache costs, so not at every end
                        keep = (~done).nonzero()[:, 0]
                        rows, done, picked = rows[keep], done[keep], picked[keep]
                        cache.keep(keep)
                    logits = _decode(self.model, picked, cache)
        return _responses(tokens, lengths, logprobs, self.tokenizer)


Layers = list[tuple["Tensor", "Tensor"]]
"""Keys and values of each layer."""


class _SharedPrefixCache:
    """The running cache: keys and values of the prompt once for all rows, and blocks for the rows' own tokens.

    Blocks are read whole, unused places included: on a CPU that is 2-3 times faster than slices of one large buffer.
    Models ask a cache for no more than ``update`` and ``get_seq_length``.
    """

    def __init__(self, prefix: Layers) -> None:
        self.prefix = prefix  # of each layer; 1 × KV heads × P × width
        self.suffix: list[Layers] = [[] for _ in prefix]  # of each layer and block; rows × KV heads × BLOCK × width
        self.length = 0  # own tokens of each row

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one token to each row of a layer; `_attend` reads the blocks, so what is returned is the new token."""
        blocks, place = self.suffix[layer_idx], self.length % SUFFIX_BLOCK
        if place == 0:
            blocks.append((_empty_block(key), _empty_block(value)))
        for block, new in zip(blocks[-1], (key, value), strict=True):
            block[:, :, place] = new[:, :, 0]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the one being computed."""
        return int(self.prefix[0][0].shape[2]) + self.length

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.suffix = [[(keys[rows], values[rows]) for keys, values in blocks] for blocks in self.suffix]


def _empty_block(new: Tensor) -> Tensor:
    return new.new_zeros(*new.shape[:2], SUFFIX_BLOCK, new.shape[3])


def _prefill(model: Any, prompt_ids: Sequence[int]) -> tuple[Tensor, Layers]:
    """Return the logits after the prompt (1 × V) and its keys and values, by the model's normal attention."""
    import torch
    from transformers import DynamicCache

    ids = torch.tensor([list(prompt_ids)], device=model.device)
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits, [(layer.keys, layer.values) for layer in cache.layers]


def _decode(model: Any, tokens: Tensor, cache: _SharedPrefixCache) -> Tensor:
    """Append a token to each row and return the logits after it (rows × V)."""
    positions = tokens.new_full((1, 1), cache.get_seq_length())
    out = model(
        input_ids=tokens[:, None],
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        shared_prefix=cache,  # models hand keywords they do not know to the attention function
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
    """Attend from one token a row (rows × heads × 1 × width) to the shared prefix and to the row's own tokens."""
    import torch

    for name in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"its attention uses {name}")
    prefix_keys, prefix_values = (tensor[0] for tensor in shared_prefix.prefix[module.layer_idx])
    blocks = shared_prefix.suffix[module.layer_idx]
    n, kv_heads, _, width = key.shape
    query = query.reshape(n, kv_heads, -1, width) * (width**-0.5 if scaling is None else scaling)
    group, prefix_length = query.shape[2], prefix_keys.shape[1]

    def by_head(rows: Tensor) -> Tensor:  # one matrix product a head for all rows together: the point of the engine
        return rows.transpose(0, 1).reshape(kv_heads, n * group, -1)

    def by_row(heads: Tensor) -> Tensor:
        return heads.view(kv_heads, n, group, -1).transpose(0, 1)

    prefix_scores = by_row(by_head(query) @ prefix_keys.mT)
    scores = torch.cat((prefix_scores, *(query @ keys.mT for keys, _ in blocks)), dim=-1)
    scores[..., prefix_length + shared_prefix.length + 1 :] = -torch.inf  # the unused places of the last block
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    to_prefix, *to_blocks = torch.split(weights, [prefix_length] + [SUFFIX_BLOCK] * len(blocks), dim=-1)
    out = by_row(by_head(to_prefix) @ prefix_values)
    for to_block, (_, values) in zip(to_blocks, blocks, strict=True):
        out = out + to_block @ values
    return out.reshape(n, 1, kv_heads * group, -1), None


def _register() -> str:
    """Make `_attend` known to transformers and return its name.

    No mask function is registered with it, so models build no mask; none is needed, as all rows are equally long.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("infalign_shared_prefix", _attend)
    return "infalign_shared_prefix"


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Let ``model`` use another attention implementation for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_shares_prefix(model: Any) -> None:
    """Raise `ConfigError` unless two tokens decoded on a shared prefix get the logits of a plain forward pass."""
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    _check_evaluating(model)
    name = type(model).__name__
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if layers != {DynamicLayer}:
        kinds = ", ".join(sorted(layer.__name__ for layer in layers - {DynamicLayer})) or "unknown layers"
        raise ConfigError(f"{name} has layers without full attention ({kinds}){USE_GENERIC}")
    ids = torch.arange(1, 6, device=model.device) % model.config.get_text_config(decoder=True).vocab_size
    try:
        with torch.no_grad():
            expected = model(input_ids=ids[None], use_cache=False).logits[0, -2:].float()
            _, prefix = _prefill(model, ids[:3].tolist())
            cache = _SharedPrefixCache(prefix)
            with _attention(model, _register()):
                found = torch.stack([_decode(model, token.expand(2), cache)[1] for token in ids[3:]]).float()
    except Exception as error:  # a model that is not built for the attention interface can fail in any way
        raise ConfigError(f"{name} cannot share a prefix: {first_line(error)}{USE_GENERIC}") from error
    if expected.isnan().any():
        raise ConfigError(NO_POLICY)
    gap = float((found - expected).abs().max() / (1 + expected.abs().max()))
    if not gap <= torch.finfo(model.dtype).eps ** 0.5:
        raise ConfigError(f"{name} gives other logits with a shared prefix (relative gap {gap:.1e}){USE_GENERIC}")


class TransformersEngine:
    """Draw responses with transformers' ``generate``, which takes any causal language model.

    Tokens are picked by the same streams as in `SharedPrefixEngine`, and nothing in the model's ``generation_config``
    applies: ``generate`` sees a fresh one, and a logits processor that leaves it no choice.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.eos = eos_token_id(tokenizer)

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return rollouts number ``indices`` of the prompt, in that order."""
        import torch
        from transformers import GenerationConfig

        _check_prompt(prompt_ids, prompt_id, self.model, self.sampling)
        uniforms = torch.from_numpy(_uniforms(self.sampling, prompt_id, indices)).to(self.model.device)
        inputs = torch.tensor([list(prompt_ids)] * len(indices), device=self.model.device)
        logprobs: list[Tensor] = []

        def pick(so_far: Tensor, logits: Tensor) -> Tensor:
            tokens, logprob = _pick(logits, uniforms[:, so_far.shape[1] - len(prompt_ids)], self.sampling)
            logprobs.append(logprob)
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

        fresh = GenerationConfig(
            max_new_tokens=self.sampling.max_new_tokens,
            eos_token_id=self.eos,
            pad_token_id=self.eos,
            do_sample=False,  # greedy among the one token that `pick` leaves
            num_beams=1,
            use_cache=True,
            repetition_penalty=1.0,
        )
        folder, self.model.generation_config = self.model.generation_config, fresh
        try:
            with torch.no_grad():
                out = self.model.generate(
                    inputs, attention_mask=torch.ones_like(inputs), generation_config=fresh, logits_processor=[pick]
                )
        finally:
            self.model.generation_config = folder
        tokens = out[:, len(prompt_ids) :]
        before_end = (tokens == self.eos).cumsum(dim=1) - (tokens == self.eos).long() == 0
        sums = torch.stack(logprobs, dim=1).where(before_end, 0.0).sum(dim=1)
        return _responses(tokens, before_end.sum(dim=1), sums, self.tokenizer)


class ServerEngine:
    """Draw responses from an OpenAI-compatible server such as ``vllm serve MODEL --generation-config vllm``.

    ``url`` is the server's root; ``api_key_env`` names the environment variable with its key. A request is repeated
    after a broken connection, 408, 429 or 5xx for up to ``retry_seconds``. Servers draw from streams of their own, so
    ``sampling.seed`` is not sent and drawing again gives other responses.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        sampling: Sampling,
        *,
        api_key_env: str | None = None,
        retry_seconds: float = 300.0,
    ) -> None:
        import httpx2

        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self.model, self.tokenizer, self.sampling, self.retry_seconds = model, tokenizer, sampling, retry_seconds
        self.eos = eos_token_id(tokenizer)
        self.key = os.environ.get(api_key_env, "") if api_key_env else None
        if self.key == "":
            raise ConfigError(f"the environment variable {api_key_env}, which should hold the API key, is not set")
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.client = httpx2.Client(headers=headers, timeout=httpx2.Timeout(600.0, connect=10.0))

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return ``len(indices)`` responses.

        Raises `ConfigError` if the server refuses or answers what was not asked for, `PartialError` if it stays away.
        """
        _check_not_empty(prompt_ids, prompt_id)
        responses = self._complete(prompt_ids, len(indices), self.sampling)
        ids = [response.token_ids for response in responses]
        if len(ids) >= 8 and len(set(ids)) == 1 and len(ids[0]) > 4:
            raise ConfigError(
                f"{self.url} gave {len(ids)} equal responses to prompt {prompt_id!r} at temperature "
                f"{self.sampling.temperature}; make it sample, for vLLM with --generation-config vllm"
            )
        return responses

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise `ConfigError` if 200 first tokens after a prompt do not look drawn from the whole vocabulary.

        A server that truncates (top-k, top-p) never draws part of its own distribution. The probability of all tokens
        that were not drawn is estimated by the share of draws that are single (Good and Turing, deviation < 0.1), so
        a difference over 0.3 is no chance. Needs log-probabilities; also finds whatever `sample` would.
        """
        first = self._complete(prompt_ids, 200, Sampling(max_new_tokens=1))
        counts = Counter(response.token_ids for response in first)
        unseen = 1 - sum(math.exp(response.logprob) for response in {r.token_ids: r for r in first}.values())
        singles = sum(count == 1 for count in counts.values()) / len(first)
        if unseen - singles > 0.3:
            raise ConfigError(
                f"{self.url} truncates its distribution: 200 first tokens were {len(counts)} different ones, and "
                f"{unseen:.0%} of the probability was never drawn; for vLLM, start it with --generation-config vllm"
            )
        self.sample(prompt_ids, "probe", range(8))

    def _complete(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Response]:
        """Return ``n`` responses, asking again for those that an answer lacks."""
        responses: list[Response] = []
        while len(responses) < n:
            wanted = n - len(responses)
            body = {
                "model": self.model,
                "prompt": list(prompt_ids),
                "n": wanted,
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1,  # off; SGLang refuses 0
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "logprobs": 1,
                "return_token_ids": True,
            }
            choices = self._post(body)
            if not 1 <= len(choices) <= wanted:
                raise ConfigError(f"{self.url} returned {len(choices)} responses where {wanted} were asked for")
            responses += [self._response(choice, prompt_ids, sampling) for choice in choices]
        return responses

    def _post(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices that the server answers with."""
        import httpx2

        try:
            answer = post(self.client, self.url, body, retry_seconds=self.retry_seconds)
        except httpx2.HTTPError as error:
            if may_pass(error):
                raise PartialError(
                    f"{self.url} did not answer for {self.retry_seconds:.0f} s ({first_line(error)}); what is drawn "
                    "is kept, so start the server and run the same command again"
                ) from error
            said = error.response.text if isinstance(error, httpx2.HTTPStatusError) else str(error)
            raise ConfigError(f"{self.url} refused the request: {quoted(said, self.key)}") from error
        try:
            choices: list[dict[str, Any]] = answer.json()["choices"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.url} is no OpenAI-compatible server; it answered {quoted(answer.text, self.key)}"
            ) from error
        return choices

    def _response(self, choice: dict[str, Any], prompt_ids: Sequence[int], sampling: Sampling) -> Response:
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        if not ids:
            raise ConfigError(
                f"{self.url} returns no token ids, and text does not encode back to them; use a server that knows "
                "return_token_ids, such as vLLM 0.10.2 or later"
            )
        if list(choice.get("prompt_token_ids") or prompt_ids) != list(prompt_ids):
            raise ConfigError(f"{self.url} answered another prompt than it was asked; switch its prompt rewriting off")
        if finish not in ("stop", "length") or (finish == "stop") != (ids[-1] == self.eos):
            raise ConfigError(
                f"{self.url} ended a response with {finish!r} after token {ids[-1]}, but responses end with the "
                f"tokenizer's EOS, {self.eos}; for vLLM, start it with --generation-config vllm"
            )
        # Servers report log-probabilities of the model, which is what was sampled only where nothing changes it.
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        sampled = logprobs if sampling.temperature == 1 and sampling.top_p == 1 else None
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Response(tuple(ids), text, finish, math.fsum(sampled) if sampled else math.nan)
