"""What attention functions of our own compute: the plain softmax over earlier tokens."""

from collections.abc import Mapping
from typing import Any

from infalign.core.errors import ConfigError


def check_plain_softmax(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an attention layer asks for more than the plain softmax."""
    for name in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(f"its attention uses {name}")


def unsupported_layers(model: Any) -> str:
    """Return the kinds of a model's layers whose cache is not every earlier token's keys and values, "" for none."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not layers:
        return "unknown layers"
    return ", ".join(sorted(layer.__name__ for layer in layers - {DynamicLayer}))
