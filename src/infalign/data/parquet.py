"""Parquet."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infalign.data.expansion import check_expansion
from infalign.data.lines import check_unique

ENDINGS = (".parquet",)
BATCH = 1024  # rows decoded at once


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its number, from 0."""
    check_declared_size(path)
    number = 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_unique(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                yield f"{path} row {number}", {name: without_nulls(value) for name, value in row.items()}
                number += 1


def check_declared_size(path: Path) -> None:
    """Raise DataError if a file says that it expands too much. Damage is left to who reads it."""
    with suppress(pa.ArrowException, OSError), pq.ParquetFile(path) as file:
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        check_expansion(path, sum(group.total_byte_size for group in groups))


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects: a struct has every field that some row's object has."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(item) for item in value]
    return value
