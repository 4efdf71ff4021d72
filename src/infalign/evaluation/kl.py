"""How far a policy is from its reference (torch, imported when used)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.models.logprobs import IGNORED, TokenIds, evaluating, padded_batches, scored_logits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    Part = tuple[Sequence[int], Tensor, Tensor, Tensor]


CHUNK = 2**17  # elements that are in float64 at a time: 1 MiB a copy, in cache; 2**20 takes 1.3 times as long


@dataclass(frozen=True)
class SequenceKL:
    """Three estimates of KL(π ‖ π_ref) for each sequence y ~ π, in nats, each of shape (sequences,) and unbiased.

    With l_t = log π(y_t|y_<t) − log π_ref(y_t|y_<t):

    ``rao_blackwell`` is Σ_t KL(π(·|y_<t) ‖ π_ref(·|y_<t)), exact in every token given those before it: never negative,
    the one to report (Amini et al., arXiv 2504.10637). For one token its variance is 0; for a sequence it is
    usually far below the others', but not always: where log-ratios of early and late tokens cancel, ``k1`` varies less.
    ``k1`` is Σ_t l_t. ``k3`` is Σ_t (e^{−l_t} − s_t + l_t), never negative (Schulman 2020), where s_t is the mass that
    π_ref gives to the tokens that π can draw, 1 for a softmax with finite logits.
    """

    rao_blackwell: Array
    k1: Array
    k3: Array


def rao_blackwell_kl(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    *,
    batch_tokens: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SequenceKL:
    """Estimate KL(policy ‖ reference) from completions sampled from the policy, one estimate per sequence.

    Completions are drawn from the whole softmax at temperature 1. Every completion token counts: the EOS that ends a
    response is its last token, a response cut at the length limit has none, and nothing may follow an EOS
    (`sampling.engine.Response.token_ids` is so). Both models must be on one device. A batch has ``batch_tokens`` tokens
    or fewer, as in `token_logprobs`. ``on_progress(done, total)`` is called with numbers of completions.

    Raises DataError if the two lists differ in length or a prompt is empty, and otherwise as `token_kl`.
    """
    from infalign.models.packed import can_pack

    found, done = np.zeros((len(prompt_ids), 3)), 0
    with evaluating(policy), evaluating(reference):
        batches = _packed if can_pack(policy) and can_pack(reference) else _padded
        for rows, parts in batches(policy, reference, prompt_ids, completion_ids, batch_tokens):
            for row_of, own, base, targets in parts:
                np.add.at(found, np.asarray(rows)[row_of], token_kl(own, base, targets).T)
            done += len(rows)
            on_progress(done, len(prompt_ids))
    return SequenceKL(*found.T.copy())


def _packed(
    policy: Any, reference: Any, prompt_ids: TokenIds, completion_ids: TokenIds, batch_tokens: int
) -> Iterator[tuple[Sequence[int], Iterator[Part]]]:
    """Yield the rows of each batch; and for some tokens after the other which of these they belong to, and logits."""
    from infalign.models.guided import GuidedForCausalLM
    from infalign.models.packed import packed_batches, packing

    is_guide = isinstance(policy, GuidedForCausalLM) and policy.is_beside(reference)
    with packing(policy), packing(reference):
        for part, batch in packed_batches(prompt_ids, completion_ids, batch_tokens, policy):
            if is_guide:  # one pass through the reference, and one log-ratio for each of its classes of tokens
                packed = policy.read_once(batch)
                base = policy.reference_logits(packed)
            else:
                packed, base = batch, batch.logits_in_parts(reference)
            row_of, drawn, own = packed.response_of.cpu().numpy(), packed.target_classes, packed.logits_in_parts(policy)
            both = zip(own.parts(), base.parts(), strict=True)
            yield range(part.start, part.stop), ((row_of[where], p, q, drawn[where]) for (where, p), (_, q) in both)


def _padded(
    policy: Any, reference: Any, prompt_ids: TokenIds, completion_ids: TokenIds, batch_tokens: int
) -> Iterator[tuple[Sequence[int], Iterator[Part]]]:
    """Yield what `_packed` does, for models with layers without full attention."""
    for rows, batch in padded_batches(prompt_ids, completion_ids, batch_tokens, policy):
        (own, targets), (base, _) = scored_logits(policy, **batch), scored_logits(reference, **batch)
        kept = targets != IGNORED
        parts = ((row, own[row, at], base[row, at], targets[row, at]) for row, at in enumerate(kept))
        yield rows, (([row] * len(drawn), p, q, drawn) for row, p, q, drawn in parts)


def token_kl(policy_logits: Tensor, reference_logits: Tensor, targets: Tensor) -> Array:
    """Return the three estimates of `SequenceKL` for each of T tokens, (3, T), from logits (T, V) and the tokens (T,).

    A KL that is infinite because the reference's logit is −inf for a token that π can draw is returned as inf.
    Computed in float64; the memory on top of the logits does not grow with T.

    Raises ConfigError for two vocabularies and for NaN or infinite logits, DataError if π cannot draw a target.
    """
    import torch

    if not policy_logits.shape == reference_logits.shape == (*targets.shape, policy_logits.shape[-1]):
        raise ConfigError(
            f"logits of shape {tuple(policy_logits.shape)} (policy) and {tuple(reference_logits.shape)} (reference) "
            f"for targets of shape {tuple(targets.shape)}; a KL needs two models of one vocabulary on the same tokens"
        )
    # Blocks are of whole tokens: one row of the largest vocabularies is 2 MB, so smaller blocks would save nothing.
    rows = max(1, CHUNK // policy_logits.shape[-1])
    blocks = zip(*(torch.split(part, rows) for part in (policy_logits, reference_logits, targets)), strict=True)
    with torch.no_grad():
        found = torch.cat([_block_kl(*block) for block in blocks], dim=1)
    impossible = found[1] == -torch.inf
    if impossible.any():
        raise DataError(
            f"a completion has token {targets[impossible][0]}, which the policy never draws there; pass the model that "
            "drew the completions"
        )
    if found.isnan().any():
        raise ConfigError("a model gives NaN or infinite logits, so it defines no policy; use an earlier checkpoint")
    estimates: Array = found.cpu().numpy()
    return estimates


def _block_kl(policy_logits: Tensor, reference_logits: Tensor, drawn: Tensor) -> Tensor:
    """Return the exact KL, l and e^{−l} − s + l of each token (3, T); l is −∞ where π cannot draw the token."""
    import torch

    log_p, log_q = policy_logits.double().log_softmax(-1), reference_logits.double().log_softmax(-1)
    log_ratio = log_p - log_q
    p = log_p.exp_()  # in place, because allocating new memory is what takes the time here
    unreachable = p == 0
    at = drawn[:, None]
    log_ratio_drawn = log_ratio.gather(-1, at).masked_fill(unreachable.gather(-1, at), -torch.inf)[:, 0]
    kl = torch.linalg.vecdot(p, log_ratio.masked_fill_(unreachable, 0.0))  # 0 log 0 = 0, and a NaN stays
    support = log_q.exp_().masked_fill_(unreachable, 0.0).sum(-1)
    return torch.stack([kl, log_ratio_drawn, (-log_ratio_drawn).exp() - support + log_ratio_drawn])
