"""A guide beside a frozen reference: π(v|s) ∝ π_ref(v|s)·e^{Q(s, v)}, with Q a second network of the same vocabulary.

Q(s, ·) = (A·h(s) + b)·Eᵀ, with h the guide's trunk, E the reference's output embedding at the start, and A = b = 0: an
untrained guide is the reference, bit for bit. All of Q is trained and nothing of the reference. In the literature this
form is the prefix scorer of Controlled Decoding (Mudgal et al., ICML 2024); a trunk that reads the reference's states
is the side network of Ladder Side-Tuning (Sung et al., NeurIPS 2022). Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    LlamaConfig,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from infalign.models.likely import Likely, products
from infalign.models.packed import Packed
from infalign.models.vocabulary import Logits


class GuidedConfig(PreTrainedConfig):
    """The configurations of a reference and of its guide's trunk; as a decoder it has the layers of both.

    Without a ``trunk`` this is the reference itself with a LoRA ``adapter``: its rank and alpha. A trunk with ``reads``
    has the reference's states after these layers as its input, not tokens. The Q of a trunk tells apart the reference's
    ``likely`` tokens at each place, so many, and is one number for all others, or without it all tokens.
    """

    model_type = "infalign-guided"

    def __init__(
        self,
        reference: dict[str, Any] | None = None,
        trunk: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        reads: Sequence[int] = (),
        likely: int | None = None,
        **more: Any,
    ) -> None:
        self.reference, self.trunk, self.adapter, self.reads = reference or {}, trunk, adapter, list(reads)
        self.likely = likely
        super().__init__(**more)

    @classmethod
    def of(
        cls,
        reference: PreTrainedConfig,
        trunk: PreTrainedConfig | None,
        adapter: dict[str, Any] | None,
        reads: Sequence[int],
        likely: int | None,
    ) -> GuidedConfig:
        """Return the configuration of a guided policy."""
        shared = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
        return cls(
            reference.to_dict(),
            None if trunk is None else trunk.to_dict(),
            adapter,
            reads,
            likely,
            num_hidden_layers=reference.num_hidden_layers + (trunk or reference).num_hidden_layers,
            hidden_size=reference.hidden_size,
            tie_word_embeddings=False,
            **{name: getattr(reference, name) for name in shared},
        )


class GuidedForCausalLM(PreTrainedModel, GenerationMixin):
    """A reference and its guide as one causal language model.

    The guide has a trunk of its own, which reads tokens or the reference's states, or it is a LoRA adapter on the
    reference, of which there is one in memory, with a head of the adapter's rank. The output embedding is the guide's
    own only if its trunk reads tokens and Q tells all tokens apart.
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
        self.reference, self.trunk, self.read, self.narrow, self.vocabulary = reference, trunk, None, None, None
        self.others: nn.Linear | None = None
        width, reads = reference.config.hidden_size, len(config.reads)
        if trunk is not None and reads:
            hidden = trunk.config.hidden_size
            self.read = nn.Sequential(
                nn.Unflatten(-1, (reads, width)),
                nn.RMSNorm(width, elementwise_affine=False),
                nn.Flatten(-2),
                nn.Linear(reads * width, hidden),
            )
            self.head = nn.Linear(hidden, width)
        elif trunk is not None:
            self.head = nn.Linear(trunk.config.hidden_size, width)
            if config.likely is None:
                self.vocabulary = nn.Parameter(torch.zeros(reference.config.vocab_size, width))
        else:
            from peft import LoraConfig, inject_adapter_in_model

            assert config.adapter is not None
            lora = LoraConfig(r=config.adapter["rank"], lora_alpha=config.adapter["alpha"], target_modules="all-linear")
            inject_adapter_in_model(lora, reference.base_model)
            self.narrow, self.head = nn.Linear(width, lora.r, bias=False), nn.Linear(lora.r, width)
        if trunk is not None and config.likely is not None:
            self.others = nn.Linear(trunk.config.hidden_size, 1)
        self.post_init()

    @classmethod
    def beside(
        cls,
        reference: PreTrainedModel,
        trunk: PreTrainedModel | None,
        adapter: dict[str, Any] | None = None,
        reads: Sequence[int] = (),
        likely: int | None = None,
    ) -> GuidedForCausalLM:
        """Return the reference with a guide that changes nothing yet; only the guide is trainable.

        The guide is on ``trunk``, which may read the reference's states after the layers ``reads`` and whose Q may tell
        only its ``likely`` tokens apart, or without one a LoRA ``adapter`` of a ``rank`` and an ``alpha`` on the
        reference. Both models become parts of the policy; nothing is copied.
        """
        config = GuidedConfig.of(reference.config, None if trunk is None else trunk.config, adapter, reads, likely)
        model = cls(config, reference, trunk).to(reference.device, reference.dtype)
        with torch.no_grad():
            for linear in model.ends:
                linear.weight.zero_()
                linear.bias.zero_()
            if model.vocabulary is not None:
                model.vocabulary.copy_(reference.get_output_embeddings().weight)
        if model.narrow is not None:  # `post_init` drew both too small
            model.narrow.reset_parameters()
            for layer in model.adapted:
                layer.reset_lora_parameters("default", True)
        for name, weight in reference.named_parameters():
            weight.requires_grad_(".lora_" in name)
        if trunk is not None and reads:
            trunk.get_input_embeddings().requires_grad_(False)  # it reads no tokens
        return model

    @classmethod
    def reading(
        cls, reference: PreTrainedModel, *, hidden: int, layers: int, heads: int, reads: int, likely: int | None = None
    ) -> GuidedForCausalLM:
        """Return the reference with an untrained guide that reads its states, a small Llama.

        ``reads`` of the reference's layers are read, evenly spaced, the last one among them. Of the vocabulary it tells
        the reference's ``likely`` tokens apart, by default all.
        """
        config = reference.config
        shape = LlamaConfig(
            vocab_size=1,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=config.max_position_embeddings,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # it reads no tokens
            attn_implementation=config._attn_implementation,
        )
        trunk = AutoModel.from_config(shape, dtype=reference.dtype)
        return cls.beside(reference, trunk, reads=layers_read(config.num_hidden_layers, reads), likely=likely)

    @property
    def ends(self) -> list[nn.Linear]:
        """The layers that Q is linear in."""
        return [self.head] if self.others is None else [self.head, self.others]

    def strengthen(self, factor: float) -> None:
        """Multiply Q by ``factor``."""
        with torch.no_grad():
            for linear in self.ends:
                linear.weight.mul_(factor)
                linear.bias.mul_(factor)

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

        A packed batch that brings the reference's likely tokens gets the logits of their classes.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        asked = kwargs | {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        with torch.no_grad(), self.unguided():
            last, states = self._of_reference(past_key_values, input_ids=input_ids, **asked)
            likely = self._brought(asked.get("packed"))
            apart = likely is None and not self._one_product
            logits = self.reference.get_output_embeddings()(last[:, kept]) if apart else None
        hidden = self._of_guide(past_key_values, states, input_ids=input_ids, **asked)[:, kept]
        if likely is not None:
            assert self.others is not None
            q = products(self._narrowed(hidden[0]), likely.ids, self.reference.get_output_embeddings().weight)
            logits = likely.guided(q, self.others(hidden[0]))[None]
        elif logits is None:
            logits = self.reference.get_output_embeddings()(last[:, kept] + self._narrowed(hidden))
        else:
            logits = self.with_q(logits, hidden)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def _of_reference(self, cache: Any, **asked: Any) -> tuple[Tensor, Tensor | None]:
        """Return the reference's last hidden states, and the states that the guide reads, side by side.

        A packed batch may bring them.
        """
        packed = asked.get("packed")
        if packed is not None and packed.states is not None:
            states = packed.states[None].to(self.head.weight.dtype)
            return states[..., -self.config.hidden_size :], states
        part = slice(0, self.config.reference["num_hidden_layers"])
        found = _run(self.reference.base_model, cache, part, output_hidden_states=self.read is not None, **asked)
        if self.read is None:
            return found.last_hidden_state, None
        return found.last_hidden_state, read_states(found, self.config.reads)

    def unguided_logits(self, batch: Packed) -> Logits:
        """Return the reference's logits that predict each token of the responses; inside `packing`.

        A batch that brings the reference's likely tokens gets those of their classes.
        """
        if (likely := self._brought(batch)) is not None:
            return Logits(likely.logprobs, None)
        if batch.states is not None:
            last = batch.states[batch.before, -self.config.hidden_size :].to(self.head.weight.dtype)
            return Logits(last, self.reference.get_output_embeddings())
        with self.unguided():
            return batch.logits_in_parts(self.reference)

    @torch.no_grad()
    def read_once(self, batch: Packed) -> Packed:
        """Return a batch that brings what this policy and its reference need of a pass through the reference.

        If this tells likely tokens apart, with classes of tokens instead of logits of all; inside `packing`.
        """
        asked = {"input_ids": batch.tokens[None], "position_ids": batch.positions, "use_cache": False}
        with self.unguided():
            last, states = self._of_reference(None, packed=batch, **asked)
        batch = replace(batch, states=(last if states is None else states)[0])
        if self.others is None:
            return batch
        return replace(batch, likely=Likely.of_parts(self.unguided_logits(batch), batch.targets, self.config.likely))

    def is_beside(self, reference: PreTrainedModel) -> bool:
        """Return whether its reference has the weights of another model."""
        own, others = self.reference.state_dict(), reference.state_dict()
        with_adapter = {name.replace(".base_layer", ""): weight for name, weight in own.items() if ".lora_" not in name}
        return with_adapter.keys() == others.keys() and all(map(torch.equal, with_adapter.values(), others.values()))

    def _of_guide(self, cache: Any, states: Tensor | None, *, input_ids: Tensor, **asked: Any) -> Tensor:
        """Return the last hidden states of the guide, from tokens or from the reference's ``states``."""
        read = {"input_ids": input_ids} if self.read is None else {"inputs_embeds": self.read(states)}
        part = slice(self.config.reference["num_hidden_layers"], None)
        found: Tensor = _run(self.guide, cache, part, **read, **asked).last_hidden_state
        return found

    def guided_states(self, cache: Any, **asked: Any) -> Tensor:
        """Return the last hidden states of the guide, of which `with_q` makes Q; ``cache`` is one of this policy's."""
        states = None
        if self.read is not None:
            with torch.no_grad():
                _, states = self._of_reference(cache, **asked)
        with self.unguided(disabled=False):
            return self._of_guide(cache, states, **asked)

    @property
    def guide(self) -> Any:
        """The network whose last hidden states Q is made of."""
        return self.reference.base_model if self.trunk is None else self.trunk

    def with_q(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return the reference's logits (…, V) + Q, from the last hidden states of `guide`."""
        embedding = self.reference.get_output_embeddings().weight
        if self.others is None:
            vocabulary = embedding if self.vocabulary is None else self.vocabulary
            return logits + self._narrowed(hidden) @ vocabulary.T
        likely, ids = logits.topk(min(self.config.likely, logits.shape[-1]))
        q = products(self._narrowed(hidden).flatten(0, -2), ids.flatten(0, -2), embedding).view(ids.shape)
        return (logits + self.others(hidden)).scatter(-1, ids, (likely + q).to(logits.dtype))

    @property
    def _one_product(self) -> bool:
        """Whether reference and guide share the product with the vocabulary."""
        return self.vocabulary is None and self.others is None

    def _brought(self, packed: Packed | None) -> Likely | None:
        """Return the likely tokens that a packed batch brings to a guide on these."""
        return None if packed is None or self.others is None else packed.likely

    def _narrowed(self, hidden: Tensor) -> Tensor:
        """Return A·h + b."""
        found: Tensor = self.head(hidden if self.narrow is None else self.narrow(hidden))
        return found

    def get_output_embeddings(self) -> Any:
        """Return the reference's output embedding if its product gives the logits; None with one of the guide's own."""
        return self.reference.get_output_embeddings() if self._one_product else None

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
        self._policy, self._mask, self._cache = policy, attention_mask, DynamicCache(config=policy.config)
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
        hidden = self._policy.guided_states(
            self._cache,
            input_ids=input_ids[:, begin:],
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0)[:, begin:],
            use_cache=True,
        )
        return self._policy.with_q(scores, hidden[:, -1])


def read_states(found: Any, reads: Sequence[int]) -> Tensor:
    """Return the states after these layers, side by side, of a pass that gives hidden states."""
    return torch.cat([found.hidden_states[layer] for layer in reads], dim=-1)


def layers_read(depth: int, reads: int) -> list[int]:
    """Return ``reads`` of a model's layers, evenly spaced, the last one among them."""
    return sorted({max(1, depth * n // reads) for n in range(1, reads + 1)})


def _run(model: Any, cache: Any, part: slice, **asked: Any) -> Any:
    """Return what one of the models of a policy says, with its ``part`` of the policy's cache."""
    own = None if cache is None else layers_of(cache, part)
    shared = {"shared_prefix": own} if "shared_prefix" in asked else {}
    return model(**asked | shared, past_key_values=own)


def layers_of(cache: Any, part: slice) -> Any:
    """Return some layers of a cache as a cache of their own; what is added to it is added to both."""
    if hasattr(cache, "layers_of"):
        return cache.layers_of(part)
    found = DynamicCache()
    found.layers = cache.layers[part]
    return found


AutoConfig.register(GuidedConfig.model_type, GuidedConfig)
AutoModelForCausalLM.register(GuidedConfig, GuidedForCausalLM)
