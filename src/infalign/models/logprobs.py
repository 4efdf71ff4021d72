"""Log-probabilities of given completions (torch, imported when used)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


TokenIds = Sequence[Sequence[int]]
IGNORED = -100  # the label of a token that is not scored: prompt and padding, as everywhere in transformers
BATCH_TOKENS = 16384  # of a forward pass
FEW_TOKENS = 4096  # of one that keeps more than its outputs, such as the states of all layers
MAX_LOGITS = 2**27  # elements in a batch: 512 MiB in float32


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the row numbers in batches of similar length, the longest first, of at most ``batch_tokens`` when padded.

    A row longer than ``batch_tokens`` is a batch by itself.

    >>> list(length_batches([2, 5, 3], batch_tokens=6))
    [[1], [2, 0]]
    """
    # The longest batch comes first: if memory is too small, this shows at once.
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + rows]
        start += rows


def right_padded(rows: TokenIds, padding: int, device: Any) -> torch.Tensor:
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
    import torch

    logits, targets = scored_logits(model, input_ids, attention_mask, labels)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A gather minus a logsumexp: log_softmax would keep a second array of the size of the logits for the gradient.
    logprobs = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return logprobs.masked_fill(targets == IGNORED, 0.0).sum(-1)


def token_logprobs(
    model: PreTrainedModel, prompt_ids: TokenIds, completion_ids: TokenIds, *, batch_tokens: int = BATCH_TOKENS
) -> Array:
    """Return Σ_t log π(y_t | x, y_<t), in nats, for each prompt x and completion y given as token ids.

    The sum runs over every completion token, so the EOS counts if it is there. ``batch_tokens`` bounds the padded
    tokens of one forward pass, which takes fewer where the vocabulary is so large that its logits would need more than
    512 MiB in float32. The model runs in evaluation mode and is put back as it was.

    Raises DataError if the two lists differ in length or a prompt is empty.
    """
    result = np.empty(len(prompt_ids))
    with evaluating(model):
        for rows, batch in padded_batches(prompt_ids, completion_ids, batch_tokens, model):
            result[rows] = completion_logprobs(model, **batch).cpu().numpy()
    return result


def scored_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits (batch, kept, V) and the labels (batch, kept) that they predict; the one place for the shift.

    Only columns where some row has a label are kept, so the head does not run over the prompts.
    """
    targets = labels[:, 1:]
    kept = (targets != IGNORED).any(0).nonzero().squeeze(-1)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # without them padding on the left would shift positions
    logits = model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, logits_to_keep=kept, use_cache=False
    ).logits
    if logits.shape[1] != len(kept):
        raise ConfigError(f"{type(model).__name__} ignores logits_to_keep; use a causal language model of transformers")
    return logits, targets[:, kept]


def check_rows(prompt_ids: TokenIds, completion_ids: TokenIds) -> None:
    """Raise DataError if there is not one completion a prompt, or a prompt is empty."""
    if len(prompt_ids) != len(completion_ids):
        raise DataError(f"the numbers of prompts ({len(prompt_ids)}) and completions ({len(completion_ids)}) differ")
    for row, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise DataError(f"row {row}: the prompt has no tokens; begin it with a BOS token")


def padded_batch(prompt_ids: TokenIds, completion_ids: TokenIds, device: Any) -> dict[str, torch.Tensor]:
    """Return input ids, attention mask and labels, as `completion_logprobs` takes them, padded on the right."""
    texts = list(zip(prompt_ids, completion_ids, strict=True))
    return {
        "input_ids": right_padded([[*prompt, *completion] for prompt, completion in texts], 0, device),  # any token
        "attention_mask": right_padded([[1] * (len(p) + len(completion)) for p, completion in texts], 0, device),
        "labels": right_padded([[*[IGNORED] * len(p), *completion] for p, completion in texts], IGNORED, device),
    }


def padded_batches(
    prompt_ids: TokenIds, completion_ids: TokenIds, batch_tokens: int, model: PreTrainedModel
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Yield row numbers with their `padded_batch`."""
    check_rows(prompt_ids, completion_ids)
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    batch_tokens = min(batch_tokens, MAX_LOGITS // model.config.get_text_config(decoder=True).vocab_size)
    for rows in length_batches(lengths, batch_tokens):
        prompts, completions = ([ids[row] for row in rows] for ids in (prompt_ids, completion_ids))
        yield rows, padded_batch(prompts, completions, model.device)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run the model without dropout and without gradients; then put it back into the mode it was in."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
