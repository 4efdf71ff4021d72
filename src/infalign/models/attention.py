"""Attention functions of our own: the plain softmax over earlier tokens that they compute, and models that use them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from infalign.core.errors import ConfigError


def check_plain_softmax(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an attention layer asks for more than the plain softmax."""
    for name in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(f"its attention uses {name}")


def attention_configs(model: Any) -> list[Any]:
    """Return the configurations that tell the parts of a model how to attend."""
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


@contextmanager
def attending(configs: Sequence[Any], name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """Let models with these configurations attend by ``attend``, under this name, inside the block.

    No mask function is registered with it, so models build no mask.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, attend)
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, attention in zip(configs, before, strict=True):  # a guide's and its reference's may differ
            config._attn_implementation = attention
