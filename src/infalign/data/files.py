"""Rows of a file, each with its place. A format is a module with ``ENDINGS`` and ``read``, and a line in `FORMATS`."""

import csv
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from infalign.core.errors import DataError

Reader = Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]

FORMATS = ("jsonl", "parquet", "csv")
_MODULES = [import_module(f"infalign.data.{name}") for name in FORMATS]
READERS: dict[str, Reader] = {ending: module.read for module in _MODULES for ending in module.ENDINGS}


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) from a .jsonl, .jsonl.gz, .parquet or .csv file, without holding the file in memory.

    Lines count from 1, as editors do, and a CSV row has the number of its last one; Parquet rows count from 0, as data
    frames do. Lines end at ``\\n`` only, so a U+2028 inside a text is text.

    Raises DataError for a file that is missing, empty, damaged, of another kind or changed meanwhile, and for a line
    that is not UTF-8, is not a JSON object, has not the CSV's cells (each of at most 128 KiB), or is over 64 MiB. These
    are faults of the file, which may have lost other rows too, so `load_examples` never skips them.
    """
    path = Path(path)
    read = next((read for ending, read in READERS.items() if path.name.endswith(ending)), None)
    where = None
    try:
        if path.is_dir():
            raise DataError(f"{path} is a directory; give one of its files")
        if not path.is_file():
            raise DataError(f"{path} does not exist")
        if read is None:
            raise DataError(f"{path} must end in one of {', '.join(READERS)}; convert the file")
        before = path.stat()
        for where, row in read(path):
            yield where, row
        after = path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise DataError(f"{path} changed while it was read; rerun the command once nothing writes to it")
    except csv.Error as error:
        last = where or f"{path}'s header"
        raise DataError(f"the row after {last} is not valid CSV ({error}); check for an unclosed quote") from error
    except (OSError, EOFError, ValueError, ArithmeticError, zlib.error, pa.ArrowException) as error:
        place = f"after {where}" if where else "from the start"
        raise DataError(
            f"{path} cannot be read {place} ({error}); correct the file, or fetch or write it again"
        ) from error
    if where is None:
        raise DataError(f"{path} holds no rows")
