"""The strength of a guide: π_s ∝ π_ref·e^{s·Q} at a given KL, found on stored rollouts."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infalign.method.calibration import Array
from infalign.models.guided import GuidedForCausalLM
from infalign.models.logits import Logits
from infalign.models.logprobs import FEW_TOKENS, evaluating
from infalign.models.packed import PackedBatch, packed_batches, packing

SCALES = np.geomspace(0.25, 4.0, 13)  # between which the KL is interpolated, in steps of 26 %
MIN_EFFECTIVE_ROLLOUTS = 50.0  # fewer say nothing of a KL, which from 5 nats on they underestimate
MIN_KL = 1e-12  # nats
CHUNK_TOKENS = 4  # at a time: all scales while a large vocabulary is in the processor's cache


class GuideScale(NamedTuple):
    """The factor that Q was multiplied by, and the policy's KL there in nats, or None if it is not known."""

    factor: float
    kl: float | None


def scale_guide_to_kl(model: GuidedForCausalLM, rows: Sequence[dict[str, Any]], kl: float) -> GuideScale:
    """Multiply Q by the factor, within 1/4 … 4, that brings the policy's KL nearest to ``kl`` nats.

    ``rows`` are rollouts of the reference, as `offline_trainer.held_out_rollouts` gives them. They give the KL of a
    factor as long as their effective sample size is at least `MIN_EFFECTIVE_ROLLOUTS`, or a quarter of them; Q is not
    strengthened beyond that. Where they do not give the KL of Q as it is, and it is more than that of a weaker one, the
    factor is 1.
    """
    prompts, responses = ([row[ids] for row in rows] for ids in ("prompt_ids", "completion_ids"))
    states = [row["states"] for row in rows if "states" in row]
    batches = packed_batches(prompts, responses, FEW_TOKENS, model, stored=states)
    with packing(model):
        spent_RS, h_RS = map(np.concatenate, zip(*(_estimate_kls(model, batch) for _, batch in batches), strict=True))
    weight_RS = np.exp(h_RS - h_RS.max(0))
    effective = weight_RS.sum(0) ** 2 / (weight_RS**2).sum(0)
    known = int(np.minimum.accumulate(effective >= min(MIN_EFFECTIVE_ROLLOUTS, len(rows) / 4)).sum())
    spent, scales = np.maximum.accumulate(spent_RS[:, :known].mean(0)), SCALES[:known]
    if not known or (spent[-1] < kl and scales[-1] < 1.0):
        return GuideScale(1.0, None)
    # the KL is nearly a power of the factor, and an untrained guide spends nothing
    factor = float(np.exp(np.interp(np.log(kl), np.log(np.maximum(spent, MIN_KL)), np.log(scales))))
    model.guide.head.scale(factor)
    return GuideScale(factor, float(np.clip(kl, spent[0], spent[-1])))


def _chunks(logits: Logits) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few tokens after the other: where they are, and their log-probabilities (t, V)."""
    for where, part in logits.parts():
        for start in range(0, len(part), CHUNK_TOKENS):
            some = part[start : start + CHUNK_TOKENS].log_softmax(-1)
            yield slice(where.start + start, where.start + start + len(some)), some


def _estimate_kls(model: GuidedForCausalLM, batch: PackedBatch) -> tuple[Array, Array]:
    """Return an unbiased estimate of KL(π_s ‖ π_ref) from each rollout of the reference, for all scales: (R, S).

    Σ_t e^{h_<t}·KL_t, where KL_t is exact over the vocabulary and e^{h_<t} the importance weight of what precedes. And
    h of each whole rollout, (R, S).
    """
    kl, drawn = torch.empty(2, len(SCALES), len(batch.targets), device=batch.targets.device)
    with evaluating(model):
        both = (_chunks(logits) for logits in (model.reference_logits(batch), batch.logits_in_parts(model)))
        for (where, reference), (_, guided) in zip(*both, strict=True):
            guide, targets = guided.sub_(reference), batch.target_classes[where, None]
            for place, scale in enumerate(SCALES):
                tilted = torch.add(reference, guide, alpha=scale)
                log_sum = tilted.logsumexp(-1)
                mean = torch.linalg.vecdot(tilted.sub_(log_sum[:, None]).exp_(), guide)
                kl[place, where] = scale * mean - log_sum
                drawn[place, where] = scale * guide.gather(-1, targets)[:, 0] - log_sum
    terms = [(batch.sum_to_token(d) - d).exp() * k for k, d in zip(kl, drawn, strict=True)]
    spent, h = ([batch.sum_by_response(row).cpu().numpy() for row in rows] for rows in (terms, drawn))
    return np.stack(spent, axis=1), np.stack(h, axis=1)
