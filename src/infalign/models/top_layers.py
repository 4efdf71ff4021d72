"""Training the last layers of a model over the states below them, which are computed once (`models.states`).

The gradient of an adapter on the last n layers needs nothing of the layers below but their output, and this does not
change while the adapter is trained. Needs the ``train`` extra.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from infalign.core.errors import ConfigError, first_line
from infalign.models.packed import PackedBatch, can_pack, packing
from infalign.models.passes import evaluating
from infalign.models.states import states_of

FROM_STATES = "the last layers of this model cannot be run from stored states"


def count_layers_below(config: PreTrainedConfig, top: int) -> int:
    """Return how many layers of a model are below its ``top`` ones. Raises ConfigError if it has fewer."""
    depth: int = config.get_text_config(decoder=True).num_hidden_layers
    if top > depth:
        raise ConfigError(f"lora.layers is {top}, but the model has {depth} layers; lower it or leave it out")
    return depth - top


@contextmanager
def starting_from_states(model: Any, top: int) -> Iterator[None]:
    """Let only the ``top`` layers of ``model`` run inside the block on a packed batch that brings the states below.

    With 0 all of them run, as outside.
    """
    if top == 0:
        yield
        return
    decoder = model.get_decoder()
    every = decoder.layers
    kept = every[-top:]

    def begin(module: Any, args: Any, asked: dict[str, Any]) -> Any:
        packed = asked.get("packed")
        if packed is None or packed.states is None:
            return None
        module.layers = kept
        return args, asked | {"input_ids": None, "inputs_embeds": packed.states[None].to(model.dtype)}

    def end(module: Any, *_: Any) -> None:
        module.layers = every

    with (
        decoder.register_forward_pre_hook(begin, with_kwargs=True),
        decoder.register_forward_hook(end, always_call=True),
    ):
        yield


def check_top_layers(model: Any, top: int) -> None:
    """Raise ConfigError unless the ``top`` layers of a model that packs can start from the states below them."""
    if not can_pack(model):
        raise ConfigError("the reference has layers without full attention; leave lora.layers out")
    ids = (torch.arange(1, 9) % model.config.get_text_config(decoder=True).vocab_size).tolist()
    batch = PackedBatch.pack([ids[:4]], [ids[4:]]).to(model.device)
    with evaluating(model), packing(model):
        whole = batch.logits(model).float()
        states = states_of(model, batch, [count_layers_below(model.config, top)])[0]
        try:
            with starting_from_states(model, top):
                from_states = replace(batch, states=states).logits(model).float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model of another architecture can raise any exception
            raise ConfigError(f"{FROM_STATES} ({first_line(error)}); leave lora.layers out") from error
    if not (from_states - whole).abs().max() <= torch.finfo(model.dtype).eps ** 0.5 * (1 + whole.abs().max()):
        raise ConfigError(f"{FROM_STATES}; leave lora.layers out")
