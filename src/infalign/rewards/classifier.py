"""The reward of a transformers sequence classifier."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from itertools import groupby, islice
from os.path import commonprefix
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import Message, prompt_id, reply
from infalign.models.conversations import conversation_ids
from infalign.models.passes import BATCH_TOKENS, context_length
from infalign.models.pretrained import config_of, read_tokenizer, read_weights
from infalign.models.settings import is_hub_id
from infalign.models.tokenizers import set_date

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

POOLED = "infalign-pooled"  # `models.pooled`, which is loaded with torch only
SCORED_AGAIN = 8  # texts
MARGIN = 8.0  # times the largest difference found, since other texts and threads may differ more
Text = tuple[int, ...]  # the token ids of a conversation with its response


def check_classifier(folder: str | Path) -> None:
    """Raise ConfigError for the folder of a model that is no classifier with one output, as its configuration says."""
    from infalign.models import pooled  # noqa: F401 - so that transformers knows it

    config = config_of(folder)
    architectures = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        made = " ".join(architectures) or "of no architecture"
        raise ConfigError(
            f"reward model {folder} is {made}, not a sequence classifier; give it "
            "fit or head, or train it first, for example with TRL's RewardTrainer"
        )
    _check_outputs(config, str(folder))


def _check_outputs(config: PretrainedConfig, name: str) -> None:
    if config.num_labels != 1:
        raise ConfigError(f"{name} has {config.num_labels} outputs; a reward model must have one (num_labels=1)")


def _compute_head_in_float32(model: PreTrainedModel) -> None:
    """Let the head of a model in half precision compute in float32, as bfloat16 would give few distinct rewards."""
    for head in (getattr(model, name, None) for name in ("score", "classifier")):
        if head is not None and any(weight.element_size() < 4 for weight in head.parameters()):
            head.float().register_forward_pre_hook(lambda _, given: (given[0].float(), *given[1:]))


class ClassifierReward:
    """The output of a transformers sequence classifier with one output, as TRL's ``RewardTrainer`` trains it.

    The conversation and the response, as an assistant turn, are rendered with the tokenizer's chat template.
    ``batch_tokens`` bounds the padded tokens of a forward pass. No row is truncated: one longer than the model's
    context raises DataError. The reward of a row depends on its batch by rounding only: by less than ``tolerance``,
    within which `CalibratedReward` takes two rewards for one. The first call measures it, and it grows with later ones.

    If the model's configuration names no padding token, the tokenizer's padding or EOS token is written into it, since
    the classifier reads its output at the last token that is not padding. Raises ConfigError for a model with another
    number of outputs, and for a tokenizer without chat template, or without padding and EOS token.

    >>> reward = ClassifierReward.load(REWARD_MODEL)
    >>> len(reward([[{"role": "user", "content": "How are you?"}]] * 2, ["Fine.", "Where?"]))
    2
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_tokens: int = BATCH_TOKENS
    ) -> None:
        name = model.config.name_or_path or type(model).__name__
        config = model.config.get_text_config()
        _check_outputs(model.config, name)
        if tokenizer.chat_template is None:
            raise ConfigError(f"the tokenizer of {name} has no chat template; save the one used in training with it")
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if config.pad_token_id is None:
            raise ConfigError(f"the tokenizer of {name} has neither a padding nor an EOS token; set its pad_token")
        _compute_head_in_float32(model)
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self._turn = Lock()  # a model's forward pass is not for several threads at once
        self.max_length = context_length(model)
        self.tolerance, self._calls = 0.0, 0

    @classmethod
    def load(
        cls, path: str | Path, *, device: str = "cpu", dtype: str = "float32", date: str | None = None
    ) -> ClassifierReward:
        """Load a model folder, or a model of the hub, with safetensors weights and a tokenizer; no code in it is run.

        A chat template that prints the day prints ``date``, such as 2026-07-26, by default that of its use.
        Raises ConfigError if the folder is missing or unreadable, or if any weight is absent from the checkpoint: the
        head of a plain language model would be random.
        """
        from transformers import AutoModelForSequenceClassification

        from infalign.models import pooled  # noqa: F401 - so that transformers knows it
        from infalign.models.conversion import convert

        path = convert(str(path))
        if not Path(path).is_dir() and not is_hub_id(path):
            raise ConfigError(f"reward model {path}: the folder does not exist")
        cannot = f"reward model {path} is not a trained classifier that can be loaded"
        model = read_weights(AutoModelForSequenceClassification, path, cannot, dtype=dtype)
        tokenizer = read_tokenizer(path, cannot)
        set_date(tokenizer, date)
        return cls(model.to(device), tokenizer)

    def tokenize(self, prompts: list[list[Message]], responses: list[str]) -> list[list[int]]:
        """Return the token ids of each conversation with its response, the same as the reward was trained on.

        Special tokens spelled out in a prompt or a response are treated as text (`conversations.conversation_ids`).
        """
        conversations = [[*prompt, reply(text)] for prompt, text in zip(prompts, responses, strict=True)]
        return conversation_ids(self.tokenizer, conversations)

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row, computed in the model's precision; DataError if a row is too long."""
        token_ids = [self._read(tuple(ids)) for ids in self.tokenize(prompts, responses)]
        for prompt, ids in zip(prompts, token_ids, strict=True):
            if self.max_length is not None and len(ids) > self.max_length:
                raise DataError(
                    f"prompt {prompt_id(prompt)}: the conversation with its response has {len(ids)} tokens, but the "
                    f"reward model accepts at most {self.max_length}; drop the prompt or generate shorter responses"
                )
        # Each distinct text is scored once: rounding depends on the batch, and equal texts must tie.
        distinct = dict(zip(token_ids, prompts, strict=True))
        with self._turn:
            self.model.eval()
            rewards = self._scored(distinct)
            self._calls += 1
            if distinct and self._calls.bit_count() == 1:  # calls 1, 2, 4, 8, …
                self._measure_rounding(distinct, rewards)
        return [rewards[ids] for ids in token_ids]

    def tolerate(self, gap: float) -> None:
        """Raise the tolerance to `MARGIN` times a difference of two rewards of one text that uses up half of it."""
        self.tolerance = MARGIN * gap if 2.0 * gap > self.tolerance else self.tolerance

    def _measure_rounding(self, texts: Mapping[Text, list[Message]], known: Mapping[Text, float]) -> None:
        """Tolerate what the batch changes in the rewards of some texts; if there are few, of beginnings of one, too."""
        some, longest = dict(islice(texts.items(), SCORED_AGAIN)), max(texts, key=len)
        for part in range(len(some), SCORED_AGAIN):
            some.setdefault(self._read(longest[: 1 + len(longest) * part // SCORED_AGAIN]), texts[longest])
        alone = [self._scored({text: prompt}) for text, prompt in some.items()]
        ways = (known, self._scored(some), self._scored(some, plainly=True), *alone)
        scores = [[way[text] for way in ways if text in way] for text in some]
        self.tolerate(max(max(max(each) - min(each), 2.0**-23 * abs(each[0])) for each in scores))  # float32's at least

    def _read(self, ids: Text) -> Text:
        """Return a text up to where the classifier is read: transformers' are at the last token that is no padding.

        Where the padding token is EOS and the chat template ends with it, that is the token before.
        """
        if self.model.config.model_type == POOLED:  # it goes by the attention mask
            return ids
        pad_id, last = self.model.config.get_text_config().pad_token_id, len(ids)
        while last > 1 and ids[last - 1] == pad_id:
            last -= 1
        return ids[:last]

    @cached_property
    def _packs(self) -> bool:
        from infalign.models.packed import PackedBatch, can_pack

        # Of a head that is 0 anything would give the outputs, and not every head is `score` alone.
        return can_pack(self.model.base_model, PackedBatch.last_states) and can_pack(self.model, PackedBatch.scores)

    def _scored(self, texts: Mapping[Text, list[Message]], *, plainly: bool = False) -> dict[Text, float]:
        """Return the reward of each text; packed, unless ``plainly``, what texts of a prompt share is computed once."""
        import torch

        from infalign.models.packed import packed_batches, packing

        packs = not plainly and self._packs and min(map(len, texts), default=2) > 1
        shared, scores = dict.fromkeys(texts, 0), list[float]()
        for _, of_prompt in groupby(texts, key=texts.__getitem__) if packs else ():
            group = [*of_prompt]
            common = min(len(commonprefix(group)), min(map(len, group)) - 1)  # noqa: RUF071 (not of paths)
            shared |= dict.fromkeys(group, common)
        asked = [*texts] if packs else sorted(texts, key=len, reverse=True)  # the longest first, as they are padded
        parts = [text[: shared[text]] for text in asked], [text[shared[text] :] for text in asked]
        with torch.inference_mode(), packing(self.model) if packs else nullcontext():
            for _, batch in packed_batches(*parts, self.batch_tokens, self.model, logits=False):
                scores += batch.scores(self.model)[:, 0].float().tolist()
        return dict(zip(asked, scores, strict=True))
