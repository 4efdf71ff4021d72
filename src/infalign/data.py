"""Read preferences and demonstrations into one form, split them without leaks, and store tables atomically."""

import csv
import errno
import gzip
import json
import math
import os
import re
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, file_digest
from io import BufferedIOBase
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from infalign.errors import ConfigError, DataError, InfalignError

Message = dict[str, str]
Conversation = tuple[Message, ...]

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

# An inline "Human:" is part of what somebody wrote; only one after a blank line starts a turn.
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
UNWRITABLE = {  # what the disk or who owns it refuses
    *(errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO),
    *(errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS),
}
LONGEST_LINE = 2**26  # bytes
TLDR_QUERY = re.compile(r"SUBREDDIT: r/(\S+)\n\nTITLE: (.*?)\n\nPOST: (.*)\n\nTL;DR:", re.DOTALL)


# Examples


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


def _digest(value: object) -> str:
    return blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=8).hexdigest()


# Files to rows


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) from a .jsonl, .jsonl.gz, .parquet or .csv file, without holding the file in memory.

    Lines count from 1, as editors do, and a CSV row has the number of its last one; Parquet rows count from 0, as data
    frames do. Lines end at ``\\n`` only, so a U+2028 inside a text is text.

    Raises DataError for a file that is missing, empty, damaged or of another kind, and for a line that is not UTF-8,
    no JSON object, no row with the CSV's cells (each of at most 128 KiB), or over 64 MiB. These are faults of the file:
    nobody can say what else it lost, so `load_examples` never skips them.
    """
    path = Path(path)
    read = next((read for ending, read in READERS.items() if path.name.endswith(ending)), None)
    where = None
    try:
        if path.is_dir():
            raise DataError(f"{path} is a directory; name one of its files")
        if not path.is_file():
            raise DataError(f"{path} does not exist; correct the path")
        if read is None:
            raise DataError(f"{path}: the ending is none of {', '.join(READERS)}; convert the file")
        for where, row in read(path):
            yield where, row
    except csv.Error as error:
        last = where or f"{path}'s header"
        raise DataError(f"the row after {last} is no CSV ({error}); is a quote not closed? Correct the row") from error
    except (OSError, EOFError, ValueError, ArithmeticError, zlib.error, pa.ArrowException) as error:
        place = f"after {where}" if where else "from its start"
        raise DataError(f"{path} cannot be read {place} ({error}); fetch or write the file again") from error
    if where is None:
        raise DataError(f"{path} holds no rows")


def _lines(file: BufferedIOBase, path: Path) -> Iterator[tuple[str, str]]:
    # A binary file splits at \n only; a bomb may have no \n at all.
    for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), 1):
        where = f"{path} line {number}"
        if len(line) > LONGEST_LINE:
            raise DataError(f"{where}: longer than {LONGEST_LINE:,} bytes; split the file into lines, or the line")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
        yield where, text


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for where, line in _lines(file, path):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error}); correct the line") from error
            if not isinstance(row, dict):
                raise DataError(f"{where}: the line is {_kind(row)}, not an object with columns; correct the line")
            yield where, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_once([key for key, _ in pairs])
    return dict(pairs)


def _check_once(names: Sequence[str]) -> None:
    """Raise ValueError for a name that stands there twice: which of its values is meant?"""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands there twice")


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        reader = csv.DictReader((line for _, line in _lines(file, path)), strict=True)
        _check_once(reader.fieldnames or [])
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{where}: the header names {len(reader.fieldnames or [])} cells, the row has others; correct it"
                )
            yield where, row


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_once(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1


READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


# Rows to examples


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
                raise DataError(f"{error}; drop the row or pass --skip-invalid") from error
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

    Raises DataError, with ``where``, for an absent column, a value that is no text, an empty response or last user
    turn, a prompt that does not end with the user, and a comparison whose two responses are one.
    """
    try:
        prompt, chosen, rejected = _parse(row)
        if not prompt or prompt[-1]["role"] != "user":
            raise DataError("the prompt does not end with a user turn")
        if not prompt[-1]["content"].strip():
            raise DataError("the last turn of the prompt is empty")
        if not chosen:
            raise DataError("the chosen response is empty" if rejected is not None else "the response is empty")
        if rejected == "":
            raise DataError("the rejected response is empty")
        if chosen == rejected:
            raise DataError("the chosen and the rejected response are identical, which says nothing")
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return Example(prompt, chosen, rejected, where)


def _parse(row: Mapping[str, Any]) -> tuple[Conversation, str, str | None]:
    if "chosen" in row or "rejected" in row:
        if "prompt" in row:
            prompt = _prompt(row)
            return prompt, _response(row, "chosen", prompt), _response(row, "rejected", prompt)
        if isinstance(row.get("chosen"), list):
            return _split_conversations(row)
        return _split_transcripts(_text(row, "chosen"), _text(row, "rejected"))
    if "completion" in row:
        prompt = _prompt(row)
        return prompt, _response(row, "completion", prompt), None
    if "messages" in row:
        prompt, response = _split_last(row, "messages")
        return prompt, response, None
    if "reference_responses" in row:
        return _tldr_prompt(_text(row, "query")), _text(row, "reference_responses").strip(), None
    raise DataError(f"the columns {sorted(row)} hold neither chosen and rejected, nor completion, nor messages")


def _split_transcripts(chosen: str, rejected: str) -> tuple[Conversation, str, str]:
    for column, transcript in (("chosen", chosen), ("rejected", rejected)):
        if not transcript.startswith("\n\nHuman:"):
            raise DataError(f"there is no prompt, and {column} is no transcript that starts with a Human turn")
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
        raise DataError(f"column {column} is {'empty' if values == [] else _kind(values)}, not a list of messages")
    messages = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"message {number} of {column} is {_kind(value)}, not an object with role and content")
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
        raise DataError(f"column {column} is {_kind(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"column {column} holds half a surrogate pair, which UTF-8 cannot store") from None
    return value


def _value(row: Mapping[str, Any], column: str) -> object:
    if column not in row:
        raise DataError(f"column {column} is missing; the row has {sorted(row)}")
    return row[column]


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


# Splits


def split_by_group(
    examples: Iterable[Example], fractions: Mapping[str, float], *, seed: int
) -> dict[str, list[Example]]:
    """Return the examples of each named part, every group whole in the part that its hash and ``seed`` choose.

    A group's part does not depend on the other examples, so the sizes meet ``fractions`` only on average.
    Raises ConfigError unless the fractions are non-negative and sum to 1.
    """
    if not all(fraction >= 0 for fraction in fractions.values()) or not math.isclose(sum(fractions.values()), 1):
        raise ConfigError(f"the fractions {dict(fractions)} are not non-negative numbers that sum to 1; correct them")
    names = list(fractions)
    bounds = list(accumulate(fractions.values()))[:-1]
    parts: dict[str, list[Example]] = {name: [] for name in names}
    for example in examples:
        position = int(_digest([seed, example.group])[:12], 16) / 16**12  # uniform on [0, 1), exact in a float
        parts[names[bisect_right(bounds, position)]].append(example)
    return parts


def without_groups_of(train: Iterable[Example], test: Iterable[Example]) -> tuple[list[Example], int]:
    """Return the ``train`` examples whose group is not in ``test``, and how many were dropped."""
    train = list(train)
    groups = {example.group for example in test}
    kept = [example for example in train if example.group not in groups]
    return kept, len(train) - len(kept)


# Files


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that replaces ``path`` when the block ends, and vanishes if it fails.

    The block creates the file, so its mode follows the umask. Readers see the old file or the whole new one, also
    after a power cut. Raises InfalignError as `writing` does.
    """
    path = Path(path)
    temporary = path.with_name(f".{uuid4().hex}-{path.name}")  # keeps the ending, from which writers infer the format
    try:
        with writing(path):
            yield temporary
            fsync(temporary)
            temporary.replace(path)
            fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise InfalignError that names ``path`` when the disk, or who owns it, does not take what the block writes."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise unwritable(path, os.strerror(error.errno)) from error


def unwritable(path: Path, why: str) -> InfalignError:
    """Return the error for a file or folder that cannot be written, with what its disk has free."""
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    return InfalignError(
        f"{path} cannot be written ({why}; {free / 1e9:.1f} GB are free); what was there is kept, so make room or mend "
        "the disk and run the same command again"
    )


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the hash of a file's content, 32 hexadecimal digits."""
    with path.open("rb") as file:
        return file_digest(file, partial(blake2b, digest_size=16)).hexdigest()


def inventory(path: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Return size and hash of a file, or of every file in a folder, by name below ``root``, once all is on the disk."""
    return {
        file.relative_to(root).as_posix(): {"bytes": file.stat().st_size, "blake2b": hash_file(file)}
        for file in settle(path)
    }


def settle(path: Path) -> list[Path]:
    """Wait until a file, or every file in a folder, is on the disk, and return them without the hidden ones."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    files = [file for file in files if not file.name.startswith(".")]  # such as the temporary one of a killed process
    with writing(path):
        for place in sorted({path.parent, *(file.parent for file in files), *files}):
            fsync(place)
    return files


def flaws(files: Mapping[str, Mapping[str, Any]], root: Path) -> Iterator[str]:
    """Yield how files differ from their `inventory`: ``model.safetensors has 10 of 90 bytes``."""
    for name, made in files.items():
        path = root / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != made["bytes"]:
            yield f"{name} has {size} of {made['bytes']} bytes"
        elif hash_file(path) != made["blake2b"]:
            yield f"{name} is damaged"


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object with ``blake2b``, the hash of the rest, whole or not at all."""
    write_text(path, json.dumps({**record, "blake2b": _seal(record)}, indent=1))


def read_record(path: str | Path) -> dict[str, Any]:
    """Return a JSON object that `write_record` wrote. Raises DataError for one that is damaged."""
    try:
        record: dict[str, Any] = json.loads(Path(path).read_bytes())
        if record.pop("blake2b", None) != _seal(record):
            raise ValueError("its content is not what its hash says")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and run the same command again") from error
    return record


def _seal(record: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(record).encode(), digest_size=16).hexdigest()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all; newlines stay as they are."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_table(path: str | Path, table: pa.Table) -> None:
    """Write ``table`` to the Parquet file ``path`` with a checksum on every page, whole or not at all."""
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the Parquet file ``path``, or its named ``columns``, with the checksum of every page read verified.

    Raises DataError for a missing file, a damaged one and one without a column asked for.
    """
    if not Path(path).exists():
        raise DataError(f"{path} does not exist; run the step that writes it")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            absent = set(columns or ()) - set(file.schema_arrow.names)
            if absent:
                raise DataError(f"{path} has no column {sorted(absent)}; run the step that writes it again")
            return file.read(None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and run the step that writes it again") from error
