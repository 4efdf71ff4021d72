"""How large a pass may be, and a model that is only measured (torch, imported when used)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenIds = Sequence[Sequence[int]]
IGNORED = -100  # the label of a token that is not scored: prompt and padding, as everywhere in transformers
BATCH_TOKENS = 16384  # of a forward pass
FEW_TOKENS = 4096  # of one that keeps more than its outputs, such as the states of all layers
MAX_LOGITS = 2**27  # elements in a batch: 512 MiB in float32


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


def context_length(model: PreTrainedModel) -> int | None:
    """Return how many tokens a text may have, None if the model's configuration names no limit."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:  # as in RoBERTa
            return int(part.num_embeddings - part.padding_idx - 1)
    return getattr(model.config, "max_position_embeddings", None)
