"""A guide beside a frozen reference: π(v|s) ∝ π_ref(v|s)·e^{Q(s, v)}, with Q a second network of the same vocabulary.

Q(s, ·) = (A·h(s) + b)·Eᵀ, with h the guide's trunk, E the reference's output embedding at the start, and A = b = 0: an
untrained guide is the reference, bit for bit. All of Q is trained and nothing of the reference. In the literature this
form is the prefix scorer of Controlled Decoding (Mudgal et al., ICML 2024). Needs the ``train`` extra.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast


class GuidedConfig(PreTrainedConfig):
    """The configurations of a reference and of its guide's trunk; as a decoder it has the layers of both."""

    model_type = "infalign-guided"

    def __init__(
        self, reference: dict[str, Any] | None = None, trunk: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.reference, self.trunk = reference or {}, trunk or {}
        super().__init__(**more)

    @classmethod
    def of(cls, reference: PreTrainedConfig, trunk: PreTrainedConfig) -> GuidedConfig:
        """Return the configuration of a guided policy."""
        shared = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
        return cls(
            reference.to_dict(),
            trunk.to_dict(),
            num_hidden_layers=reference.num_hidden_layers + trunk.num_hidden_layers,
            hidden_size=reference.hidden_size,
            tie_word_embeddings=False,
            **{name: getattr(reference, name) for name in shared},
        )


class GuidedForCausalLM(PreTrainedModel, GenerationMixin):
    """A reference and its guide as one causal language model."""

    config_class = GuidedConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: GuidedConfig) -> None:
        super().__init__(config)
        reference, trunk = (
            AutoConfig.for_model(**part, attn_implementation=config._attn_implementation)
            for part in (config.reference, config.trunk)
        )
        self.reference = AutoModelForCausalLM.from_config(reference)
        self.trunk = AutoModel.from_config(trunk)
        self.head = nn.Linear(trunk.hidden_size, reference.hidden_size)
        self.vocabulary = nn.Parameter(torch.zeros(reference.vocab_size, reference.hidden_size))
        self.post_init()

    @classmethod
    def beside(cls, reference: PreTrainedModel, trunk: PreTrainedModel) -> GuidedForCausalLM:
        """Return the reference with a guide that changes nothing yet, on ``trunk``; only the guide is trainable."""
        model = cls(GuidedConfig.of(reference.config, trunk.config)).to(reference.device, reference.dtype)
        model.reference.load_state_dict(reference.state_dict())
        model.trunk.load_state_dict(trunk.state_dict())
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.zero_()
            model.vocabulary.copy_(reference.get_output_embeddings().weight)
        model.reference.requires_grad_(False)
        return model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the reference's logits + Q; a cache holds the layers of both, the reference's first."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        first = len(self.reference.base_model.layers)
        parts = [slice(0, first), slice(first, None)]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = []
        for model, part in zip((self.reference.base_model, self.trunk), parts, strict=True):
            cache = None if past_key_values is None else layers_of(past_key_values, part)
            own = kwargs | ({"shared_prefix": cache} if "shared_prefix" in kwargs else {})
            with torch.set_grad_enabled(torch.is_grad_enabled() and model is self.trunk):
                found = model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    past_key_values=cache,
                    use_cache=use_cache,
                    **own,
                )
            hidden.append(found.last_hidden_state[:, kept])
        of_reference, of_trunk = hidden
        logits = self.reference.get_output_embeddings()(of_reference) + self.head(of_trunk) @ self.vocabulary.T
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def layers_of(cache: Any, part: slice) -> Any:
    """Return some layers of a cache as a cache of their own; what is added to it is added to both."""
    if hasattr(cache, "layers_of"):
        return cache.layers_of(part)
    found = DynamicCache()
    found.layers = cache.layers[part]
    return found


AutoConfig.register(GuidedConfig.model_type, GuidedConfig)
AutoModelForCausalLM.register(GuidedConfig, GuidedForCausalLM)
