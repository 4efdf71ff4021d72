"""How far a policy is from its reference (torch, imported when used)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.models.logprobs import IGNORED, TokenIds, evaluating, padded_batches, scored_logits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


CHUNK = 2**17  # elements that are in float64 at a time: 1 MiB a copy, in cache; 2**20 takes 1.3 times as long
ROUNDING = 1e-4  # by how much two passes of one model may disagree about the mass of a nucleus


@dataclass(frozen=True)
class SequenceKL:
    """Three estimates of KL(π ‖ π_ref) for each sequence y ~ π, in nats, each of shape (sequences,) and unbiased.

    With l_t = log π(y_t|y_<t) − log π_ref(y_t|y_<t):

    ``rao_blackwell`` is Σ_t KL(π(·|y_<t) ‖ π_ref(·|y_<t)), exact in every token given those before it: never negative,
    the one to report (Amini et al., arXiv 2504.10637). For one token its variance is 0; for a sequence it is
    usually far below the others', but not always: where log-ratios of early and late tokens cancel, ``k1`` varies less.
    ``k1`` is Σ_t l_t. ``k3`` is Σ_t (e^{−l_t} − s_t + l_t), never negative (Schulman 2020), where s_t is the mass that
    π_ref gives to the tokens that π can draw: 1, so the known formula, unless top-p cuts π's tail off.
    ``tokens`` is the number of tokens summed over; ``rao_blackwell.sum() / tokens.sum()`` is the KL per token.
    """

    rao_blackwell: Array
    k1: Array
    k3: Array
    tokens: NDArray[np.int64]


def rao_blackwell_kl(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    *,
    pad_id: int,
    batch_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> SequenceKL:
    """Estimate KL(policy ‖ reference) from completions sampled from the policy, one estimate a sequence.

    Every completion token counts: the EOS that ends a response is its last token, one cut at the length limit has none,
    and nothing may follow an EOS (`sampling.engine.Response.token_ids` is so). ``temperature`` and ``top_p`` are those
    that drew the completions, see `kl_from_logits`. Both models must be on one device. A batch has ``batch_tokens``
    padded tokens or fewer, as in `token_logprobs`. ``on_progress(done, all)`` is called with numbers of completions.

    Raises DataError if the two lists differ in length, a prompt is empty or the completions were not drawn in this way,
    ConfigError as `kl_from_logits`.
    """
    from infalign.models.guided import GuidedForCausalLM
    from infalign.models.packed import packed_batches, packing, packs

    rao_blackwell, k1, k3 = np.empty((3, len(prompt_ids)))
    tokens = np.empty(len(prompt_ids), np.int64)
    done = 0

    def told(more: int) -> None:
        nonlocal done
        done += more
        if on_progress is not None:
            on_progress(done, len(prompt_ids))

    with evaluating(policy), evaluating(reference):
        if packs(policy) and packs(reference):
            beside = isinstance(policy, GuidedForCausalLM) and policy.is_beside(reference)
            with packing(policy), packing(reference):
                for part, packed in packed_batches(prompt_ids, completion_ids, batch_tokens, policy):
                    if beside:  # one pass through the reference, and one log-ratio for each of its classes of tokens
                        packed = policy.read_once(packed, classes=temperature == 1 == top_p)
                        base = policy.unguided_logits(packed)
                    else:
                        base = packed.logits_in_parts(reference)
                    own = packed.logits_in_parts(policy)
                    terms = np.empty((3, len(packed.targets)))
                    for (where, p), (_, q) in zip(own.parts(), base.parts(), strict=True):
                        targets = packed.drawn[where, None]  # every token is a sequence of its own here
                        kl = kl_from_logits(p[:, None], q[:, None], targets, temperature=temperature, top_p=top_p)
                        terms[:, where] = kl.rao_blackwell, kl.k1, kl.k3
                    of, many = packed.response_of.cpu().numpy(), len(packed.lengths)
                    for sums, values in zip((rao_blackwell, k1, k3), terms, strict=True):
                        sums[part] = np.bincount(of, values, many)
                    tokens[part] = np.bincount(of, minlength=many)
                    told(many)
        else:
            for rows, batch in padded_batches(prompt_ids, completion_ids, pad_id, batch_tokens, policy):
                policy_logits, targets = scored_logits(policy, *batch)
                reference_logits, _ = scored_logits(reference, *batch)
                kl = kl_from_logits(policy_logits, reference_logits, targets, temperature=temperature, top_p=top_p)
                rao_blackwell[rows], k1[rows], k3[rows], tokens[rows] = kl.rao_blackwell, kl.k1, kl.k3, kl.tokens
                told(len(rows))
    return SequenceKL(rao_blackwell, k1, k3, tokens)


def kl_from_logits(
    policy_logits: torch.Tensor,
    reference_logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> SequenceKL:
    """Estimate KL(π ‖ π_ref) from the logits (batch, width, V) that predict the tokens ``targets`` (batch, width).

    Where a target is −100 (prompt, padding, what follows the EOS) nothing counts. π is what `sampling.engine.Sampling`
    draws from: softmax(logits / ``temperature``), of which only the smallest set with mass ≥ ``top_p`` is kept,
    renormalised. π_ref is softmax(logits / ``temperature``), *whole* for every ``top_p``: a reference cut to its own
    nucleus gives mass 0 to tokens that π draws, so that the KL is infinite, and estimates miss it where the samples do.
    With ``top_p`` < 1 the KL therefore includes the step of truncating, and is not 0 even for a policy equal to the
    reference. Top-k, min-p and repetition penalties are not supported.

    A KL that is infinite because the reference's logit is −inf for a token that π can draw is returned as inf.
    Computed in float64; the memory on top of the logits does not grow with the batch or with the width. Of equally
    likely tokens at the edge of a nucleus any may be kept: their order changes its members, not its mass.

    Raises ConfigError for a temperature or top_p out of range, two vocabularies, or NaN or infinite logits, DataError
    if π cannot draw a target.
    """
    import torch

    if not 0 < temperature < math.inf:
        raise ConfigError(f"the KL needs the sampling temperature, a finite number above 0, found {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"the KL needs the top_p of the sampling, in (0, 1] (1 keeps all tokens), found {top_p}")
    if not policy_logits.shape == reference_logits.shape == (*targets.shape, policy_logits.shape[-1]):
        raise ConfigError(
            f"logits of shape {tuple(policy_logits.shape)} (policy) and {tuple(reference_logits.shape)} (reference) "
            f"for targets of shape {tuple(targets.shape)}; a KL needs two models of one vocabulary on the same tokens"
        )
    scored = targets != IGNORED
    positions, drawn = scored.nonzero(), targets[scored]
    # Blocks are of whole tokens: one row of the largest vocabularies is 2 MB, so smaller blocks would save nothing.
    rows = max(1, CHUNK // policy_logits.shape[-1])
    with torch.no_grad():
        chunks = [
            _token_kl(policy_logits[at.unbind(1)], reference_logits[at.unbind(1)], tokens, temperature, top_p)
            for at, tokens in zip(torch.split(positions, rows), torch.split(drawn, rows), strict=True)
        ]
    terms = torch.cat(chunks, dim=1)
    impossible = terms[1] == -math.inf
    if impossible.any():
        raise DataError(
            f"a completion has token {drawn[impossible][0]} where the policy never draws it at temperature "
            f"{temperature} and top_p {top_p}; pass the temperature, the top_p and the model that drew the completions"
        )
    if terms.isnan().any():
        raise ConfigError("a model gives NaN or infinite logits, so it defines no policy; use an earlier checkpoint")
    rao_blackwell, k1, k3 = terms.new_zeros(3, len(targets)).index_add_(1, positions[:, 0], terms).cpu().numpy()
    return SequenceKL(rao_blackwell, k1, k3, scored.sum(1).cpu().numpy())


def _token_kl(
    policy_logits: torch.Tensor, reference_logits: torch.Tensor, drawn: torch.Tensor, temperature: float, top_p: float
) -> torch.Tensor:
    """Return the exact KL, l and e^{−l} − s + l of each drawn token (3 × tokens), from logits (tokens × V).

    l is −∞ where π cannot draw the token.
    """
    import torch

    log_p = (policy_logits.double() / temperature).log_softmax(-1)
    log_q = (reference_logits.double() / temperature).log_softmax(-1)
    log_ratio = log_p - log_q
    p = log_p.exp_()  # in place, because allocating new memory is what takes the time here
    p_drawn = p.gather(-1, drawn[:, None])
    impossible = p_drawn == 0
    if top_p < 1:
        # It is not asked if the token is inside: the pass that drew it may have rounded, or ordered ties, differently.
        impossible |= p.masked_fill(p <= p_drawn, 0.0).sum(-1, keepdim=True) >= top_p + ROUNDING
        ordered, order = p.sort(dim=-1, descending=True)
        outside = torch.ones_like(p, dtype=torch.bool).scatter_(-1, order, ordered.cumsum(-1) - ordered >= top_p)
        mass = p.masked_fill_(outside, 0.0).sum(-1, keepdim=True)
        p /= mass
        log_ratio -= mass.log()
    log_ratio_drawn = log_ratio.gather(-1, drawn[:, None]).masked_fill(impossible, -math.inf)[:, 0]
    unreachable = p == 0
    kl = torch.linalg.vecdot(p, log_ratio.masked_fill_(unreachable, 0.0))  # 0 log 0 = 0, and a NaN stays
    support = log_q.exp_().masked_fill_(unreachable, 0.0).sum(-1)
    return torch.stack([kl, log_ratio_drawn, (-log_ratio_drawn).exp() - support + log_ratio_drawn])
