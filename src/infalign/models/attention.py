"""What attention functions of our own compute: the plain softmax over earlier tokens."""

from collections.abc import Mapping
from typing import Any

from infalign.errors import ConfigError


def check_plain(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an attention layer asks for more than the plain softmax."""
    for name in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(f"its attention uses {name}")
