"""Tokenizers with their chat templates, loaded and checked."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import reply
from infalign.models.conversations import conversation_ids, prompt_ids
from infalign.models.pretrained import check_reachable, eos_token_id, read_tokenizer

TEMPLATES = {
    # Only EOS is a special token: a model that was never tuned has no others that it understands.
    "plain": "{% for message in messages %}{{ message['role'].capitalize() + ':\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
}
# Of an encoder that was never taught to converse: the response is its second text, and a word opens it, so that the
# separator before a response differs from the one after it.
ENCODER_TEMPLATE = (
    "{{ cls_token }}{% for message in messages %}{{ '' if loop.first else sep_token }}"
    "{{ message['role'] + ': ' + message['content'] }}{% endfor %}{% if add_generation_prompt %}"
    "{{ sep_token + 'assistant: ' }}{% elif messages[-1]['role'] == 'assistant' %}{{ sep_token }}{% endif %}"
)
NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")  # a template asks for the date


def read_template(name: str) -> str:
    """Return the chat template that is called ``name``, or that a file holds. Raises ConfigError if there is none."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the chat template {name} ({error}); give a Jinja file, or {' or '.join(TEMPLATES)}"
        ) from error


def prints_date(model: str | Path, template: str | None = None) -> bool:
    """Return whether the chat template of a model folder, or ``template``, prints the day; of a hub id it may."""
    if template is None and not Path(model).is_dir():
        return True
    names = ("chat_template.jinja", "tokenizer_config.json")
    files = [Path(model) / name for name in names] if template is None else [Path(template)]
    return any(file.is_file() and b"strftime_now" in file.read_bytes() for file in files)


def set_date(tokenizer: Any, date: str | None) -> None:
    """Have the chat template print ``date``, if it is given, where it would print the day on which it is applied."""
    if date is not None and isinstance(tokenizer.chat_template, str):
        day = datetime.fromisoformat(date)
        tokenizer.chat_template = NOW.sub(lambda now: json.dumps(day.strftime(now[2])), tokenizer.chat_template)


def load_tokenizer(path: str | Path, *, template: str | None = None, date: str | None = None, **options: Any) -> Any:
    """Load a tokenizer, with ``template`` for its chat template; without a padding token it pads with EOS.

    The template prints ``date``, such as 2026-07-26, where it would print the day on which it is applied; ``plain``
    begins with BOS where the tokenizer's own encoding does. An encoder's EOS is its separator, and its chat template,
    if it has none, `ENCODER_TEMPLATE`. Raises ConfigError if there is no tokenizer, if the hub that has it cannot be
    reached, and if it has no EOS token or no chat template that renders.
    """
    check_reachable(str(path))
    tokenizer = read_tokenizer(path, f"{path} has no tokenizer that can be loaded", **options)
    if tokenizer.cls_token and tokenizer.sep_token and tokenizer.eos_token in (None, tokenizer.sep_token):
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.chat_template = tokenizer.chat_template or ENCODER_TEMPLATE
    eos_token_id(tokenizer, path)
    if template is not None:
        begins_with_bos = template in TEMPLATES and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if begins_with_bos else "") + read_template(template)
    set_date(tokenizer, date)
    check_template(tokenizer, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_template(tokenizer: Any, path: str | Path) -> None:
    """Raise ConfigError for a tokenizer without a chat template, or whose template cannot render a user's turn."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template; choose a model with one, set policy.chat_template to "
            "plain or to a file, or in Python set tokenizer.chat_template and give (model, tokenizer)"
        )
    try:
        prompt_ids(tokenizer, [[{"role": "user", "content": "Hello"}]])
    except DataError as error:
        raise ConfigError(f"the chat template of {path} cannot render a single user turn: {error.__cause__}") from error


def check_same_tokens(tokenizer: Any, reference_tokenizer: Any, model: str | Path) -> None:
    """Raise ConfigError that names a token by which the tokenizer of ``model`` differs from the reference's, or EOS."""
    its, known = tokenizer.get_vocab(), reference_tokenizer.get_vocab()
    if other := sorted(token for token in known.keys() | its.keys() if known.get(token) != its.get(token)):
        raise ConfigError(
            f"the tokenizer of {model} differs from the reference's: {len(other):,} tokens have other ids or are "
            f"missing, such as {other[0]!r}; a KL to the reference needs the same tokenizer"
        )
    if tokenizer.eos_token_id != reference_tokenizer.eos_token_id:
        raise ConfigError(
            f"{model} ends a response with {tokenizer.eos_token!r}, but the reference with "
            f"{reference_tokenizer.eos_token!r}"
        )


def check_response_end(tokenizer: Any, path: str | Path) -> None:
    """Raise ConfigError for a chat template that does not end a response with EOS: engines stop at nothing else."""
    turn = [{"role": "user", "content": "Hello"}]
    asked, answered = conversation_ids(tokenizer, [turn, [*turn, reply("Hi")]])
    if answered.count(tokenizer.eos_token_id) <= asked.count(tokenizer.eos_token_id):
        raise ConfigError(
            f"the chat template of {path} does not end a response with the tokenizer's EOS token, "
            f"{tokenizer.eos_token}, so responses would not end; copy the folder and set eos_token to the token "
            "that ends a turn, or set policy.chat_template to a template that writes eos_token"
        )
