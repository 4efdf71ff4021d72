"""Reward sources: a transformers classifier or any Python function, and the one place where rewards are checked."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from infalign.calibration import Array
from infalign.config import is_hub_id
from infalign.data import Message, prompt_id
from infalign.errors import ConfigError, DataError
from infalign.likelihood import length_batches, right_padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardFunction(Protocol):
    """Gives each response to its prompt a finite number; higher is better."""

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> Sequence[float]:
        """Return one reward for each row, in the order of the rows."""


class ClassifierReward:
    """The output of a transformers sequence classifier with one output, read as TRL's ``RewardTrainer`` trains it.

    The conversation and the response, as an assistant turn, are rendered with the tokenizer's chat template.
    ``batch_tokens`` bounds the padded tokens of a forward pass. No row is cut: one longer than ``max_length`` or than
    the model's context is a DataError. The reward of a row does not depend on the rows that it is scored with.

    If the model's configuration names no padding token, the tokenizer's padding or EOS token is written into it, since
    the classifier reads its output at the last token that is not padding.
    Raises ConfigError if the model has several outputs or the tokenizer has no chat template, padding or EOS token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 16384,
        max_length: int | None = None,
    ) -> None:
        name = model.config.name_or_path or type(model).__name__
        config = model.config.get_text_config()
        if model.config.num_labels != 1:
            raise ConfigError(f"{name} has {model.config.num_labels} outputs; a reward model has one (num_labels=1)")
        if tokenizer.chat_template is None:
            raise ConfigError(f"the tokenizer of {name} has no chat template; save it with the one used in training")
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if config.pad_token_id is None:
            raise ConfigError(f"the tokenizer of {name} has neither a padding nor an EOS token; set its pad_token")
        limits = (max_length, getattr(config, "max_position_embeddings", None))
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.max_length = min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_tokens: int = 16384,
        max_length: int | None = None,
    ) -> ClassifierReward:
        """Load a model folder, or a model of the hub, with safetensors weights and a tokenizer; its code is never run.

        Raises ConfigError if the folder is missing or unreadable, or if any weight is absent from the checkpoint: the
        head of a language model that is no classifier would be random.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not Path(path).is_dir() and not is_hub_id(str(path)):
            raise ConfigError(f"reward model {path}: there is no such folder")
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"reward model {path} cannot be loaded as safetensors without own code: {' '.join(str(error).split())}"
            ) from error
        if found["missing_keys"]:
            raise ConfigError(
                f"reward model {path} is no trained classifier: {', '.join(sorted(found['missing_keys']))} is not in "
                "the checkpoint and would be random; train it first, for example with TRL's RewardTrainer"
            )
        return cls(model.to(device), tokenizer, batch_tokens=batch_tokens, max_length=max_length)

    def tokenize(self, prompts: list[list[Message]], responses: list[str]) -> list[list[int]]:
        """Return the token ids of each conversation with its response, the same as TRL's ``RewardTrainer`` makes."""
        return [
            self.tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": response}], tokenize=True, return_dict=True
            )["input_ids"]
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row, computed in the model's precision; DataError if a row is too long."""
        import torch

        token_ids = self.tokenize(prompts, responses)
        for prompt, ids in zip(prompts, token_ids, strict=True):
            if self.max_length is not None and len(ids) > self.max_length:
                raise DataError(
                    f"prompt {prompt_id(prompt)}: the conversation with its response has {len(ids)} tokens and the "
                    f"reward model reads {self.max_length}; drop the prompt or generate shorter responses"
                )
        pad_id = self.model.config.get_text_config().pad_token_id
        self.model.eval()
        # Each text once: rounding depends on the batch, and equal texts must tie.
        distinct = list({tuple(ids): ids for ids in token_ids}.values())
        rewards: dict[tuple[int, ...], float] = {}
        for rows in length_batches([len(ids) for ids in distinct], self.batch_tokens):
            # Always padded on the right, whatever the tokenizer's side: so positions are those of the row alone.
            input_ids = right_padded([distinct[row] for row in rows], pad_id, self.model.device)
            attention_mask = right_padded([[1] * len(distinct[row]) for row in rows], 0, self.model.device)
            with torch.inference_mode():
                logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
            for row, reward in zip(rows, logits.squeeze(-1).float().tolist(), strict=True):
                rewards[tuple(distinct[row])] = reward
        return [rewards[tuple(ids)] for ids in token_ids]


def function_reward(spec: str) -> RewardFunction:
    """Import the reward function that ``spec`` names as ``package.module:function``; its module's code runs.

    Raises ConfigError that says what is missing: the colon, the module or the function.
    """
    module_name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise ConfigError(f"reward function {spec!r}: write it as package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"reward function {spec!r}: cannot import {module_name} ({error}); install it or put it on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward function {spec!r}: {module_name} has no function {function_name}")
    return cast(RewardFunction, function)


def score(
    reward: RewardFunction,
    prompts: list[list[Message]],
    responses: list[str],
    *,
    name: str,
    chunk: int = 4096,
    on_progress: Callable[[int], None] | None = None,
) -> Array:
    """Return the rewards of all rows, shape (rows,), asking for ``chunk`` rows at a time.

    ``on_progress`` is called after each chunk with the number of rows scored so far.

    Raises DataError that names the reward source (``name``), the row, counted from 0, and its prompt, if a reward is
    not a finite number (nothing is converted: True and "1" are errors), or if a chunk has the wrong number of rewards.
    """
    if len(prompts) != len(responses):
        raise DataError(f"reward {name}: {len(prompts)} prompts do not go with {len(responses)} responses")
    rewards = np.empty(len(responses))
    for start in range(0, len(responses), chunk):
        rows = slice(start, min(start + chunk, len(responses)))
        values = reward(prompts[rows], responses[rows])
        if not hasattr(values, "__len__") or len(values) != rows.stop - rows.start:
            found = f"{len(values)} rewards" if hasattr(values, "__len__") else type(values).__name__
            raise DataError(
                f"reward {name}: returned {found} for the {rows.stop - rows.start} responses of rows {rows.start} to "
                f"{rows.stop - 1} (first prompt {prompt_id(prompts[start])}); return a list with one number each"
            )
        for row, value in enumerate(values, start):
            if problem := _problem(value):
                raise DataError(f"reward {name}, row {row} (prompt {prompt_id(prompts[row])}): {problem}")
            rewards[row] = value
        if on_progress is not None:
            on_progress(rows.stop)
    return rewards


def _problem(value: object) -> str | None:
    """Return why ``value`` is no reward, and what to do; None if it is one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return f"found a {type(value).__name__}; return a Python or NumPy number for every response"
    if not math.isfinite(value):
        return f"found {float(value)}; a rank needs finite rewards, so mend the reward function or drop the row"
    return None
