"""Chat templates: those of installed packages, and well-known ones as their models' pages describe them.

``FAMILIES`` are written down by us from the documented formats, not copied: what each is there for is its comment.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LLAMA_3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
FAMILIES = {
    # OpenAI's ChatML, as Qwen1.5 and many tuned models use it
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Llama 3: headers, and contents without surrounding blanks
    "llama-3": "{{ bos_token }}" + LLAMA_3,
    # Llama 3.1: a system turn with the date of the day
    "llama-3-date": "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' }}"
    "{{ strftime_now('%d %b %Y') + '<|eot_id|>' }}" + LLAMA_3,
    # Gemma: no system role, turns alternate, the assistant is the model
    "gemma": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ '<start_of_turn>' + "
    "('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    # Mistral: instructions in brackets, EOS after replies, nothing before one
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
    # Zephyr: role tags that are no tokens of their own
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    # Phi-3: role tags that are tokens
    "phi-3": "{% for m in messages %}{{ '<|user|>\n' if m.role == 'user' else "
    "'<|assistant|>\n' if m.role == 'assistant' else '<|system|>\n' }}{{ m.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    # Qwen3: thoughts of earlier turns are dropped, an empty one is written into the last
    "qwen-3": "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + (m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '') + '\n</think>\n\n' }}{% endif %}{{ said + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # DeepSeek-R1: asks within the thought, and drops thoughts from what was said
    "deepseek-r1": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    # Hermes and Qwen2.5: tools as JSON within tags, results as a user's turn
    "tools": "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
TAGS = re.compile(r"<\|[^\s<>|{}'\"\\]+\|?>|<｜[^\s<>]+｜>|</?[A-Za-z_]+>|\[/?[A-Z_]+\]")
OWN_MARKS = re.compile(r"think|tool|arg|answer|resp")  # tags of this kind are no special tokens in real vocabularies
MORE = "CHAT_TEMPLATES"  # the environment's name of a folder with further templates


def installed() -> dict[str, str]:
    """Return the templates of TRL, and those in the folder that `MORE` names."""
    spec = find_spec("trl")
    folders = [Path(spec.origin).parent / "chat_templates", *filter(Path.is_dir, [Path(os.environ.get(MORE, "none"))])]
    files = [file for folder in folders for file in sorted(folder.rglob("*.jinja"))]
    return {f"{file.parent.name}/{file.stem}": file.read_text(encoding="utf-8") for file in files}


def tokenizer_of(template: str) -> Any:
    """Return a byte-level tokenizer with the tags that ``template`` spells as tokens, and with the template."""
    special = ["<s>", "</s>", "<pad>"]
    tags = [tag for tag in dict.fromkeys(TAGS.findall(template)) if tag not in special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("<", "|"), ("|", ">"), ("<", "/")]
    known = {part: number for number, part in enumerate([*alphabet, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(known, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(special)
    for tag in tags:
        is_special = OWN_MARKS.search(tag) is None
        add = inner.add_special_tokens if is_special else inner.add_tokens
        add([AddedToken(tag, special=is_special, normalized=False)])
    given = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **given)
