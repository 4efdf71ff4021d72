"""Messages and conversations: how rows spell them, how tables keep them, and what identifies a prompt."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import pyarrow as pa

from infalign.core.errors import DataError
from infalign.core.storage import column_values

Message = dict[str, Any]  # role, content and what else its owner gave: name, tool_calls, reasoning_content, …
Conversation = tuple[Message, ...]
Pair = tuple[Sequence[Message], Sequence[Message], Sequence[Message]]  # prompt, chosen reply, rejected reply
TURN = [("role", pa.string()), ("content", pa.string())]
MESSAGES = pa.list_(pa.struct(TURN))
MESSAGES_WITH_MORE = pa.list_(pa.struct([*TURN, ("more", pa.string())]))  # other fields, which have any type, as JSON
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}  # of ShareGPT
ROLES = ("system", "developer", "user", "assistant", "tool")
OBJECTS = re.compile(r"\s*\[\s*\{")
LITERAL = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")  # what Python prints of messages


def reply(response: str) -> Message:
    """Return a response as a turn of the assistant."""
    return {"role": "assistant", "content": response}


def spoken(conversation: Iterable[Message]) -> str:
    """Return what the assistant says in a reply: its turns, with a blank line between."""
    return "\n\n".join(turn["content"] for turn in conversation if turn["role"] == "assistant" and turn["content"])


def prompt_id(prompt: Sequence[Message]) -> str:
    """Return 16 hex digits that identify the messages of ``prompt``, on every machine and run."""
    return digest([[turn["role"], turn["content"], *([more] if (more := _more(turn)) else [])] for turn in prompt])


def digest(value: object) -> str:
    """Return 16 hex digits that identify a value of JSON."""
    return blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=8).hexdigest()


def _more(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}


def to_column(conversations: Iterable[Iterable[Message]]) -> "pa.Array[Any]":
    """Return conversations as a column of a table, with ``more`` where a message has other fields than its text."""
    cells = [list(conversation) for conversation in conversations]
    if not any(_more(turn) for cell in cells for turn in cell):
        return pa.array(cells, MESSAGES)
    return pa.array([[turn | {"more": json.dumps(_more(turn))} for turn in cell] for cell in cells], MESSAGES_WITH_MORE)


def from_cell(cell: Iterable[Message]) -> list[Message]:
    """Return a conversation of `to_column`, as any list of messages."""
    return [
        {name: value for name, value in turn.items() if name != "more"} | json.loads(turn.get("more") or "{}")
        for turn in cell
    ]


def prompts_of(table: pa.Table) -> list[list[Message]]:
    """Return the conversations in the column ``prompt`` of a table."""
    return [from_cell(cell) for cell in column_values(table, "prompt")]


def to_text(replied: Conversation) -> str:
    """Return a reply as the text cell from which `read_conversation` reads it: plain text if it is one plain turn."""
    if not replied:
        return ""
    if len(replied) == 1 and not _more(replied[0]) and not OBJECTS.match(replied[0]["content"]):
        return str(replied[0]["content"])
    return json.dumps(replied)


def read_conversation(value: object, column: str, role: str) -> Conversation:
    """Return the messages of a cell: a list of messages, JSON text of such a list, or the text of one turn of ``role``.

    Raises DataError for anything else, and for messages that are written in Python's notation.
    """
    if isinstance(value, list | dict):
        return read_messages([value] if isinstance(value, dict) else value, column)
    text = read_text(value, column)
    return messages_of_text(text, column) or ({"role": role, "content": text},)


def messages_of_text(text: str, column: str) -> Conversation | None:
    """Return the messages that a text spells as JSON, or None for any other text."""
    if OBJECTS.match(text) is None:
        return None
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        if LITERAL.match(text):
            raise DataError(f"column {column} contains messages in Python's notation; write them as JSON") from None
        return None
    said = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    if all(isinstance(turn, dict) and any(names <= turn.keys() for names in said) for turn in turns):
        return read_messages(turns, column)
    return None


def read_messages(values: object, column: str) -> Conversation:
    """Return the messages of a list: ``role`` and ``content``, ShareGPT's ``from`` and ``value``, Capybara's exchanges.

    A field that is null or an empty list is absent. Raises DataError for what is no message.
    """
    if not isinstance(values, list) or not values:
        found = "[]" if values == [] else describe_type(values)
        raise DataError(f"column {column} must be a list of messages, found {found}")
    messages: list[Message] = []
    for number, value in enumerate(chain.from_iterable(map(_turns, values)), 1):
        if not isinstance(value, dict):
            raise DataError(
                f"message {number} of {column} must be an object with role and content, found {describe_type(value)}"
            )
        try:
            messages.append(_read_turn(value))
        except DataError as error:
            raise DataError(f"message {number} of {column}: {error}") from None
    return tuple(messages)


def _turns(value: Any) -> list[Any]:
    """Return the two turns of an exchange, as Capybara has them; a message as it is."""
    if isinstance(value, dict) and value.keys() == {"input", "output"}:
        return [{"role": "user", "content": value["input"]}, reply(value["output"])]
    return [value]


def _read_turn(value: Mapping[str, Any]) -> Message:
    names = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    role, said = read_text(value.get(names[0]), names[0]), value.get(names[1])
    role = SPEAKERS.get(role, role)
    if role not in ROLES:
        raise DataError(f"the role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, found {role!r}")
    more = {name: field for name, field in value.items() if name not in names and field not in (None, [])}
    if isinstance(calls := more.get("tool_calls"), str):
        more["tool_calls"] = read_json(calls, "tool_calls")
    if said is None and "tool_calls" in more:
        said = ""
    return {"role": role, "content": read_text(said, names[1]), **json.loads(json.dumps(more, default=str))}


def read_json(text: str, column: str) -> Any:
    """Return the value that a cell of JSON text holds. Raises DataError for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"column {column} is not JSON that can be read ({error})") from None


def read_text(value: object, column: str) -> str:
    """Return a value that is text which UTF-8 can store. Raises DataError for any other."""
    if not isinstance(value, str):
        raise DataError(f"column {column} must be text, found {describe_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"column {column} contains half a surrogate pair, which UTF-8 cannot store") from None
    return value


def describe_type(value: object) -> str:
    """Return what a value of JSON is, in words."""
    return "null" if value is None else f"a value of type {type(value).__name__}"
