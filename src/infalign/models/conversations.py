"""Conversations as token ids, by the chat template of a tokenizer; special tokens in a message stay text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infalign.core.errors import ConfigError, DataError
from infalign.data.examples import Message, prompt_id, reply
from infalign.models.pretrained import check_reachable, loading

TEMPLATES = {
    # Only EOS is a special token: a model that was never tuned has no others that it understands.
    "plain": "{% for message in messages %}{{ message['role'].capitalize() + ':\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
}
# Of an encoder that was never taught to converse: the response is its second text, and a word opens it, so that the
# separator before a response is told from the one after it.
ENCODER_TEMPLATE = (
    "{{ cls_token }}{% for message in messages %}{{ '' if loop.first else sep_token }}"
    "{{ message['role'] + ': ' + message['content'] }}{% endfor %}{% if add_generation_prompt %}"
    "{{ sep_token + 'assistant: ' }}{% elif messages[-1]['role'] == 'assistant' %}{{ sep_token }}{% endif %}"
)
TOKENIZERS_PANIC = "PanicException"  # on a text that a regular expression cannot decide
LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # what transformers calls a warning
AS_TEXT = {"sanitize_control_tokens": True}  # an option of `apply_chat_template` since transformers 5.20


def conversation_ids(tokenizer: Any, conversation: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    """Return the token ids of a conversation as the tokenizer's chat template renders it.

    Only the template writes special tokens: one that a message spells, such as ``</s>``, is encoded as the characters
    it is made of. Raises DataError for a conversation that the template cannot render.
    """
    tokenizer.deprecation_warnings[LENGTH_WARNING] = True  # said already: long prompts are left out and counted
    try:
        rendered = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, return_dict=True, **AS_TEXT
        )
    except BaseException as error:  # a template is a program: it fails in any way, but does not leave jinja's sandbox
        if not isinstance(error, Exception) and type(error).__name__ != TOKENIZERS_PANIC:
            raise
        raise DataError(
            f"prompt {prompt_id(conversation)}: the chat template of {tokenizer.name_or_path} cannot render the "
            f"conversation ({type(error).__name__}: {error}); drop the prompt or change the template"
        ) from error
    return list(rendered["input_ids"])


def read_template(name: str) -> str:
    """Return the chat template that is called ``name``, or that a file holds. Raises ConfigError if there is none."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the chat template {name} cannot be read ({error}); name a Jinja file, or {' or '.join(TEMPLATES)}"
        ) from error


def load_tokenizer(path: str | Path, *, template: str | None = None, **options: Any) -> Any:
    """Load a tokenizer, with ``template`` for its chat template; without a padding token it pads with EOS.

    An encoder's EOS is its separator, and its chat template, if it has none, `ENCODER_TEMPLATE`.
    Raises ConfigError if there is none, if the hub that has it cannot be reached, and if it has no EOS token or no chat
    template that renders.
    """
    from transformers import AutoTokenizer

    check_reachable(str(path))
    with loading(f"{path} has no tokenizer that can be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    if tokenizer.cls_token and tokenizer.sep_token and tokenizer.eos_token in (None, tokenizer.sep_token):
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.chat_template = tokenizer.chat_template or ENCODER_TEMPLATE
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {path} has no EOS token, so responses would never end; set its eos_token")
    if template is not None:
        tokenizer.chat_template = read_template(template)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template; choose a model with one, or for the policy set "
            "policy.chat_template to plain or to a file"
        )
    try:
        conversation_ids(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except DataError as error:
        raise ConfigError(f"the chat template of {path} cannot render one user turn: {error.__cause__}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_response_end(tokenizer: Any, path: str | Path) -> None:
    """Raise ConfigError for a chat template that does not end a response with EOS: engines stop at nothing else."""
    turn = [{"role": "user", "content": "Hello"}]
    asked, answered = (
        conversation_ids(tokenizer, conversation, add_generation_prompt=False)
        for conversation in (turn, [*turn, reply("Hi")])
    )
    if answered.count(tokenizer.eos_token_id) <= asked.count(tokenizer.eos_token_id):
        raise ConfigError(
            f"the chat template of {path} does not end a response with the tokenizer's EOS, {tokenizer.eos_token}, so "
            "responses would not end; in a copy of the folder set eos_token to the token that ends a turn, or set "
            "policy.chat_template to one that writes eos_token"
        )
