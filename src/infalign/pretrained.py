"""Models that strangers made: only safetensors and text are read of their folders, and what users wrote stays text.

Needs the ``train`` extra.
"""

from collections.abc import Sequence
from typing import Any

from infalign.data import Message, prompt_id
from infalign.errors import ConfigError, DataError

AS_TEXT = {"sanitize_control_tokens": True}  # of `apply_chat_template`, since transformers 5.20


def conversation_ids(tokenizer: Any, conversation: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    """Return the token ids of a conversation as the tokenizer's chat template renders it.

    Only the template writes special tokens: one that a message spells, such as ``</s>``, is encoded as the characters
    it is made of. Raises DataError for a conversation that the template cannot render.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, return_dict=True, **AS_TEXT
        )
    except Exception as error:  # a template is a program: it can fail in any way, but not leave jinja's sandbox
        raise DataError(
            f"prompt {prompt_id(conversation)}: the chat template of {tokenizer.name_or_path} cannot render the "
            f"conversation ({type(error).__name__}: {error}); drop the prompt or change the template"
        ) from error
    return list(rendered["input_ids"])


def classifier_from(start: str) -> Any:
    """Return a classifier with one output on the model folder or hub id ``start``, its head new if there is none.

    Raises ConfigError if the model cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        return AutoModelForSequenceClassification.from_pretrained(
            start, num_labels=1, use_safetensors=True, trust_remote_code=False, dtype="float32"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{start} cannot start a reward model: {why_unloadable(error)}") from error


def why_unloadable(error: Exception) -> str:
    """Return in one line why transformers cannot load a model, and where it is clear, what to do about it."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return "it needs code of its own, which is never run; choose a model that transformers knows by itself"
    if "named model.safetensors" in said:
        return "there is no file named model.safetensors, and weights in pickles, which can run code, are never read"
    return f"{type(error).__name__}: {said[:300]}"
