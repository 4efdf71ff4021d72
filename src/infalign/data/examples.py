"""Rows of preferences, demonstrations and prompts in one form, recognised by their columns."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from infalign.core.errors import DataError
from infalign.data.messages import (
    Conversation,
    digest,
    from_cell,
    messages_of_text,
    prompt_id,
    read_conversation,
    read_json,
    read_messages,
    read_text,
    reply,
    to_column,
    to_text,
)
from infalign.method.by_name import GIVEN

# An inline "Human:" is part of the text; only one after a blank line starts a turn.
HH_TURN = re.compile(r"\n\n(Human|Assistant):")
FOREIGN_TURN = re.compile(r"\n\n(Human|Assistant):|.*?<extra_id_1>", re.DOTALL)  # of HH, and of HelpSteer
HH_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TLDR_QUERY = re.compile(r"SUBREDDIT: r/(\S+)\n\nTITLE: (.*?)\n\nPOST: (.*)\n\nTL;DR:", re.DOTALL)

PROMPTS = ("prompt", "instruction", "question", "query", "problem")
SYSTEMS = ("system", "system_prompt")
INPUTS = ("input", "context")  # what an instruction is about, in Alpaca and Dolly
CONVERSATIONS = ("messages", "conversations", "conversation")
RESPONSES = ("completion", "response", "output")
LABELS = ("label", "kto_tag")  # whether a response alone is desirable
UNUSED = ("helpfulness", "completions", "history")  # ratings, several answers, and turns in a form of their own
BY_NUMBER = {"0": 0, "1": 1}
BY_SIGN = {str(strength): int(strength > 0) for strength in (-3, -2, -1, 1, 2, 3)}
PAIRS = (  # the prompt, two answers, the columns that prefer one of them, and which one by their values
    ("history", ("human_ref_B", "human_ref_A"), ("labels",), BY_NUMBER),  # SHP
    ("prompt", ("response_0", "response_1"), ("better_response_id", "safer_response_id"), BY_NUMBER),  # PKU-SafeRLHF
    ("prompt", ("response_1", "response_2"), ("preference_strength",), BY_SIGN),  # HelpSteer2
    ("context", ("response1", "response2"), ("overall_preference",), BY_SIGN),  # HelpSteer3
)
NAMED = PROMPTS + SYSTEMS + INPUTS + CONVERSATIONS + RESPONSES + LABELS + UNUSED
REPLIES = ("chosen", "rejected", "rejected_response", "reference_responses", "weight")
DEFINED = {*NAMED, *REPLIES, *(name for _, answers, verdicts, _ in PAIRS for name in answers + verdicts)}


@dataclass(frozen=True)
class Example:
    """A prompt with a chosen and a rejected reply, with one demonstrated reply, or alone.

    ``rejected`` is None in a demonstration, and ``chosen`` is empty where the row has a prompt alone. ``columns`` has
    every column that the row's format does not define, as it was read, and ``tools``, which chat templates show.
    """

    prompt: Conversation
    chosen: Conversation
    rejected: Conversation | None
    where: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def prompt_id(self) -> str:
        """Return the identity of the whole prompt."""
        return prompt_id(self.prompt)

    @cached_property
    def group(self) -> str:
        """Return the identity of the first user turn, which conversations with one start share.

        Turns that differ in their blanks or in their Unicode normalization are the same.
        """
        first = next(turn["content"] for turn in self.prompt if turn["role"] == "user")
        return digest(" ".join(unicodedata.normalize("NFKC", first).split()))


class _Row:
    """The columns of a row that are not null, and which of them were read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = {name: value for name, value in columns.items() if value is not None}
        self.null, self.read = columns.keys() - self.columns.keys(), DEFINED - self.columns.keys()

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def first(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.columns), None)

    def value(self, name: str) -> Any:
        if name not in self.columns and name not in self.null:
            raise DataError(f"column {name} is missing; the row has {sorted(self.columns)}")
        self.read.add(name)
        return self.columns.get(name)

    def text(self, name: str) -> str:
        return read_text(self.value(name), name)

    def messages(self, name: str) -> Conversation:
        value = self.value(name)
        return (isinstance(value, str) and messages_of_text(value, name)) or read_messages(value, name)

    def given(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of ``names`` that hold anything, and count the others as read."""
        self.read.update(names)
        return {name: value for name in names if (value := self.columns.get(name)) not in (None, "", [])}


def to_table(examples: Iterable[Example]) -> pa.Table:
    """Return examples as a table keeps them: replies are text, or JSON where a reply is more than one plain turn.

    Columns are one JSON text, so that values keep their type, whatever other rows have; those that no reward function
    gets, as their name is that of something else (`by_name.GIVEN`), are left out.
    """
    examples = list(examples)
    kept = ({name: value for name, value in e.columns.items() if name not in GIVEN} for e in examples)
    columns = {
        "prompt": to_column(e.prompt for e in examples),
        "chosen": pa.array([to_text(e.chosen) if e.chosen else None for e in examples], pa.string()),
        "rejected": pa.array([to_text(e.rejected) if e.rejected else None for e in examples], pa.string()),
        "where": pa.array([e.where for e in examples], pa.string()),
        "columns": pa.array([json.dumps(columns, default=_plain) for columns in kept], pa.string()),
    }
    return pa.table(columns)


def _plain(value: Any) -> Any:
    """Return arrays, sets and numbers that JSON lacks as lists and numbers, and what else it lacks as text."""
    return value.tolist() if hasattr(value, "tolist") else [*value] if isinstance(value, set) else str(value)


def from_table(table: pa.Table) -> list[Example]:
    """Return the examples of `to_table`."""
    return [
        Example(
            tuple(from_cell(row["prompt"])),
            read_conversation(row["chosen"], "chosen", "assistant") if row["chosen"] is not None else (),
            read_conversation(row["rejected"], "rejected", "assistant") if row["rejected"] is not None else None,
            row["where"],
            json.loads(row["columns"]),
        )
        for row in table.to_pylist()
    ]


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
                cure = "drop the row or" if examples else "correct the file or, if only some rows are so,"
                raise DataError(f"{error}; {cure} pass --skip-invalid") from error
            skipped.append(str(error))
    if not examples:
        reason = f"all {len(skipped)} rows are invalid; first: {skipped[0]}" if skipped else "there are no rows"
        raise DataError(f"no valid examples: {reason}")
    return examples, skipped


def parse_example(row: Mapping[str, Any], where: str) -> Example:
    """Return the example that ``row`` holds, its form recognised by its columns; the guide lists the forms.

    Text is kept as it is. Messages are lists of objects or JSON text of such a list, and the prompt of a conversation
    ends with the last turn of the user, so that a reply may hold calls of tools and their results.

    Raises DataError, with ``where``, for an absent column, a value that is not text, an empty response or last user
    turn, a prompt that does not end with the user or a tool, a comparison whose two replies are equal, a response that
    is labelled undesirable or rated, and a weight that is not 1.
    """
    fields = _Row(row)
    try:
        prompt, chosen, rejected = _parse(fields)
        _check_prompt(prompt)
        if chosen or rejected:
            chosen = _check_reply(chosen, "response" if rejected is None else "chosen response")
            _check_use(fields, alone=rejected is None)
        if rejected is not None:
            rejected = _check_reply(rejected, "rejected response")
            if chosen == rejected:
                raise DataError("the chosen and the rejected response are identical")
        columns = _others(row, fields)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return Example(_without_weights(prompt), chosen, rejected, where, columns)


def parse_prompt(row: Mapping[str, Any], where: str) -> Example:
    """Return the prompt alone that ``row`` holds, text or messages, and all its other columns; as `parse_example`."""
    fields = _Row(row)
    try:
        prompt = _prompt(fields)
        _check_prompt(prompt)
        columns = _others(row, fields)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return Example(prompt, (), None, where, columns)


def _others(row: Mapping[str, Any], fields: _Row) -> dict[str, Any]:
    """Return the columns of a row that its form does not define."""
    columns = {name: value for name, value in row.items() if name not in fields.read}
    if isinstance(tools := columns.get("tools"), str):
        columns["tools"] = read_json(tools, "tools")
    return columns


def _check_prompt(prompt: Conversation) -> None:
    if not prompt or prompt[-1]["role"] not in ("user", "tool") or not any(turn["role"] == "user" for turn in prompt):
        raise DataError("the prompt does not end with a user turn")
    if not prompt[-1]["content"].strip() and prompt[-1]["role"] == "user":
        raise DataError("the last turn of the prompt is empty")


def _check_reply(replied: Conversation, what: str) -> Conversation:
    """Return a reply without weights, which are all 1."""
    if not replied or not (replied[-1]["content"].strip() or "tool_calls" in replied[-1]):
        raise DataError(f"the {what} is empty")
    if weights := [turn["weight"] for turn in replied if turn.get("weight", 1) != 1]:
        raise DataError(f"a message of the {what} has weight {weights[0]!r}; only weight 1 is supported")
    return _without_weights(replied)


def _without_weights(turns: Conversation) -> Conversation:
    return tuple({name: value for name, value in turn.items() if name != "weight"} for turn in turns)


def _check_use(row: _Row, *, alone: bool) -> None:
    """Raise DataError for a row whose weight is not 1, and for a response alone that is undesirable."""
    if row.columns.get("weight") not in (None, 1, "1"):
        raise DataError(f"column weight is {row.columns['weight']!r}; only 1 is supported")
    for name in LABELS if alone else ():
        label = str(row.columns.get(name)).lower()
        if label in ("false", "0", "0.0"):
            raise DataError(
                f"column {name} marks the response as undesirable, but a row with one response is used as a "
                "demonstration; keep only desirable rows, or write pairs of chosen and rejected"
            )
        row.read.update([name] if label in ("true", "1", "1.0") else [])


def _parse(row: _Row) -> tuple[Conversation, Conversation, Conversation | None]:
    if "chosen" in row or "rejected" in row:
        return _compared(row)
    for asked, answers, verdicts, meaning in PAIRS:
        if row.first(answers) and (preferring := [name for name in verdicts if name in row]):
            values = {name: row.value(name) for name in preferring}
            preferences = {meaning.get(str(value).removesuffix(".0")) for value in values.values()}
            chosen_one = preferences.pop()
            if preferences or chosen_one is None:
                raise DataError(f"{' and '.join(f'{name} {value!r}' for name, value in values.items())} prefer neither")
            prompt = _prompt(row, (asked,))
            first, second = (_reply(row, name, prompt) for name in answers)
            return (prompt, second, first) if chosen_one else (prompt, first, second)
    if unused := row.given(UNUSED):
        raise DataError(f"column {next(iter(unused))} is not supported; use messages, or prompt, chosen and rejected")
    conversation, response = row.first(CONVERSATIONS), row.first(RESPONSES)
    if conversation and not (response == "completion" and row.first(PROMPTS)):
        prompt, chosen = _split(row.messages(conversation), conversation)
        prompt = _with_system(row, prompt)
        chosen = _reply(row, response, prompt) if response and not chosen else chosen
    elif "reference_responses" in row:
        return _tldr_prompt(row.text("query")), (reply(row.text("reference_responses")),), None
    elif row.first(PROMPTS) or "prompt" in row.null:
        prompt = _prompt(row)
        chosen = _reply(row, response, prompt) if response else ()
    else:
        raise DataError(
            f"the columns {sorted(row.columns)} contain neither chosen and rejected, nor messages, nor a prompt: "
            f"{', '.join(PROMPTS)}"
        )
    return prompt, chosen, _reply(row, "rejected_response", prompt) if row.given(("rejected_response",)) else None


def _compared(row: _Row) -> tuple[Conversation, Conversation, Conversation]:
    chosen, rejected = row.value("chosen"), row.value("rejected")
    if row.first(PROMPTS) or isinstance(chosen, dict):
        prompt = _prompt(row, PROMPTS if row.first(PROMPTS) else CONVERSATIONS)
        return prompt, _reply(row, "chosen", prompt), _reply(row, "rejected", prompt)
    parts = {name: _split(_conversation(row, name), name) for name in ("chosen", "rejected")}
    for column, (_, replied) in parts.items():
        if not replied:
            raise DataError(f"{column} ends with a user message")
    (prompt, chosen), (other_prompt, rejected) = parts.values()
    if prompt != other_prompt:
        raise DataError("chosen and rejected differ before their last reply")
    return _with_system(row, prompt), chosen, rejected


def _conversation(row: _Row, column: str) -> Conversation:
    """Return a whole conversation: messages, or a transcript as HH has it."""
    value = row.value(column)
    if isinstance(value, list) or messages_of_text(row.text(column), column):
        return row.messages(column)
    if not value.startswith("\n\nHuman:"):
        raise DataError(
            f"there is no column prompt, and {column} is not a transcript that starts with a Human turn; the row "
            f"has {sorted(row.columns)}: if another column is the prompt, rename it to prompt"
        )
    _, *parts = HH_TURN.split(value)  # the blank after a colon is of the notation, others are of the text
    spoken = [
        (HH_SPEAKERS[speaker], text.removeprefix(" ")) for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return tuple(
        {"role": role, "content": "\n\n".join(text for _, text in turn if text)}
        for role, turn in groupby(spoken, key=itemgetter(0))
    )


def _split(messages: Conversation, column: str) -> tuple[Conversation, Conversation]:
    cut = max((number for number, turn in enumerate(messages, 1) if turn["role"] == "user"), default=0)
    return messages[:cut], _replying(messages[cut:], column)


def _replying(messages: Conversation, column: str) -> Conversation:
    """Return messages, if they are a reply of the assistant, with its tools, or nothing."""
    for turn in messages:
        if turn["role"] not in ("assistant", "tool"):
            raise DataError(f"the messages in {column} before its reply do not match the end of prompt")
    for turn, does in ((messages[0], "begins"), (messages[-1], "ends")) if messages else ():
        if turn["role"] != "assistant":
            raise DataError(f"{column} {does} with a message of the {turn['role']}; it must be one of the assistant")
    return messages


def _prompt(row: _Row, names: Sequence[str] = PROMPTS) -> Conversation:
    name = row.first(names) or names[0]
    value = row.value(name)
    prompt = read_conversation(value, name, "user")
    if isinstance(value, str) and FOREIGN_TURN.match(value):
        raise DataError(f"{name} is a transcript of several turns; write it as messages")
    if name not in INPUTS and (name == "instruction" or "instruction" not in row):
        for column, text in row.given(INPUTS).items():
            if len(prompt) > 1:
                raise DataError(f"column {column} cannot be combined with messages; write it into them")
            prompt = ({**prompt[0], "content": f"{prompt[0]['content']}\n\n{read_text(text, column)}"},)
    return _with_system(row, prompt)


def _with_system(row: _Row, prompt: Conversation) -> Conversation:
    for column, text in row.given(SYSTEMS).items():
        turn = {"role": "system", "content": read_text(text, column)}
        if prompt and prompt[0]["role"] in ("system", "developer"):
            if prompt[0] != turn:
                raise DataError(f"column {column} differs from the system turn of the messages; keep one of them")
        else:
            prompt = (turn, *prompt)
    return prompt


def _reply(row: _Row, column: str, prompt: Conversation) -> Conversation:
    messages = read_conversation(row.value(column), column, "assistant")
    lengths = range(min(len(messages) - 1, len(prompt)), -1, -1)
    repeated = next(length for length in lengths if messages[:length] == prompt[len(prompt) - length :])
    return _replying(messages[repeated:], column)


def _tldr_prompt(query: str) -> Conversation:
    post = TLDR_QUERY.fullmatch(query) if query.endswith("TL;DR:") else None  # or it would try again at every POST
    if post is None:
        raise DataError("query must have the form SUBREDDIT: r/…, TITLE: …, POST: …, TL;DR:")
    subreddit, title, body = post.groups()
    return ({"role": "user", "content": f"SUBREDDIT: {subreddit} TITLE: {title} POST: {body}"},)
