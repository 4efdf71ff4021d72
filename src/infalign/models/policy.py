"""A language model with its tokenizer: what the calls of the library take and return."""

from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from infalign.models.conversion import content_hash, convert, is_convertible, locate_model
from infalign.models.pretrained import load_policy, model_digest
from infalign.models.settings import Compute
from infalign.models.tokenizers import check_template, load_tokenizer

AnyModel = Any
"""A folder or hub id, a loaded transformers model, or ``(model, tokenizer)``."""


class Policy(NamedTuple):
    """A causal language model in memory, in evaluation mode, with the tokenizer that renders its prompts.

    >>> model, tokenizer = Policy.of(MODEL)  # also the folder of a policy with a guide, which only infalign loads
    """

    model: Any
    tokenizer: Any

    def __repr__(self) -> str:
        return f"Policy({type(self.model).__name__}, {self.model.num_parameters():,} parameters)"

    @classmethod
    def of(cls, model: AnyModel) -> "Policy":
        """Load a folder, hub id, GGUF, LoRA adapter or ``package:NAME`` in float32, on a GPU if there is one.

        A loaded model stays as it is, but without dropout; without a tokenizer it has that of the folder or hub id that
        it was loaded from. Raises ConfigError for what cannot be loaded, and for a tokenizer without a chat template.
        """
        if isinstance(model, str | Path):
            folder = convert(str(model))
            tokenizer = load_tokenizer(folder)
            return cls(load_policy(folder, device=Compute().torch_device())[0], tokenizer)
        network, tokenizer = model if isinstance(model, tuple) else (model, load_tokenizer(model.name_or_path))
        check_template(tokenizer, model_name(network))
        return cls(network.eval(), tokenizer)


def model_name(model: AnyModel) -> str:
    """Return the folder or hub id of a model; of a loaded one, that from which it was loaded."""
    network = model[0] if isinstance(model, tuple) else model
    return str(getattr(network, "name_or_path", network))


def loaded(model: AnyModel, compute: Compute) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)``: as given, or of a folder or hub id."""
    return model if isinstance(model, tuple) else load_policy(model, device=compute.torch_device(), dtype=compute.dtype)


def identity(model: AnyModel) -> str:
    """Return what tells a model from others: the hash of its folder, its hub id, or the hash of its loaded weights."""
    network = model[0] if isinstance(model, tuple) else model
    if isinstance(network, str | Path):
        named = locate_model(str(network))
        return content_hash(named) if is_convertible(named) else model_digest(named)
    import torch

    digest = blake2b(digest_size=16)
    for weight in network.state_dict().values():
        digest.update(weight.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
