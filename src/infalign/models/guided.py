"""A guide beside a frozen reference: π(v|s) ∝ π_ref(v|s)·e^{Q(s, v)}, with Q a second network of the same vocabulary.

Q(s, ·) = (A·h(s) + b)·Eᵀ, with h the guide's trunk, E the reference's output embedding at the start, and A = b = 0: an
untrained guide is the reference, bit for bit. All of Q is trained and nothing of the reference. In the literature this
form is the prefix scorer of Controlled Decoding (Mudgal et al., ICML 2024). Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast


class GuidedConfig(PreTrainedConfig):
    """The configurations of a reference and of its guide's trunk; as a decoder it has the layers of both.

    Without a ``trunk`` this is the reference itself with a LoRA ``adapter``: its rank and alpha.
    """

    model_type = "infalign-guided"

    def __init__(
        self,
        reference: dict[str, Any] | None = None,
        trunk: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.reference, self.trunk, self.adapter = reference or {}, trunk, adapter
        super().__init__(**more)

    @classmethod
    def of(
        cls, reference: PreTrainedConfig, trunk: PreTrainedConfig | None, adapter: dict[str, Any] | None
    ) -> GuidedConfig:
        """Return the configuration of a guided policy."""
        shared = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
        return cls(
            reference.to_dict(),
            None if trunk is None else trunk.to_dict(),
            adapter,
            num_hidden_layers=reference.num_hidden_layers + (trunk or reference).num_hidden_layers,
            hidden_size=reference.hidden_size,
            tie_word_embeddings=False,
            **{name: getattr(reference, name) for name in shared},
        )


class GuidedForCausalLM(PreTrainedModel, GenerationMixin):
    """A reference and its guide as one causal language model.

    The guide has a trunk of its own, or it is a LoRA adapter on the reference, of which there is one in memory, with a
    head of the adapter's rank and the reference's output embedding.
    """

    config_class = GuidedConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(
        self, config: GuidedConfig, reference: PreTrainedModel | None = None, trunk: PreTrainedModel | None = None
    ) -> None:
        super().__init__(config)
        attention = config._attn_implementation
        dtype = torch.get_default_dtype()  # that of loading; a part's own configuration has that of its training
        for given in (reference, trunk):
            for part in given.modules() if given is not None else ():
                part._is_hf_initialized = True  # `post_init` would draw its weights anew
        if reference is None:
            reference = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config.reference, attn_implementation=attention), dtype=dtype
            )
        if trunk is None and config.trunk is not None:
            trunk = AutoModel.from_config(
                AutoConfig.for_model(**config.trunk, attn_implementation=attention), dtype=dtype
            )
        self.reference, self.trunk, self.narrow, self.vocabulary = reference, trunk, None, None
        width = reference.config.hidden_size
        if trunk is not None:
            self.head = nn.Linear(trunk.config.hidden_size, width)
            self.vocabulary = nn.Parameter(torch.zeros(reference.config.vocab_size, width))
        else:
            from peft import LoraConfig, inject_adapter_in_model

            assert config.adapter is not None
            lora = LoraConfig(r=config.adapter["rank"], lora_alpha=config.adapter["alpha"], target_modules="all-linear")
            inject_adapter_in_model(lora, reference.base_model)
            self.narrow, self.head = nn.Linear(width, lora.r, bias=False), nn.Linear(lora.r, width)
        self.post_init()

    @classmethod
    def beside(
        cls, reference: PreTrainedModel, trunk: PreTrainedModel | None, adapter: dict[str, Any] | None = None
    ) -> GuidedForCausalLM:
        """Return the reference with a guide that changes nothing yet; only the guide is trainable.

        The guide is on ``trunk``, or without one a LoRA ``adapter`` of a ``rank`` and an ``alpha`` on the reference.
        Both models become parts of the policy; nothing is copied.
        """
        config = GuidedConfig.of(reference.config, None if trunk is None else trunk.config, adapter)
        model = cls(config, reference, trunk).to(reference.device, reference.dtype)
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.zero_()
            if model.vocabulary is not None:
                model.vocabulary.copy_(reference.get_output_embeddings().weight)
        if model.narrow is not None:  # `post_init` drew both too small
            model.narrow.reset_parameters()
            for layer in model.adapted:
                layer.reset_lora_parameters("default", True)
        for name, weight in reference.named_parameters():
            weight.requires_grad_(".lora_" in name)
        return model

    def strengthen(self, factor: float) -> None:
        """Multiply Q by ``factor``."""
        with torch.no_grad():
            self.head.weight.mul_(factor)
            self.head.bias.mul_(factor)

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
        first = self.config.reference["num_hidden_layers"]
        of_reference, of_trunk = slice(0, first), slice(first, None)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep

        def hidden(model: Any, layers: slice) -> Tensor:
            cache = None if past_key_values is None else layers_of(past_key_values, layers)
            own = kwargs | ({"shared_prefix": cache} if "shared_prefix" in kwargs else {})
            found: Tensor = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=use_cache,
                **own,
            ).last_hidden_state[:, kept]
            return found

        with torch.no_grad(), self.unguided():
            logits = self.reference.get_output_embeddings()(hidden(self.reference.base_model, of_reference))
        logits = logits + self.q(hidden(self.guide, of_trunk))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    @property
    def guide(self) -> Any:
        """The network whose last hidden states Q is made of."""
        return self.reference.base_model if self.trunk is None else self.trunk

    def q(self, hidden: Tensor) -> Tensor:
        """Return Q, (…, V), from the last hidden states of `guide`."""
        narrow = hidden if self.narrow is None else self.narrow(hidden)
        vocabulary = self.reference.get_output_embeddings().weight if self.vocabulary is None else self.vocabulary
        found: Tensor = self.head(narrow) @ vocabulary.T
        return found

    @property
    def adapted(self) -> list[Any]:
        """The layers of the reference that have an adapter."""
        if self.trunk is not None:
            return []
        from peft.tuners.lora import LoraLayer

        return [layer for layer in self.reference.modules() if isinstance(layer, LoraLayer)]

    @contextmanager
    def unguided(self, disabled: bool = True) -> Iterator[None]:
        """Let ``reference`` be the reference inside the block: an adapter, if the guide is one, is ``disabled``."""
        before = [layer._disable_adapters for layer in self.adapted]
        for layer in self.adapted:
            layer._disable_adapters = disabled  # `enable_adapters` would also change which weights are trained
        try:
            yield
        finally:
            for layer, was in zip(self.adapted, before, strict=True):
                layer._disable_adapters = was


class GuideProcessor(LogitsProcessor):
    """Adds the Q of a guided policy to the logits of its reference, so that the reference samples as the policy.

    ``reference.generate(ids, attention_mask=mask, logits_processor=[GuideProcessor(policy, mask)])``, with the mask
    (B, prompt tokens) of left-padded prompts. The reference may be ``policy.reference``: with an adapter as the guide,
    call ``generate`` inside ``policy.unguided()``. It has a cache, so each call of ``generate`` takes a new one; where
    rows change places or prompts, as in beam search, it raises ValueError.
    """

    def __init__(self, policy: GuidedForCausalLM, attention_mask: Tensor) -> None:
        self._policy, self._mask, self._cache = policy, attention_mask, DynamicCache()
        self._seen: Tensor | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the reference's logits ``scores`` (rows, V) + Q after the tokens ``input_ids`` (rows, tokens)."""
        rows, length = input_ids.shape
        begin = 0 if self._seen is None else self._seen.shape[1]
        if self._seen is None:
            self._mask = self._mask.repeat_interleave(rows // len(self._mask), 0)  # `num_return_sequences`
        elif length <= begin or not torch.equal(input_ids[:, :begin], self._seen):
            raise ValueError("a GuideProcessor follows the rows of one call of generate, without beam search")
        grown = self._mask.new_ones(rows, length - self._mask.shape[1])
        self._mask, self._seen = torch.cat([self._mask, grown], dim=1), input_ids
        with self._policy.unguided(disabled=False):
            hidden = self._policy.guide(
                input_ids=input_ids[:, begin:],
                attention_mask=self._mask,
                position_ids=(self._mask.cumsum(1) - 1).clamp(min=0)[:, begin:],
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
        return scores + self._policy.q(hidden[:, -1])


def layers_of(cache: Any, part: slice) -> Any:
    """Return some layers of a cache as a cache of their own; what is added to it is added to both."""
    if hasattr(cache, "layers_of"):
        return cache.layers_of(part)
    found = DynamicCache()
    found.layers = cache.layers[part]
    return found


AutoConfig.register(GuidedConfig.model_type, GuidedConfig)
AutoModelForCausalLM.register(GuidedConfig, GuidedForCausalLM)
