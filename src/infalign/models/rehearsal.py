"""What loading a model from elsewhere asks for, found out where it can do no harm. Needs the ``train`` extra."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from infalign.confined import BombError, rehearse
from infalign.core.errors import ConfigError
from infalign.models.gguf import gguf_file, is_gguf
from infalign.models.pretrained import check_reach

USER, ASSISTANT = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Good morning, 1 + 1 = 2."}
CONVERSATIONS = ([USER], [USER, ASSISTANT], [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER])
PARAMETERS_A_BYTE = 8  # no format of weights has less than a bit a parameter


def check_harmless(model: str | Path) -> None:
    """Raise ConfigError if loading a model (folder, GGUF file, hub id) takes too much memory or time, or crashes.

    Also for a hub that cannot be reached. What else is wrong with a model is said where it is loaded.
    """
    check_reach(str(model))
    for path in Path(model).iterdir() if Path(model).is_dir() else ():
        if path.is_fifo():
            raise ConfigError(f"{path} is no file; fetch the model again")
    try:
        rehearse(load, model)
    except BombError as error:
        raise ConfigError(f"{model} is not used: {error}") from error


def load(model: str) -> Iterator[str]:
    """Do what loading a model does, but for its weights, and render conversations."""
    warnings.simplefilter("ignore")
    file = gguf_file(model) if is_gguf(model) else None
    place = model if file is None else str(file.parent)
    options = {"trust_remote_code": False} | ({} if file is None else {"gguf_file": file.name})
    yield "its tokenizer"
    from transformers import AutoTokenizer

    from infalign.models import guided, pooled  # noqa: F401 - so that transformers knows them
    from infalign.models.pretrained import conversation_ids

    with suppress(Exception):
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        tokenizer(ASSISTANT["content"])
        yield "its chat template"
        for conversation in CONVERSATIONS:
            for begins in (False, True):
                with suppress(Exception):
                    conversation_ids(tokenizer, conversation, add_generation_prompt=begins)
    yield "the model that its config.json describes"
    parameters = _parameters(place, options)
    weights = _weights(model)
    if weights and parameters > PARAMETERS_A_BYTE * weights:
        raise ConfigError(
            f"{model} is not used: its config.json describes {parameters:,} parameters, and its weights have "
            f"{weights:,} bytes; fetch both again"
        )


def _parameters(place: str, options: dict[str, Any]) -> int:
    """Return how many parameters the model has that a configuration describes; they take no memory."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(place, **options)
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModel):
        with suppress(ValueError), torch.device("meta"):  # it is of another kind
            return sum(parameter.numel() for parameter in kind.from_config(config).parameters())
    return 0


def _weights(model: str) -> int:
    """Return the bytes of the weights that are here: 0 for a model of the hub, and for an adapter without its model."""
    if is_gguf(model):
        return gguf_file(model).stat().st_size
    folder = Path(model)
    if not folder.is_dir() or (folder / "adapter_config.json").exists():
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
