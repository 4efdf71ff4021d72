"""A reward model on a frozen language model: one linear head on the mean states of the response in some of its layers.

As a sequence classifier it goes wherever one does. The mean begins after the last `opening`, the tokens with which the
chat template opens the assistant's turn; the layers above the highest one that it reads are left out. Of an encoder,
states at the response know what comes after them too. Needs the ``train`` extra.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from infalign.core.errors import ConfigError
from infalign.data.messages import reply
from infalign.models.conversations import conversation_ids, prompt_ids
from infalign.models.packed import PackedBatch
from infalign.models.submodels import SHARED, as_part

ANY_TOKEN = -1  # in an opening: a token that may be joined with a response's beginning, as a line break is


class PooledConfig(PreTrainedConfig):
    """The configuration of the frozen model, the layers whose states are read, and the `opening` of a response."""

    model_type = "infalign-pooled"

    def __init__(
        self, base: dict[str, Any] | None = None, layers: Sequence[int] = (), opening: Sequence[int] = (), **more: Any
    ) -> None:
        self.base, self.layers, self.opening = base or {}, list(layers), list(opening)
        super().__init__(**{"num_labels": 1} | more)


class PooledModel(PreTrainedModel):
    """The frozen model; its last hidden state at a token is the mean over the response up to there, of all layers."""

    config_class = PooledConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: PooledConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.base = as_part(base, AutoModel, config.base, config._attn_implementation)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed: PackedBatch | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return means of states, (rows, tokens, layers · width); rows are padded on the right, or one is packed."""
        asked: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        asked |= {} if packed is None else {"packed": packed}
        states = self.base(**asked, use_cache=False, output_hidden_states=True).hidden_states
        read = torch.cat([states[layer] for layer in self.config.layers], dim=-1).float()
        means = self._plain(input_ids, read) if packed is None else self._packed(packed, read[0])[None]
        return BaseModelOutput(last_hidden_state=means)

    def _plain(self, tokens: Tensor, states: Tensor) -> Tensor:
        said = torch.arange(tokens.shape[1], device=tokens.device) >= self._begins(tokens)[:, None]
        return (states * said[..., None]).cumsum(1) / said.cumsum(1).clamp(min=1)[..., None]

    def _packed(self, packed: PackedBatch, states: Tensor) -> Tensor:
        """Return the means at the tokens of responses.

        A part of a response may lie in what is packed as its prompt, and the last token of its opening in what is not.
        """
        of_prompts, _ = packed.token_masks
        first = int(packed.prompt_lengths.sum())
        prompts = packed.tokens.new_full(of_prompts.shape, ANY_TOKEN).masked_scatter(of_prompts, packed.tokens[:first])
        begins = self._begins(nn.functional.pad(prompts, (0, 1), value=ANY_TOKEN))
        row_of = torch.arange(len(prompts), device=states.device).repeat_interleave(packed.prompt_lengths)
        prompt_of = packed.prompt_of[packed.response_of]
        said = packed.positions[0] >= begins[torch.cat([row_of, prompt_of])]
        counted = nn.functional.pad(states, (0, 1), value=1.0) * said[:, None]  # what is said, and how many tokens
        in_prompt = counted.new_zeros(len(prompts), counted.shape[1]).index_add(0, row_of, counted[:first])
        sums = in_prompt[prompt_of] + packed.sum_to_token(counted[first:])
        return torch.cat([torch.zeros_like(states[:first]), sums[:, :-1] / sums[:, -1:].clamp(min=1)])

    def _begins(self, tokens: Tensor) -> Tensor:
        """Return where the response of each row begins, (rows,): after the last opening, or with the row."""
        opening = torch.tensor(self.config.opening, device=tokens.device)
        if tokens.shape[1] < len(opening):
            return tokens.new_zeros(len(tokens))
        matches = ((tokens.unfold(1, len(opening), 1) == opening) | (opening == ANY_TOKEN)).all(-1)
        ends = torch.arange(matches.shape[1], device=tokens.device) + len(opening)
        return (matches * ends).amax(1)


class PooledForSequenceClassification(PreTrainedModel):
    """The frozen model with its head; the output is read after the last token that is no padding."""

    config_class = PooledConfig
    base_model_prefix = "model"
    _keep_in_fp32_modules_strict: ClassVar = {"score"}  # it reads means in float32
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: PooledConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.model = PooledModel(config, base)
        width = AutoConfig.for_model(**config.base).hidden_size  # whatever the model calls it
        self.score = nn.Linear(width * len(config.layers), config.num_labels, bias=False)
        self.post_init()

    @classmethod
    def on(
        cls, base: PreTrainedModel, layers: Sequence[int], opening: Sequence[int]
    ) -> "PooledForSequenceClassification":
        """Return a classifier on a frozen model, without the layers that it does not read; its head is zero."""
        below = base.config.__class__.from_dict(base.config.to_dict())
        # One more than it reads: what a model returns as the states of its last layer is normalized.
        below.num_hidden_layers = min(base.config.num_hidden_layers, max(layers) + 1)
        if getattr(below, "layer_types", None):
            below.layer_types = below.layer_types[: below.num_hidden_layers]
        lower = AutoModel.from_config(below, dtype=base.dtype).to(base.device)
        weights = base.state_dict()
        lower.load_state_dict({name: weights[name] for name in lower.state_dict()})
        copied = {name: getattr(lower.config, name, None) for name in SHARED}
        model = cls(PooledConfig(lower.config.to_dict(), layers, opening, **copied), lower.eval())
        model.to(base.device).requires_grad_(False)
        model.score.weight.zero_()
        return model.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> SequenceClassifierOutput:
        """Return the output of each row, (rows, 1)."""
        means = self.model(input_ids, attention_mask, **more).last_hidden_state
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        last = means[torch.arange(len(means), device=means.device), kept.sum(1) - 1]
        return SequenceClassifierOutput(logits=self.score(last))


def response_opening(tokenizer: Any) -> list[int]:
    """Return the tokens with which the chat template opens a response; `ANY_TOKEN` for a last one that is plain text.

    Raises ConfigError if there is no special token among them, since a message could spell them, or if the template
    does not render a response after them.
    """
    turn = [{"role": "user", "content": "Hello"}]
    (begun,) = prompt_ids(tokenizer, [turn])
    asked, answered = conversation_ids(tokenizer, [turn, [*turn, reply("Hi")]])
    opening, special = begun[len(asked) :], {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if begun[: len(asked)] != asked or answered[: len(begun)] != begun or not special & {*opening}:
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path} does not open a response with a special token, so the "
            "start of the response cannot be found; train the reward model with `fit` instead of `head`"
        )
    return opening if opening[-1] in special else [*opening[:-1], ANY_TOKEN]


AutoConfig.register(PooledConfig.model_type, PooledConfig)
AutoModelForSequenceClassification.register(PooledConfig, PooledForSequenceClassification)
