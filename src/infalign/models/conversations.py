"""Conversations as token ids, and ids as text: the one place where a chat template is applied."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from infalign.core.errors import DataError
from infalign.data.messages import Message, prompt_id

TOKENIZERS_PANIC = "PanicException"  # on a text that a regular expression cannot decide
BATCH = 1024  # conversations that are rendered and encoded together
BREAK = "\ufdd0"  # within a control token that a message spells, so that it is none; never a character of a text
BREAK_BYTES = "ï·Ĳ"  # as byte-level tokenizers write it
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # the token of a byte, where a character has none
THOUGHT = re.compile(r"<think>\s*$")  # of what a policy is asked: the template opens its thought

Messages = Sequence[Message]
Tools = Sequence[Any] | None


class _Rendered(NamedTuple):
    text: str
    ids: list[int]


class TrainingIds(NamedTuple):
    """The token ids of a conversation, 1 for each that the policy says, and whether it is the template's rendering."""

    ids: list[int]
    mask: list[int]
    is_rendered: bool


def prompt_ids(tokenizer: Any, prompts: Sequence[Messages], tools: Sequence[Tools] | None = None) -> list[list[int]]:
    """Return what a policy is asked: prompts as the chat template renders them, with the opening of a reply.

    ``tools`` are those of each prompt. Control tokens that a message spells are encoded as the characters they are made
    of, except an assistant's own marks, such as ``<think>``. Raises DataError for a prompt that the template refuses.
    """
    return [_or_raise(rendering).ids for rendering in _read(tokenizer, prompts, tools, prompted=True)]


def conversation_ids(
    tokenizer: Any, conversations: Sequence[Messages], tools: Sequence[Tools] | None = None
) -> list[list[int]]:
    """Return what reward models read: whole conversations as the chat template renders them. Else as `prompt_ids`."""
    return [_or_raise(rendering).ids for rendering in _read(tokenizer, conversations, tools, prompted=False)]


def prompt_ids_or_errors(
    tokenizer: Any, prompts: Sequence[Messages], tools: Sequence[Tools] | None = None
) -> list[list[int] | DataError]:
    """Return `prompt_ids`, and in the place of a prompt that the template refuses the error that says why."""
    renderings = _read(tokenizer, prompts, tools, prompted=True)
    return [one if isinstance(one, DataError) else one.ids for one in renderings]


def training_ids(
    tokenizer: Any, prompts: Sequence[Messages], replies: Sequence[Messages], tools: Sequence[Tools] | None = None
) -> list[TrainingIds]:
    """Return what fine-tuning reads of each conversation, in which the policy says the assistant's turns of its reply.

    Where the template renders a turn otherwise than the policy says it after what it is asked (Qwen3 adds an empty
    thought, R1 drops a thought, others strip blanks), the ids are those of `prompt_ids`, the last turn's text and EOS.
    """
    turns = [
        (row, (*prompt, *answer[: place + 1]))
        for row, (prompt, answer) in enumerate(zip(prompts, replies, strict=True))
        for place, message in enumerate(answer)
        if message["role"] == "assistant"
    ]
    of_turns = None if tools is None else [tools[row] for row, _ in turns]
    asked = _read(tokenizer, [talk[:-1] for _, talk in turns], of_turns, prompted=True)
    whole = _read(tokenizer, [talk for _, talk in turns], of_turns, prompted=False)
    read = [
        (row, _Turn(talk[-1], _or_raise(before), _or_raise(after)))
        for (row, talk), before, after in zip(turns, asked, whole, strict=True)
    ]
    return [_training_row(tokenizer, [turn for _, turn in group]) for _, group in groupby(read, itemgetter(0))]


class _Turn(NamedTuple):
    """One turn of the assistant: what the policy is asked, and the conversation up to the end of the turn."""

    message: Message
    asked: _Rendered
    whole: _Rendered

    def is_as_said(self, reply: str) -> bool:
        """Return whether, after what it asks, the template writes what the policy says, apart from blanks before it."""
        rest = self.whole.text.removeprefix(self.asked.text)
        if self.message.keys() <= {"role", "content"}:
            begins = reply in rest and not rest[: rest.index(reply)].strip()
        else:  # how calls of tools are written, only the template knows
            begins = (self.message.get("reasoning_content") or "") in rest
        return begins and self.whole.ids[: len(self.asked.ids)] == self.asked.ids


def _training_row(tokenizer: Any, turns: list[_Turn]) -> TrainingIds:
    eos, ids = tokenizer.eos_token_id, turns[-1].whole.ids
    mask = [0] * len(ids)
    for turn in turns:
        start, end = len(turn.asked.ids), len(turn.whole.ids)
        if eos in turn.whole.ids[start:]:
            end = turn.whole.ids.index(eos, start) + 1
        if not turn.is_as_said(_reply_text(tokenizer, turn)) or ids[:end] != turn.whole.ids[:end]:
            break
        mask[start:end] = [1] * (end - start)
    else:
        return TrainingIds(ids, mask, True)
    asked, reply = turns[-1].asked.ids, _reply_text(tokenizer, turns[-1])
    (joined,) = _encode(tokenizer, [turns[-1].asked.text + reply])
    said = joined[len(asked) :] if joined[: len(asked)] == asked else _encode(tokenizer, [reply])[0]
    return TrainingIds([*asked, *said, eos], [0] * len(asked) + [1] * (len(said) + 1), False)


def _reply_text(tokenizer: Any, turn: _Turn) -> str:
    """Return the text that the policy says in a turn, without the opening of a thought that the template writes."""
    text, thought = turn.message.get("content") or "", turn.message.get("reasoning_content")
    if thought:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    if THOUGHT.search(turn.asked.text):
        text = re.sub(r"^\s*<think>\s*", "", text)
    return str(_broken(text, _guard(tokenizer).structure))


def find_refused(
    tokenizer: Any, conversations: Sequence[Messages], tools: Sequence[Tools]
) -> list[DataError | str | None]:
    """Return why the chat template refuses conversations, or which of their fields it does not read; else None.

    A field that makes a difference to one conversation is not looked for in others. Thoughts count as read: what a
    template leaves out of them, `training_ids` writes.
    """
    renderings, known = _read(tokenizer, conversations, tools, prompted=False), {"role", "content", "reasoning_content"}
    return [
        one if isinstance(one, DataError) else _unread_field(tokenizer, one.text, talk, shown, known)
        for one, talk, shown in zip(renderings, conversations, tools, strict=True)
    ]


def _unread_field(tokenizer: Any, text: str, conversation: Messages, tools: Tools, known: set[str]) -> str | None:
    """Return what is wrong with a field without which the conversation is rendered the same; else add all to known."""
    names = {name for turn in conversation if turn["role"] != "tool" for name in turn} | ({"tools"} if tools else set())
    for name in sorted(names - known):
        left = [{k: v for k, v in turn.items() if k != name or turn["role"] == "tool"} for turn in conversation]
        (other,) = _read(tokenizer, [left], [None if name == "tools" else tools], prompted=False)
        if isinstance(other, _Rendered) and other.text == text:
            return f"the chat template does not use {name}; drop it, or use a template that does"
        known.add(name)
    return None


def spells_control(tokenizer: Any, conversation: Messages) -> bool:
    """Return whether a text that is not the assistant's spells a control token of the chat template."""
    control = _guard(tokenizer).control
    return any(control.search(turn["content"]) for turn in conversation if turn["role"] != "assistant")


def decode(tokenizer: Any, responses: Sequence[Sequence[int]], ends: Sequence[int] = ()) -> list[str]:
    """Return the texts of drawn token ids, as they go on after a prompt.

    Special tokens stay, except BOS, EOS, padding and further ``ends`` of a response.
    """
    hidden = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *ends}
    return [_continuation(tokenizer, [i for i in ids if i not in hidden]) for ids in responses]


def marked_text(tokenizer: Any, row: TrainingIds) -> list[tuple[str, bool]]:
    """Return the text of a training row in parts, each with whether the policy is trained on it."""
    parts = groupby(zip(row.ids, row.mask, strict=True), itemgetter(1))
    return [(_continuation(tokenizer, [i for i, _ in part]), bool(trained)) for trained, part in parts]


def _continuation(tokenizer: Any, ids: list[int]) -> str:
    """Return what ids add to a text that is there already; more ids only add to it, but within a character."""
    text, eos = "", [tokenizer.eos_token_id]
    named = zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
    for is_byte, run in groupby(named, lambda one: BYTE.fullmatch(one[1] or "") is not None):
        some, names = zip(*run, strict=True)
        end, twice, whole = tokenizer.decode([eos, eos * 2, [*eos, *some]], clean_up_tokenization_spaces=False)
        joined = twice.removesuffix(end)  # with the blank that some tokenizers write between any two tokens
        if is_byte and not whole.endswith(names[-1]):  # of a character that lacks one, all would be given up
            text += bytes(int(name[3:5], 16) for name in names).decode(errors="replace")
        else:
            text += whole[len(joined if whole.startswith(joined) else end) :]
    return text


def _or_raise(rendering: _Rendered | DataError) -> _Rendered:
    if isinstance(rendering, DataError):
        raise rendering
    return rendering


def _read(
    tokenizer: Any, conversations: Sequence[Messages], tools: Sequence[Tools] | None, *, prompted: bool
) -> list[_Rendered | DataError]:
    """Return each conversation as text and ids, `BATCH` at a time, or why the template refuses it."""
    renderings = list[_Rendered | DataError]()
    rows = zip(conversations, tools or [None] * len(conversations), strict=True)
    for same_tools, group in groupby(rows, itemgetter(1)):
        with_them = [conversation for conversation, _ in group]
        for start in range(0, len(with_them), BATCH):
            renderings += _read_batch(tokenizer, with_them[start : start + BATCH], same_tools, prompted)
    return renderings


def _read_batch(
    tokenizer: Any, batch: Sequence[Messages], tools: Tools, prompted: bool
) -> Iterable[_Rendered | DataError]:
    """Return what `_read` does, with `BREAK` in each control token that a message spells.

    Messages without any reach the template as they are, so that it splits and strips what their author means.
    """
    try:
        guard = _guard(tokenizer, tools)
        texts = tokenizer.apply_chat_template(
            [[guard.message(message) for message in conversation] for conversation in batch],
            tools=_broken(tools, guard.control) or None,
            add_generation_prompt=prompted,
            tokenize=False,
        )
        return list(map(_Rendered, texts, _encode(tokenizer, texts)))
    except BaseException as error:  # a template is a program: it fails in any way, but does not leave jinja's sandbox
        if not isinstance(error, Exception) and type(error).__name__ != TOKENIZERS_PANIC:
            raise
        if len(batch) > 1:
            return [rendering for one in batch for rendering in _read_batch(tokenizer, [one], tools, prompted)]
        refusal = DataError(
            f"prompt {prompt_id(batch[0])}: the chat template of {tokenizer.name_or_path} cannot render the "
            f"conversation ({type(error).__name__}: {error}); drop the prompt or change the template"
        )
        refusal.__cause__ = error
        return [refusal]


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the token ids of rendered conversations."""
    if not tokenizer.is_fast:
        return [
            [i for part in text.split(BREAK) for i in tokenizer.encode(part, add_special_tokens=False)]
            for text in texts
        ]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    for place in [place for place, text in enumerate(texts) if BREAK in text]:
        ids[place] = _breaking_tokenizer(tokenizer).encode(texts[place], add_special_tokens=False).ids
    return ids


_BREAKING = WeakKeyDictionary[Any, Any]()


def _breaking_tokenizer(tokenizer: Any) -> Any:
    """Return a copy of what is below a tokenizer that splits words at `BREAK`, which it leaves out."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    if tokenizer not in _BREAKING:
        copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        steps = [] if copy.pre_tokenizer is None else [copy.pre_tokenizer]
        steps.append(pre_tokenizers.Split(Regex(f"{BREAK}|{BREAK_BYTES}"), "removed"))
        copy.pre_tokenizer = pre_tokenizers.Sequence(steps)
        _BREAKING[tokenizer] = copy
    return _BREAKING[tokenizer]


@dataclass(frozen=True)
class _Guard:
    """The control tokens of a tokenizer with one template: which ones messages may not write.

    Control tokens are the special tokens, and other added tokens that the template spells. Those around turns are BOS,
    EOS, padding, and what the template writes in a conversation, but for the marks of thoughts.
    """

    template: str
    control: re.Pattern[str]  # not by users, systems and tools
    structure: re.Pattern[str]  # nor by the assistant: those around turns

    def message(self, message: Message) -> Message:
        pattern = self.structure if message["role"] == "assistant" else self.control
        return {key: value if key == "role" else _broken(value, pattern) for key, value in message.items()}


_GUARDS = WeakKeyDictionary[Any, _Guard]()


def _guard(tokenizer: Any, tools: Tools = None) -> _Guard:
    from jinja2 import TemplateError

    template = tokenizer.get_chat_template(tools=tools)
    if tokenizer in _GUARDS and _GUARDS[tokenizer].template == template:
        return _GUARDS[tokenizer]
    added = tokenizer.added_tokens_decoder.values()
    control = _pattern(t.content for t in added if t.special or (t.content in template and t.content.strip()))
    around = {token for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) if token}
    probe = [{"role": role, "content": BREAK} for role in ("user", "assistant", "user", "assistant")]
    with suppress(TemplateError):  # there are templates that refuse it
        around |= {*control.findall(tokenizer.apply_chat_template(probe, chat_template=template, tokenize=False))}
    structure = _pattern(token for token in around if "think" not in token.lower())
    _GUARDS[tokenizer] = _Guard(template, control, structure)
    return _GUARDS[tokenizer]


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _broken(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return a value of JSON with `BREAK` after the first character of each token in its texts."""
    if isinstance(value, dict):
        return {key: _broken(inner, pattern) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(inner, pattern) for inner in value]
    if not isinstance(value, str):
        return value
    broken = pattern.sub(lambda token: f"{token[0][0]}{BREAK}{token[0][1:]}", value)
    return broken if broken == value else _broken(broken, pattern)
