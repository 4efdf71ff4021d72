"""JSON lines, plain or gzipped."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError
from infalign.data.examples import describe_type
from infalign.data.expansion import check_expansion
from infalign.data.lines import lines, reject_duplicate_keys

ENDINGS = (".jsonl", ".jsonl.gz")


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each line that is not blank."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for where, line in lines(file, path):
            check_expansion(path, file.tell())
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=reject_duplicate_keys)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error}); correct the line") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{where}: the line is {describe_type(row)}, not an object with columns; correct the line"
                )
            yield where, row
