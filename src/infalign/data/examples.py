"""Rows of preferences and demonstrations in one form, recognised by their columns."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import pyarrow as pa

from infalign.core.errors import DataError

Message = dict[str, str]
Conversation = tuple[Message, ...]
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
# An inline "Human:" is part of the text; only one after a blank line starts a turn.
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TLDR_QUERY = re.compile(r"SUBREDDIT: r/(\S+)\n\nTITLE: (.*?)\n\nPOST: (.*)\n\nTL;DR:", re.DOTALL)


class MisnamedError(DataError):
    """A row whose prompt seems to be in a column of another name, as it then is in every row."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with a chosen and a rejected response, or with one demonstrated response (``rejected`` is None)."""

    prompt: Conversation
    chosen: str
    rejected: str | None
    where: str

    @property
    def prompt_id(self) -> str:
        """Return the identity of the whole prompt."""
        return prompt_id(self.prompt)

    @property
    def group(self) -> str:
        """Return the identity of the first user turn, which conversations with one start share."""
        return _digest(next(turn["content"] for turn in self.prompt if turn["role"] == "user"))


def prompt_id(prompt: Sequence[Message]) -> str:
    """Return 16 hex digits that identify the roles and contents of ``prompt``, on every machine and run."""
    return _digest([[turn["role"], turn["content"]] for turn in prompt])


def reply(response: str) -> Message:
    """Return a response as a turn of the assistant."""
    return {"role": "assistant", "content": response}


def _digest(value: object) -> str:
    return blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=8).hexdigest()


def load_examples(
    rows: Iterable[tuple[str, dict[str, Any]]], *, skip_invalid: bool = False
) -> tuple[list[Example], list[str]]:
    """Return the examples of ``rows`` and, with ``skip_invalid``, why each other row was left out.

    A row is invalid if it was read and `parse_example` refuses it. Raises DataError at the first invalid row unless
    ``skip_invalid``, when no example is left, and for rows that cannot be read.
    """
    examples: list[Example] = []
    skipped: list[str] = []
    for where, row in rows:
        try:
            examples.append(parse_example(row, where))
        except DataError as error:
            if not skip_invalid:
                cure = "" if isinstance(error, MisnamedError) else "; drop the row or pass --skip-invalid"
                raise DataError(f"{error}{cure}") from error
            skipped.append(str(error))
    if not examples:
        reason = f"all {len(skipped)} are invalid, the first: {skipped[0]}" if skipped else "there are none"
        raise DataError(f"no example is left of the rows: {reason}")
    return examples, skipped


def parse_example(row: Mapping[str, Any], where: str) -> Example:
    """Return the example that ``row`` holds, its form recognised by its columns.

    Comparisons: ``chosen`` and ``rejected`` as Human/Assistant transcripts (Anthropic HH) or as conversations with a
    common start, or as responses beside ``prompt``. Demonstrations: ``prompt`` and ``completion``, ``messages`` that
    end with the assistant, or OpenAI's TL;DR (``query`` and ``reference_responses``). A text prompt is one user turn;
    a response loses its surrounding whitespace. Other columns are ignored.

    Raises DataError, with ``where``, for an absent column, a value that is not text, an empty response or last user
    turn, a prompt that does not end with the user, and a comparison whose two responses are equal.
    """
    try:
        prompt, chosen, rejected = _parse(row)
        _check_prompt(prompt)
        if not chosen:
            raise DataError("the chosen response is empty" if rejected is not None else "the response is empty")
        if rejected == "":
            raise DataError("the rejected response is empty")
        if chosen == rejected:
            raise DataError("the chosen and the rejected response are identical, which says nothing")
    except DataError as error:
        raise type(error)(f"{where}: {error}") from None
    return Example(prompt, chosen, rejected, where)


def parse_prompt(row: Mapping[str, Any], where: str) -> Conversation:
    """Return the prompt that ``row`` holds as its column ``prompt``, text or messages; raises as `parse_example`."""
    try:
        prompt = _prompt(row)
        _check_prompt(prompt)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return prompt


def _check_prompt(prompt: Conversation) -> None:
    if not prompt or prompt[-1]["role"] != "user":
        raise DataError("the prompt does not end with a user turn")
    if not prompt[-1]["content"].strip():
        raise DataError("the last turn of the prompt is empty")


def _parse(row: Mapping[str, Any]) -> tuple[Conversation, str, str | None]:
    if "chosen" in row or "rejected" in row:
        if "prompt" in row:
            prompt = _prompt(row)
            return prompt, _response(row, "chosen", prompt), _response(row, "rejected", prompt)
        if isinstance(row.get("chosen"), list):
            return _split_conversations(row)
        chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
        for column, transcript in (("chosen", chosen), ("rejected", rejected)):
            if not transcript.startswith("\n\nHuman:"):
                raise _without_prompt(row, column)
        return _split_transcripts(chosen, rejected)
    if "completion" in row:
        prompt = _prompt(row)
        return prompt, _response(row, "completion", prompt), None
    if "messages" in row:
        prompt, response = _split_last(row, "messages")
        return prompt, response, None
    if "reference_responses" in row:
        return _tldr_prompt(_text(row, "query")), _text(row, "reference_responses").strip(), None
    raise DataError(f"the columns {sorted(row)} hold neither chosen and rejected, nor completion, nor messages")


def _without_prompt(row: Mapping[str, Any], column: str) -> DataError:
    """Return the error of a comparison whose ``column`` is no transcript, with the column that the prompt may be in."""
    said = f"there is no prompt, and {column} is no transcript that starts with a Human turn; the row has {sorted(row)}"
    others = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    asking = [name for name, value in others.items() if isinstance(value, str) and len(value.split()) > 1]
    if len(asking) == 1:
        return MisnamedError(f"{said}: rename {asking[0]} to prompt")
    return DataError(f"{said} and needs prompt, chosen and rejected")


def _split_transcripts(chosen: str, rejected: str) -> tuple[Conversation, str, str]:
    # Where one side's answer goes on in a second Assistant turn, only the shared start says where the answer starts.
    shared = cut = 0
    for asked, turn in pairwise(TURN.finditer(chosen)):
        if not rejected.startswith(chosen[shared : turn.end()], shared):
            break
        shared = turn.end()
        if (asked[1], turn[1]) == ("Human", "Assistant"):
            cut = turn.start()
    if not cut:
        raise DataError("chosen and rejected share no prompt")
    return _turns(chosen[:cut]), _final_turn(chosen[cut:], "chosen"), _final_turn(rejected[cut:], "rejected")


def _final_turn(transcript: str, column: str) -> str:
    turns = _turns(transcript)
    if turns[-1]["role"] == "user":
        raise DataError(f"the {column} transcript ends with a Human turn")
    if len(turns) > 1:
        raise DataError("chosen and rejected differ before their last Human turn")
    return turns[0]["content"]


def _turns(transcript: str) -> Conversation:
    _, *parts = TURN.split(transcript)
    spoken = [(SPEAKERS[speaker], text.strip()) for speaker, text in zip(parts[::2], parts[1::2], strict=True)]
    return tuple(
        {"role": role, "content": "\n\n".join(text for _, text in turn if text)}
        for role, turn in groupby(spoken, key=itemgetter(0))
    )


def _split_conversations(row: Mapping[str, Any]) -> tuple[Conversation, str, str]:
    prompt, chosen = _split_last(row, "chosen")
    other_prompt, rejected = _split_last(row, "rejected")
    if prompt != other_prompt:
        raise DataError("chosen and rejected differ before their last message")
    return prompt, chosen, rejected


def _split_last(row: Mapping[str, Any], column: str) -> tuple[Conversation, str]:
    *prompt, last = _messages(row, column)
    if last["role"] != "assistant":
        raise DataError(f"{column} ends with a message of the {last['role']}, not of the assistant")
    return tuple(prompt), last["content"].strip()


def _prompt(row: Mapping[str, Any]) -> Conversation:
    if isinstance(row.get("prompt"), list):
        return _messages(row, "prompt")
    text = _text(row, "prompt")
    if TURN.match(text):
        raise DataError("prompt is a Human/Assistant transcript; give it as messages")
    return ({"role": "user", "content": text},)


def _response(row: Mapping[str, Any], column: str, prompt: Conversation) -> str:
    if not isinstance(row.get(column), list):
        return _text(row, column).strip()
    repeated, response = _split_last(row, column)
    if repeated and repeated != prompt[-len(repeated) :]:
        raise DataError(f"{column} holds messages before its last that are not the end of prompt")
    return response


def _tldr_prompt(query: str) -> Conversation:
    post = TLDR_QUERY.fullmatch(query) if query.endswith("TL;DR:") else None  # or it would try again at every POST
    if post is None:
        raise DataError("query is not of the form SUBREDDIT: r/…, TITLE: …, POST: …, TL;DR:")
    subreddit, title, body = post.groups()
    return ({"role": "user", "content": f"SUBREDDIT: {subreddit} TITLE: {title} POST: {body}"},)


def _messages(row: Mapping[str, Any], column: str) -> Conversation:
    values = _value(row, column)
    if not isinstance(values, list) or not values:
        raise DataError(
            f"column {column} is {'empty' if values == [] else describe_type(values)}, not a list of messages"
        )
    messages = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(
                f"message {number} of {column} is {describe_type(value)}, not an object with role and content"
            )
        try:
            role, content = _text(value, "role"), _text(value, "content")
        except DataError as error:
            raise DataError(f"message {number} of {column}: {error}") from None
        if role not in ("system", "user", "assistant"):
            raise DataError(f"message {number} of {column} has the role {role!r}, not system, user or assistant")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        raise DataError(f"column {column} is {describe_type(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"column {column} holds half a surrogate pair, which UTF-8 cannot store") from None
    return value


def _value(row: Mapping[str, Any], column: str) -> object:
    if column not in row:
        raise DataError(f"column {column} is missing; the row has {sorted(row)}")
    return row[column]


def describe_type(value: object) -> str:
    """Return what a value of JSON is, in words."""
    return "null" if value is None else f"of type {type(value).__name__}"
