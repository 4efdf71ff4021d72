"""JSON lines, or one JSON list of rows; plain or compressed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError
from infalign.data.lines import COMPRESSED, check_expansion, lines, reject_duplicate_keys
from infalign.data.messages import describe_type

ENDINGS = tuple(f"{name}{packed}" for name in (".jsonl", ".json") for packed in ("", *COMPRESSED))


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each line that is not blank, or of each item if the file is one list over several lines."""
    listed: list[str] | None = None
    begun = False
    with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        for where, line in lines(file, path):
            check_expansion(path, file.tell())
            if not begun and ".json" in path.suffixes and line.lstrip().startswith("["):
                listed = []
            begun = begun or not line.isspace()
            if listed is not None:
                listed.append(line)
            elif line.strip():
                yield where, _checked(where, _decoded(where, line))
    for number, row in enumerate(_decoded(str(path), "".join(listed)) if listed else ()):
        yield f"{path} item {number}", _checked(f"{path} item {number}", row)


def _decoded(where: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON that can be read ({error})") from error


def _checked(where: str, row: object) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: the row must be an object with columns, found {describe_type(row)}")
    return row
