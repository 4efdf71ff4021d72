"""Log-probabilities of given completions, and how far a policy is from its reference (torch, imported when used)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from infalign.calibration import Array
from infalign.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TokenIds = Sequence[Sequence[int]]

IGNORED = -100  # the label of a token that is not scored: prompt and padding, as everywhere in transformers


@dataclass(frozen=True)
class SequenceKL:
    """Two estimates of KL(π ‖ reference) for each sequence, in nats, both unbiased for sequences sampled from π.

    ``rao_blackwell`` is Σ_t KL(π(·|y_<t) ‖ reference(·|y_<t)), never negative and the one to report; ``k1`` is the
    log-ratio Σ_t log π(y_t|y_<t) − log reference(y_t|y_<t) of the sampled tokens; ``tokens`` is the length.
    """

    rao_blackwell: Array
    k1: Array
    tokens: NDArray[np.int64]


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the row numbers in batches of like length, the longest first, of at most ``batch_tokens`` when padded.

    A row longer than ``batch_tokens`` is a batch by itself.

    >>> list(length_batches([2, 5, 3], batch_tokens=6))
    [[1], [2, 0]]
    """
    # The longest first: if memory is too small, it is at once.
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + rows]
        start += rows


def right_padded(rows: TokenIds, padding: int, device: torch.device) -> torch.Tensor:
    """Return the rows as one integer tensor of shape (rows, longest), filled with ``padding`` on the right."""
    import torch

    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.long, device=device)


def completion_logprobs(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return Σ_t log π(label_t | what precedes it) over the labels other than −100: shape (batch,), differentiable.

    All arguments have shape (batch, width), padded on either side; ``labels`` are the input ids with −100 at prompt and
    padding, *not* shifted. A label in the first column has no context and is not scored. At least float32.
    """
    logits, targets = _scored_logits(model, input_ids, attention_mask, labels)
    logits = _upcast(logits)
    # A gather minus a logsumexp: log_softmax would keep a second array of the size of the logits for the gradient.
    logprobs = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return logprobs.masked_fill(targets == IGNORED, 0.0).sum(-1)


def token_logprobs(
    model: PreTrainedModel, prompt_ids: TokenIds, completion_ids: TokenIds, *, pad_id: int, batch_tokens: int
) -> Array:
    """Return Σ_t log π(y_t | x, y_<t), in nats, for each prompt x and completion y given as token ids.

    The sum runs over every completion token, so the EOS counts if it is there. ``batch_tokens`` bounds the padded
    tokens of one forward pass. The model runs in evaluation mode and is put back as it was.

    Raises DataError if the two lists differ in length or a prompt is empty.
    """
    result = np.empty(len(prompt_ids))
    with _evaluating(model):
        for rows, batch in _padded_batches(prompt_ids, completion_ids, pad_id, batch_tokens, model.device):
            result[rows] = completion_logprobs(model, *batch).cpu().numpy()
    return result


def rao_blackwell_kl(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    *,
    pad_id: int,
    batch_tokens: int,
    temperature: float = 1.0,
) -> SequenceKL:
    """Estimate KL(policy ‖ reference) from completions sampled from the policy, one estimate a sequence.

    Every completion token counts, the EOS included. The estimates hold for completions sampled from the whole
    vocabulary (no top-p, no top-k) at ``temperature``, which divides the logits of both models. Both models must be on
    one device; memory is that of their logits, ``batch_tokens`` × V each, plus float32 copies for one sequence.

    Raises DataError if the two lists differ in length or a prompt is empty, ConfigError if the temperature is not
    positive or the vocabularies differ in size.
    """
    if not temperature > 0:
        raise ConfigError(f"the KL needs the sampling temperature, a number above 0, found {temperature}")
    kl, k1 = np.empty(len(prompt_ids)), np.empty(len(prompt_ids))
    with _evaluating(policy), _evaluating(reference):
        for rows, batch in _padded_batches(prompt_ids, completion_ids, pad_id, batch_tokens, policy.device):
            policy_logits, targets = _scored_logits(policy, *batch)
            reference_logits, _ = _scored_logits(reference, *batch)
            if policy_logits.shape != reference_logits.shape:
                raise ConfigError(
                    f"the policy has {policy_logits.shape[-1]} outputs and the reference {reference_logits.shape[-1]}; "
                    "a KL needs two models of one vocabulary"
                )
            for i, row in enumerate(rows):  # by sequence, to keep the float32 copies small
                scored = targets[i] != IGNORED
                log_p = (_upcast(policy_logits[i, scored]) / temperature).log_softmax(-1)
                log_ratio = log_p - (_upcast(reference_logits[i, scored]) / temperature).log_softmax(-1)
                kl[row] = (log_p.exp() * log_ratio).sum().item()
                k1[row] = log_ratio.gather(-1, targets[i, scored].unsqueeze(-1)).sum().item()
    return SequenceKL(kl, k1, np.array([len(completion) for completion in completion_ids], np.int64))


def _scored_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits (batch, kept, V) and the labels (batch, kept) that they predict; the one place for the shift.

    Only columns where some row has a label are kept, so the head does not run over the prompts.
    """
    targets = labels[:, 1:]
    kept = (targets != IGNORED).any(0).nonzero().squeeze(-1)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # without them padding on the left would shift positions
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions,
        logits_to_keep=kept,
        use_cache=False,
    ).logits
    if logits.shape[1] != len(kept):
        raise ConfigError(f"{type(model).__name__} ignores logits_to_keep; use a causal language model of transformers")
    return logits, targets[:, kept]


def _upcast(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in float32, or in float64 if they are."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _padded_batches(
    prompt_ids: TokenIds, completion_ids: TokenIds, pad_id: int, batch_tokens: int, device: torch.device
) -> Iterator[tuple[list[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Yield row numbers with their input ids, attention mask and labels."""
    if len(prompt_ids) != len(completion_ids):
        raise DataError(f"{len(prompt_ids)} prompts do not go with {len(completion_ids)} completions")
    for row, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise DataError(f"row {row}: the prompt has no tokens, so the first token has no context; begin with a BOS")
    sequences = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    for rows in length_batches([len(sequence) for sequence in sequences], batch_tokens):
        input_ids = right_padded([sequences[row] for row in rows], pad_id, device)
        attention_mask = right_padded([[1] * len(sequences[row]) for row in rows], 0, device)
        labels = right_padded(
            [[*[IGNORED] * len(prompt_ids[row]), *completion_ids[row]] for row in rows], IGNORED, device
        )
        yield rows, (input_ids, attention_mask, labels)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run the model without dropout and without gradients; then put it back into the mode it was in."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
