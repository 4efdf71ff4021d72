"""How far a policy is from its reference (torch, imported when used)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.core.memory import at_once
from infalign.method.calibration import Array
from infalign.models.passes import BATCH_TOKENS, FEW_TOKENS, TokenIds, evaluating

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from infalign.models.packed import StoredStates

    Part = tuple[Sequence[int], Tensor, Tensor, Tensor]


CHUNK = 2**17  # elements that are in float64 at a time: 1 MiB a copy, in cache; 2**20 takes 1.3 times as long


def rao_blackwell_kl(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    *,
    batch_tokens: int = BATCH_TOKENS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Array:
    """Estimate KL(policy ‖ reference) from completions sampled from the policy, in nats, one estimate per sequence.

    It is Σ_t KL(π(·|y_<t) ‖ π_ref(·|y_<t)), exact in every token given those before it: unbiased, never negative and of
    variance 0 for one token (Amini et al., arXiv 2504.10637). Σ_t of the log-ratio l_t of the tokens drawn is unbiased
    too and usually varies far more, but less where the log-ratios of early and late tokens cancel.

    Completions are drawn from the whole softmax at temperature 1. Every completion token counts: the EOS that ends a
    response is its last token, a response cut at the length limit has none, and nothing may follow an EOS
    (`sampling.engine.Response.token_ids` is so). Both models must be on one device. A batch has ``batch_tokens`` tokens
    or fewer. ``on_progress(done, total)`` is called with numbers of completions.

    Raises DataError if the two lists differ in length or a prompt is empty, and otherwise as `token_kl`.

    >>> model, _ = Policy.of(MODEL)
    >>> rao_blackwell_kl(model, model, prompt_ids=[[5, 6], [5, 6]], completion_ids=[[7], [8, 9]])
    array([0., 0.])
    """
    kl = np.zeros(len(prompt_ids))
    with evaluating(policy), evaluating(reference):
        for rows, parts in _passes(policy, reference, prompt_ids, completion_ids, batch_tokens):
            for row_of, own, base, targets in parts:
                np.add.at(kl, np.asarray(rows)[row_of], token_kl(own, base, targets)[0])
            on_progress(rows[-1] + 1, len(prompt_ids))
    return kl


def kl_from_reference_samples(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    stored: Sequence[StoredStates] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Array, Array]:
    """Estimate KL(policy ‖ reference) from completions sampled from the *reference*, one estimate per sequence.

    It is Σ_t e^{h_<t}·KL_t, where KL_t is exact over the vocabulary and e^{h_<t} the importance weight of the tokens
    before: unbiased. The second array is the log-ratio h of each whole sequence. ``stored`` has the reference's states
    at each completion for a guide that reads them (`PackedBatch.pack`); the reference is then not run.
    """
    kl, h = np.zeros((2, len(prompt_ids)))
    with evaluating(policy), evaluating(reference):
        for rows, parts in _passes(policy, reference, prompt_ids, completion_ids, FEW_TOKENS, stored):
            terms = [(np.asarray(rows)[row_of], *token_kl(*logits_and_drawn)) for row_of, *logits_and_drawn in parts]
            of, kl_t, h_t = map(np.concatenate, zip(*terms, strict=True))
            before, begins = h_t.cumsum() - h_t, np.flatnonzero(np.diff(of, prepend=-1))
            before -= np.repeat(before[begins], np.diff(begins, append=of.size))
            np.add.at(kl, of, np.exp(before) * kl_t)
            np.add.at(h, of, h_t)
            on_progress(rows[-1] + 1, len(prompt_ids))
    return kl, h


def _passes(
    policy: Any,
    reference: Any,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    batch_tokens: int,
    stored: Sequence[StoredStates] = (),
) -> Iterator[tuple[Sequence[int], Iterator[Part]]]:
    """Yield the rows of each batch; and for some tokens after the other which of these they belong to, and logits."""
    from infalign.models.guided import GuidedForCausalLM
    from infalign.models.packed import is_packing, packed_batches, packing_if_possible

    beside = isinstance(policy, GuidedForCausalLM) and (bool(stored) or policy.is_beside(reference))
    with packing_if_possible(policy), packing_if_possible(reference):
        is_guide = beside and is_packing(policy)
        for part, batch in packed_batches(prompt_ids, completion_ids, batch_tokens, policy, stored=stored):
            if is_guide:  # one pass through the reference, and one log-ratio for each of its classes of tokens
                packed = batch if stored else policy.read_once(batch)
                base = policy.reference_logits(packed)
            else:
                packed, base = batch, batch.logits_in_parts(reference)
            row_of, drawn, own = packed.response_of.cpu().numpy(), packed.target_classes, packed.logits_in_parts(policy)
            both = zip(own.parts(), base.parts(), strict=True)
            yield range(part.start, part.stop), ((row_of[where], p, q, drawn[where]) for (where, p), (_, q) in both)


def token_kl(policy_logits: Tensor, reference_logits: Tensor, targets: Tensor) -> tuple[Array, Array]:
    """Return the KL in each place of T tokens, from logits (T, V), and log π/π_ref of the tokens drawn there, all (T,).

    A KL that is infinite because the reference's logit is −inf for a token that π can draw is returned as inf.
    Computed in float64; the memory on top of the logits does not grow with T.

    Raises ConfigError for two vocabularies and for NaN or infinite logits, DataError if π cannot draw a target.
    """
    import torch

    if not policy_logits.shape == reference_logits.shape == (*targets.shape, policy_logits.shape[-1]):
        raise ConfigError(
            f"logits of shape {tuple(policy_logits.shape)} (policy) and {tuple(reference_logits.shape)} (reference) "
            f"for targets of shape {tuple(targets.shape)}; a KL needs the same vocabulary and tokens"
        )
    # Blocks are of whole tokens: one row of the largest vocabularies is 2 MB, so smaller blocks would save nothing.
    rows = max(1, at_once(CHUNK, policy_logits.device.type) // policy_logits.shape[-1])
    blocks = zip(*(torch.split(part, rows) for part in (policy_logits, reference_logits, targets)), strict=True)
    with torch.no_grad():
        kl_t, log_ratio_t, impossible = map(torch.cat, zip(*(_block_kl(*block) for block in blocks), strict=True))
    if impossible.any():
        raise DataError(
            f"a completion has token {targets[impossible][0]}, to which the policy gives probability 0; pass the "
            "model that sampled the completions"
        )
    if kl_t.isnan().any():
        raise ConfigError("the model returns NaN or infinite logits; use an earlier checkpoint")
    return np.asarray(kl_t.cpu()), np.asarray(log_ratio_t.cpu())


def _block_kl(policy_logits: Tensor, reference_logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KL in each place, log π/π_ref of the token drawn there, and whether π cannot draw it."""
    import torch

    log_p, log_q = policy_logits.double().log_softmax(-1), reference_logits.double().log_softmax(-1)
    log_ratio = log_p - log_q
    of_drawn = log_ratio.gather(-1, drawn[:, None])[:, 0]
    p = log_p.exp_()  # in place, because allocating new memory is what takes the time here
    unreachable = p == 0
    kl = torch.linalg.vecdot(p, log_ratio.masked_fill_(unreachable, 0.0))  # 0 log 0 = 0, and a NaN stays
    return kl, of_drawn, unreachable.gather(-1, drawn[:, None])[:, 0]
