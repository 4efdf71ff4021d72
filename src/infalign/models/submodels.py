"""Models that are parts of other models. Needs the ``train`` extra."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

# What a model has in common with the one that it is a part of.
SHARED = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")


def as_part(
    given: PreTrainedModel | None, kind: Any, settings: Mapping[str, Any], attention: str | None
) -> PreTrainedModel:
    """Return a model to be a part of another: the ``given`` one, or a new one of an Auto class by its configuration.

    `post_init` of the whole does not draw its weights again. A new one has the precision of loading, not of its
    training.
    """
    if given is None:
        config = AutoConfig.for_model(**settings, attn_implementation=attention)
        return kind.from_config(config, dtype=torch.get_default_dtype())
    for module in given.modules():
        module._is_hf_initialized = True
    return given
