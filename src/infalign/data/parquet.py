"""Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infalign.confined import BombError, rehearse
from infalign.core.errors import DataError
from infalign.data.expansion import check_expansion
from infalign.data.lines import check_once

ENDINGS = (".parquet",)
BATCH = 1024  # rows decoded at once


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its number, from 0."""
    check_harmless(path)
    number = 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_once(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1


def check_harmless(path: Path) -> None:
    """Raise DataError if a file asks for too much memory or time: what it says of its sizes may be a lie."""
    try:
        rehearse(decode, path)
    except BombError as error:
        raise DataError(f"{path} is not read: {error}") from error


def decode(path: str) -> Iterator[str]:
    """Decode a file and hold nothing of it. Raises DataError if it expands too much."""
    yield "decoding it"
    expanded = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            expanded += sum(column.cast(_plain(column.type)).nbytes for column in batch.columns)
            check_expansion(Path(path), expanded)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries, whose values rows repeat."""
    if isinstance(kind, pa.DictionaryType):
        value: pa.DataType = kind.value_type
        return value
    if isinstance(kind, pa.ListType):
        return pa.list_(_plain(kind.value_type))
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    return kind
