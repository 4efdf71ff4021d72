"""Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infalign.data.lines import check_unique

ENDINGS = (".parquet",)
BATCH = 1024  # rows decoded at once


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its number, from 0."""
    number = 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_unique(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                yield f"{path} row {number}", {name: without_nulls(value) for name, value in row.items()}
                number += 1


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects: a struct has every field that some row's object has."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(item) for item in value]
    return value
