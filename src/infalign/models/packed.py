"""Many responses to a few prompts in one pass: each prompt is computed once, and no token is padding.

All tokens are one row, the prompts first. Prompts attend to themselves and a response to its prompt and itself; only
the attention pads, to the longest. A model outside `packing` gets the same batch as padded rows, a prompt and its
response each. Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.models.attention import attending, attention_configs, check_plain_softmax
from infalign.models.logits import Logits, logits_of, logprob_of
from infalign.models.passes import BATCH_TOKENS, MAX_LOGITS, TokenIds, evaluating
from infalign.models.top_tokens import TopTokens

PACKED = "infalign_packed"  # the attention of models inside `packing`


class StoredStates(NamedTuple):
    """What is stored of a frozen model at a response: its states at each token ``of_prompt`` and ``of_response``,
    (tokens, S), and its ``top_tokens`` at those of the response.
    """

    of_prompt: Tensor
    of_response: Tensor
    top_tokens: TopTokens | None = None


@dataclass(frozen=True)
class PackedBatch:
    """P prompts and R responses: ``tokens`` (N,), lengths (P,) and (R,), and the prompt of each response (R,).

    ``states`` (N, S) are those of a frozen model at each token, and ``top_tokens`` its likeliest at each token of the
    responses, for models that read them (`models.states`).
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    prompt_of: Tensor
    states: Tensor | None = None
    top_tokens: TopTokens | None = None

    @classmethod
    def pack(cls, prompts: TokenIds, responses: TokenIds, stored: Sequence[StoredStates] = ()) -> PackedBatch:
        """Pack the token ids of responses and their prompts, one each; equal prompts are packed once.

        ``stored`` are the states of each response, or there are none.
        """
        rows: dict[tuple[int, ...], int] = {}
        prompt_of = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts]
        tokens = [token for row in (*rows, *responses) for token in row]
        lengths = ([len(row) for row in texts] for texts in (rows, responses))
        packed, asked, responded, of = map(torch.tensor, (tokens, *lengths, prompt_of))
        batch = cls(packed, asked, responded, of)
        if stored:
            of_prompts = dict(zip(prompt_of, (states.of_prompt for states in stored), strict=True))
            states = [*map(of_prompts.__getitem__, range(len(rows))), *(states.of_response for states in stored)]
            top = [states.top_tokens for states in stored if states.top_tokens is not None]
            batch = replace(batch, states=torch.cat(states), top_tokens=TopTokens.concatenated(top) if top else None)
        return batch

    def to(self, device: Any) -> PackedBatch:
        """Return it on a device; trainers move their batches so."""
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: part.to(device) for name, part in parts if part is not None})

    @cached_property
    def token_masks(self) -> tuple[Tensor, Tensor]:
        """Where there is a token, in prompts padded to the longest (P, width) and in responses (R, width)."""
        return _mask_of(self.prompt_lengths), _mask_of(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its own text, (1, N)."""
        of_prompts, of_responses = self.token_masks
        after = self.prompt_lengths[self.prompt_of][:, None] + _columns(of_responses)
        return torch.cat([_columns(of_prompts).expand_as(of_prompts)[of_prompts], after[of_responses]])[None]

    @cached_property
    def predictors(self) -> Tensor:
        """The place of the token before each token of a response, (T,): the one that predicts it."""
        last = self.prompt_lengths.cumsum(0) - 1
        places = torch.arange(len(self.tokens), device=last.device)[int(last[-1]) + 1 :] - 1
        some = self.lengths > 0
        first = (self.lengths.cumsum(0) - self.lengths)[some]
        return places.index_copy(0, first, last[self.prompt_of[some]])

    @cached_property
    def targets(self) -> Tensor:
        """The tokens of the responses, (T,)."""
        return self.tokens[len(self.tokens) - int(self.lengths.sum()) :]

    @cached_property
    def response_of(self) -> Tensor:
        """The response that each of its tokens belongs to, (T,)."""
        return torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.lengths)

    @cached_property
    def attention_mask(self) -> Tensor:
        """What each token of a response sees of its prompt and response, both padded: (R, 1, width, both widths)."""
        of_prompts, of_responses = self.token_masks
        width = of_responses.shape[1]
        own = torch.ones(width, width, dtype=torch.bool, device=of_prompts.device).tril()
        prompt = of_prompts[self.prompt_of][:, None].expand(-1, width, -1)
        return torch.cat([prompt, own.expand(len(prompt), -1, -1)], dim=2)[:, None]

    @cached_property
    def padded(self) -> tuple[dict[str, Tensor], Tensor]:
        """The rows of a plain pass, padded on the right, and where in them a token of a response is predicted."""
        texts = torch.split(self.tokens, [*self.prompt_lengths.tolist(), *self.lengths.tolist()])
        rows = zip(self.prompt_of.tolist(), texts[len(self.prompt_lengths) :], strict=True)
        ids = pad_sequence([torch.cat([texts[prompt], response]) for prompt, response in rows], batch_first=True)
        begins = self.prompt_lengths[self.prompt_of, None]
        ends, place = begins + self.lengths[:, None], _columns(ids)
        given = {"input_ids": ids, "attention_mask": (place < ends).long()}
        return given, (place >= begins - 1) & (place < ends - 1)

    def run(self, model: Callable[..., Any], **options: Any) -> Any:
        """Return what a model, which is inside `packing`, gives for the batch."""
        # models pass unknown keyword arguments on to the attention function
        return model(input_ids=self.tokens[None], position_ids=self.positions, use_cache=False, packed=self, **options)

    def logits(self, model: Any) -> Tensor:
        """Return the logits that predict each token of the responses, (T, V)."""
        if is_packing(model):
            return self.run(model, logits_to_keep=self.predictors).logits[0]
        texts, predicts = self.padded
        kept = predicts.any(0).nonzero()[:, 0]
        logits = model(**texts, use_cache=False, logits_to_keep=kept).logits
        if logits.shape[1] != len(kept):
            name = type(model).__name__
            raise ConfigError(f"{name} ignores logits_to_keep; use a causal language model of transformers")
        return logits[predicts[:, kept]]

    def logits_in_parts(self, model: Any) -> Logits:
        """Return the logits that predict each token of the responses."""
        in_parts = is_packing(model) and self.top_tokens is None
        return logits_of(model, self.logits) if in_parts else Logits(self.logits(model), None)

    @property
    def target_classes(self) -> Tensor:
        """Which of its logits each token of the responses has, (T,): those of tokens, or of classes of tokens."""
        return self.targets if self.top_tokens is None else self.top_tokens.drawn

    def last_states(self, model: Any) -> Tensor:
        """Return the last hidden state of a model without head after each response, (R, width)."""
        if not is_packing(model):
            texts, _ = self.padded
            ends = texts["attention_mask"].sum(1) - 1
            return model(**texts).last_hidden_state[torch.arange(len(ends), device=ends.device), ends]
        last = self.lengths.cumsum(0) - 1 + len(self.tokens) - len(self.targets)
        return self.run(model).last_hidden_state[0, last]

    def scores(self, model: Any) -> Tensor:
        """Return the outputs of a sequence classifier after each response, (R, outputs)."""
        if not is_packing(model):
            texts, _ = self.padded
            mask, padding = texts["attention_mask"], model.config.get_text_config().pad_token_id
            ids = texts["input_ids"].masked_fill(mask == 0, padding)
            return model(input_ids=ids, attention_mask=mask).logits
        return model.score(self.last_states(model.base_model))

    def sum_by_response(self, of_tokens: Tensor) -> Tensor:
        """Return the sum over each response of a number per token, (R,)."""
        return of_tokens.new_zeros(len(self.lengths)).index_add(0, self.response_of, of_tokens)

    def sum_to_token(self, of_tokens: Tensor) -> Tensor:
        """Return, for each token of a response, the sum from the first to this one of its numbers, (T, …)."""
        _, of_responses = self.token_masks
        rows = of_tokens.new_zeros(*of_responses.shape, *of_tokens.shape[1:])
        rows[of_responses] = of_tokens
        return rows.cumsum(1)[of_responses]

    def logprobs(self, model: Any) -> Tensor:
        """Return log π(y|x) of each response, (R,), differentiable, at least float32, from all of its tokens."""
        of_tokens = self.logits_in_parts(model).measured(logprob_of(self.target_classes))
        return self.sum_by_response(of_tokens if self.top_tokens is None else of_tokens + self.top_tokens.within)


def packed_batches(
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    batch_tokens: int,
    model: Any,
    *,
    logits: bool = True,
    stored: Sequence[StoredStates] = (),
) -> Iterator[tuple[slice, PackedBatch]]:
    """Yield consecutive rows, at least one, as one batch of at most ``batch_tokens`` tokens.

    ``stored`` is as in `PackedBatch.pack`. If each token of a response has ``logits`` over the vocabulary, there are at
    most `MAX_LOGITS` of them. Outside `packing` all tokens of padded rows count. Raises DataError if there is not one
    completion a prompt, or a prompt is empty whose response has logits.
    """
    scored = MAX_LOGITS // model.config.get_text_config(decoder=True).vocab_size if logits else batch_tokens
    if len(prompt_ids) != len(completion_ids):
        raise DataError(f"the numbers of prompts ({len(prompt_ids)}) and completions ({len(completion_ids)}) differ")
    for row, prompt in enumerate(prompt_ids if logits else ()):
        if not len(prompt):
            raise DataError(f"row {row}: the prompt has no tokens; begin it with a BOS token")
    rows, begin, packs = len(completion_ids), 0, is_packing(model)
    while begin < rows:
        prompts, responses, tokens, total, longest = list[Sequence[int]](), list[Sequence[int]](), 0, 0, 0
        seen: set[tuple[int, ...]] = set()
        for row in range(begin, rows):
            prompt, response = prompt_ids[row], completion_ids[row]
            tokens += len(response)
            longest = max(longest, len(prompt) + len(response))
            total += len(response) + (0 if tuple(prompt) in seen else len(prompt))
            if not packs:
                tokens = total = longest * (1 + len(responses))
            if responses and (total > batch_tokens or tokens > scored):
                break
            seen.add(tuple(prompt))
            prompts.append(prompt)
            responses.append(response)
        rows_of = slice(begin, begin + len(responses))
        yield rows_of, PackedBatch.pack(prompts, responses, stored[rows_of]).to(model.device)
        begin = rows_of.stop


def response_logprobs(
    model: Any,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    *,
    bf16: bool = False,
    stored: Sequence[StoredStates] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Array:
    """Return log π(y|x) of each response as a training computes it, packed if the model can; ``bf16``: mixed.

    ``stored`` is as in `PackedBatch.pack`; ``on_progress(done, total)`` is called with numbers of responses.
    """
    logprobs: list[float] = []
    with packing_if_possible(model), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16), evaluating(model):
        for rows, batch in packed_batches(prompt_ids, completion_ids, BATCH_TOKENS, model, stored=stored):
            logprobs += batch.logprobs(model).tolist()
            on_progress(rows.stop, len(completion_ids))
    return np.array(logprobs)


def _mask_of(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


def _columns(inside: Tensor) -> Tensor:
    return torch.arange(inside.shape[1], device=inside.device)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attend from each token (1 × heads × N × width) to the tokens before it in its own text."""
    check_plain_softmax(options)
    packed, shared = options["packed"], {"scale": options.get("scaling"), "dropout_p": options.get("dropout", 0.0)}
    of_prompts, of_responses = packed.token_masks
    first, group = int(packed.prompt_lengths.sum()), query.shape[1] // key.shape[1]

    def parted(flat: Tensor) -> tuple[Tensor, Tensor]:
        rows = flat[0].repeat_interleave(group, 0) if flat is not query and group > 1 else flat[0]
        prompts, responses = rows.transpose(0, 1).tensor_split([first])
        return _padded(prompts, of_prompts), _padded(responses, of_responses)

    (query_p, query_r), (key_p, key_r), (value_p, value_r) = parted(query), parted(key), parted(value)
    to_prompts = scaled_dot_product_attention(query_p, key_p, value_p, is_causal=True, **shared)
    keys, values = (
        torch.cat([prompts[packed.prompt_of], own], dim=2) for prompts, own in ((key_p, key_r), (value_p, value_r))
    )
    to_responses = scaled_dot_product_attention(query_r, keys, values, attn_mask=packed.attention_mask, **shared)
    out = torch.cat([to_prompts.transpose(1, 2)[of_prompts], to_responses.transpose(1, 2)[of_responses]])
    return out[None], None


def _padded(tokens: Tensor, inside: Tensor) -> Tensor:
    """Return tokens (tokens × heads × width) as rows padded to the longest (rows × heads × longest × width)."""
    places = inside.flatten().nonzero()[:, 0]
    rows = tokens.new_zeros(inside.numel(), *tokens.shape[1:]).index_copy(0, places, tokens)
    return rows.view(*inside.shape, *tokens.shape[1:]).transpose(1, 2)


def packing(model: Any) -> AbstractContextManager[None]:
    """Let ``model`` take packed batches inside the block, and only those."""
    return attending(attention_configs(model), PACKED, _attend)


def is_packing(model: Any) -> bool:
    """Return whether a model, which a trainer may have wrapped, is inside `packing`."""
    return bool(getattr(model, "module", model).config._attn_implementation == PACKED)


Outputs = Callable[[PackedBatch, Any], Tensor]


def packing_if_possible(model: Any, outputs: Outputs = PackedBatch.logits) -> AbstractContextManager[None]:
    """Return `packing` for a model that can (`can_pack`); another one computes its batches padded."""
    return packing(model) if can_pack(model, outputs) else nullcontext()


def can_pack(model: Any, outputs: Outputs = PackedBatch.logits) -> bool:
    """Return whether a packed pass gives the logits of plain ones.

    It does for every transformers decoder whose layers all attend to all earlier tokens through the attention
    interface. ``outputs`` returns those of a packed pass: one row per token of a response, or one per response. A model
    without head is compared by its states after each response, `PackedBatch.last_states`.
    """
    ids = (torch.arange(1, 11) % model.config.get_text_config(decoder=True).vocab_size).tolist()
    prompts, responses = [ids[:3], ids[3:5], ids[3:5]], [ids[5:8], ids[4:5], ids[8:10]]
    packed = PackedBatch.pack(prompts, responses).to(model.device)
    plain = list[Tensor]()
    with evaluating(model):
        try:
            with packing(model):
                of_packed = outputs(packed, model).float()
            for prompt, response in zip(prompts, responses, strict=True):
                row = torch.tensor([[*prompt, *response]], device=model.device)
                read = model(row, attention_mask=torch.ones_like(row))
                of_row = read.logits[0] if "logits" in read else read.last_hidden_state[0, -1]
                plain.append(of_row[-1 - len(response) : -1] if of_row.ndim == 2 else of_row[None])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model without the attention interface, or of another kind, can raise any exception
            return False
    expected = torch.cat(plain).float()
    if of_packed.shape != expected.shape:
        return False
    gap = (of_packed - expected).abs().max() / (1 + expected.abs().max())
    return bool(gap <= torch.finfo(model.dtype).eps ** 0.5)
