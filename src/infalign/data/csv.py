"""CSV with a header."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError
from infalign.data.lines import check_unique, lines

ENDINGS = (".csv",)


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with the number of its last line."""
    with path.open("rb") as file:
        reader = csv.DictReader((line for _, line in lines(file, path)), strict=True)
        check_unique(header := list(reader.fieldnames or []))
        if len(header) == 1 and (sign := next((sign for sign in ";\t|" if sign in header[0]), None)):
            raise DataError(f"{path}: the only column is {header[0]!r}; separate columns by commas instead of {sign!r}")
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where}: the header has {len(header)} cells, this row does not; correct it")
            yield where, {name: cell or None for name, cell in row.items()}
