"""A guide beside a frozen reference: π(v|s) ∝ π_ref(v|s)·e^{Q(s, v)}, with Q a second network of the same vocabulary.

An untrained guide is the reference, bit for bit. `models.guides` has the forms of Q, of which all is trained,
and nothing of the reference. Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from infalign.models.guides import FORMS, TopTokenHead
from infalign.models.logits import Logits
from infalign.models.packed import PackedBatch
from infalign.models.settings import attention_heads
from infalign.models.submodels import SHARED, as_part
from infalign.models.top_tokens import TopTokens


class GuidedConfig(PreTrainedConfig):
    """The configurations of a reference and of its guide; as a decoder it has the layers of both.

    The guide's has its ``form``, a key of `guides.FORMS`, and the settings of that form.
    """

    model_type = "infalign-guided"

    def __init__(
        self, reference: dict[str, Any] | None = None, guide: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.reference, self.guide = reference or {}, guide or {}
        super().__init__(**more)


class GuidedForCausalLM(PreTrainedModel, GenerationMixin):
    """A reference and its guide as one causal language model."""

    config_class = GuidedConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: GuidedConfig, reference: PreTrainedModel | None = None, **parts: Any) -> None:
        super().__init__(config)
        self.reference = as_part(reference, AutoModelForCausalLM, config.reference, config._attn_implementation)
        self.guide = FORMS[config.guide["form"]](config.guide, self.reference, **parts)
        self.post_init()

    @classmethod
    def with_network(
        cls, reference: PreTrainedModel, network: PreTrainedModel, top_tokens: int = 0
    ) -> GuidedForCausalLM:
        """Return the reference with an untrained guide on a language model without head, which reads tokens.

        Q tells the reference's ``top_tokens`` likeliest tokens apart; 0: all. Both models become parts of it, uncopied.
        """
        guide = {"form": "network", "network": network.config.to_dict(), "top_tokens": top_tokens}
        return cls._with_guide(reference, guide, network.config.num_hidden_layers, network=network)

    @classmethod
    def with_side_network(
        cls, reference: PreTrainedModel, *, hidden: int, layers: int, reads: int, top_tokens: int = 0
    ) -> GuidedForCausalLM:
        """Return the reference with an untrained guide that reads its states: a small Llama of this shape.

        ``reads`` of the reference's layers are read, evenly spaced, the last one among them. Q tells the reference's
        ``top_tokens`` likeliest tokens apart; 0: all.
        """
        config = reference.config
        network = LlamaConfig(
            vocab_size=1,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=attention_heads(hidden, width=64),
            max_position_embeddings=config.max_position_embeddings,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # it reads no tokens
        )
        read = evenly_spaced_layers(config.num_hidden_layers, reads)
        guide = {"form": "side", "network": network.to_dict(), "reads": read, "top_tokens": top_tokens}
        return cls._with_guide(reference, guide, layers)

    @classmethod
    def _with_guide(
        cls, reference: PreTrainedModel, guide: dict[str, Any], layers: int, **parts: PreTrainedModel
    ) -> GuidedForCausalLM:
        """Return the reference with an untrained guide of this many decoder ``layers``; only the guide is trainable."""
        own = reference.config
        config = GuidedConfig(
            own.to_dict(),
            guide,
            num_hidden_layers=own.num_hidden_layers + layers,
            tie_word_embeddings=False,
            **{name: getattr(own, name) for name in (*SHARED, "hidden_size")},
        )
        model = cls(config, reference, **parts).to(reference.device, reference.dtype)
        model.reference.requires_grad_(False)
        model.generation_config.eos_token_id = reference.generation_config.eos_token_id
        with torch.no_grad():
            model.guide.start(reference)
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
        """Return the reference's logits + Q; a cache holds the layers of both, the reference's first.

        A packed batch that brings the reference's top tokens gets the logits of their classes.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        asked = kwargs | {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        asked |= {"use_cache": use_cache}
        with torch.no_grad():
            states = self._read_reference(past_key_values, **asked)
        own = _part_of_cache(past_key_values, slice(self.config.reference["num_hidden_layers"], None), asked)
        hidden = self.guide.hidden_states(self.reference, states, kept, **asked | own)
        head, output, packed = self.guide.head, self.reference.get_output_embeddings(), kwargs.get("packed")
        if packed is not None and packed.top_tokens is not None:
            assert isinstance(head, TopTokenHead)
            logits = head.class_logits(packed.top_tokens, hidden[0], output)[None]
        else:
            logits = head.guided_logits(states[:, kept, -self.config.hidden_size :], hidden, output)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def _read_reference(self, cache: Any, **asked: Any) -> Tensor:
        """Return the states that the guide reads; the reference's last ones end them. A packed batch may bring them."""
        packed, reads = asked.get("packed"), self.guide.reads
        if packed is not None and packed.states is not None:
            return packed.states[None].to(self.dtype)
        own = _part_of_cache(cache, slice(0, self.config.reference["num_hidden_layers"]), asked)
        outputs = self.reference.base_model(**asked | own, output_hidden_states=bool(reads))
        return states_after(outputs, reads) if reads else outputs.last_hidden_state

    def reference_logits(self, batch: PackedBatch) -> Logits:
        """Return the reference's logits that predict each token of the responses; inside `packing`.

        A batch that brings the reference's top tokens gets those of their classes.
        """
        if batch.top_tokens is not None:
            return Logits(batch.top_tokens.logprobs, None)
        if batch.states is not None:
            last = batch.states[batch.predictors, -self.config.hidden_size :].to(self.dtype)
            return Logits(last, self.reference.get_output_embeddings())
        return batch.logits_in_parts(self.reference)

    @torch.no_grad()
    def read_once(self, batch: PackedBatch) -> PackedBatch:
        """Return a batch that brings what this policy and its reference need of a pass through the reference.

        If Q tells top tokens apart, it brings classes of tokens instead of logits of all; inside `packing`.
        """
        batch, head = replace(batch, states=batch.run(partial(self._read_reference, None))[0]), self.guide.head
        if not isinstance(head, TopTokenHead):
            return batch
        return replace(batch, top_tokens=TopTokens.of_parts(self.reference_logits(batch), batch.targets, head.count))

    def is_beside(self, reference: PreTrainedModel) -> bool:
        """Return whether its reference has the weights of another model."""
        own, others = self.reference.state_dict(), reference.state_dict()
        return own.keys() == others.keys() and all(map(torch.equal, own.values(), others.values()))

    def get_output_embeddings(self) -> Any:
        """Return the reference's output embedding if its product gives the logits; None with one of the guide's own."""
        return self.reference.get_output_embeddings() if self.guide.head.shares_product else None


def states_after(found: Any, layers: Sequence[int]) -> Tensor:
    """Return the states after these layers, side by side, of a pass that gives hidden states."""
    return torch.cat([found.hidden_states[layer] for layer in layers], dim=-1)


def evenly_spaced_layers(depth: int, count: int) -> list[int]:
    """Return ``count`` of a model's layers, evenly spaced, the last one among them."""
    return sorted({max(1, depth * n // count) for n in range(1, count + 1)})


def _part_of_cache(cache: Any, part: slice, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that give one model of a policy its ``part`` of the policy's cache, as ``asked`` has it.

    What is added to the part is added to both.
    """
    own = None
    if hasattr(cache, "layers_of"):
        own = cache.layers_of(part)
    elif cache is not None:
        own = DynamicCache()
        own.layers = cache.layers[part]
    return {"past_key_values": own} | ({"shared_prefix": own} if "shared_prefix" in asked else {})


AutoConfig.register(GuidedConfig.model_type, GuidedConfig)
AutoModelForCausalLM.register(GuidedConfig, GuidedForCausalLM)
