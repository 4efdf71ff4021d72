"""A trunk without attention: two linear layers at each token, for a guide on a reference's states.

Needs the ``train`` extra.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class PerTokenConfig(PreTrainedConfig):
    """The width of a trunk without attention; it has no layers of a decoder."""

    model_type = "infalign-per-token"

    def __init__(self, hidden_size: int = 512, **more: Any) -> None:
        self.hidden_size, self.num_hidden_layers = hidden_size, 0
        super().__init__(**more)


class PerTokenModel(PreTrainedModel):
    """GELU, a linear layer and GELU: what a guide's reading is put through, each token by itself."""

    config_class = PerTokenConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: PerTokenConfig) -> None:
        super().__init__(config)
        self.hidden = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights by the width, as PyTorch does: a deviation of 0.02 would be too small for a narrow trunk."""
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutput:
        """Return the hidden states of what was read, (…, hidden) each."""
        return BaseModelOutput(last_hidden_state=gelu(self.hidden(gelu(inputs_embeds))))


AutoConfig.register(PerTokenConfig.model_type, PerTokenConfig)
AutoModel.register(PerTokenConfig, PerTokenModel)
