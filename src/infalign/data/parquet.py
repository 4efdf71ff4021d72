"""Parquet."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infalign.data.lines import HARMLESS_BYTES, check_expansion, check_unique

ENDINGS = (".parquet",)
BATCH = 1024  # rows decoded at once
SCANNED = 2**17  # rows whose texts are measured at once, fewer where texts begin as others and are not shared


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its number, from 0."""
    check_size(path)
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_unique(file.schema_arrow.names)
        rows = (row for batch in file.iter_batches(batch_size=BATCH) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path} row {number}", {name: without_nulls(value) for name, value in row.items()}


def check_size(path: Path) -> None:
    """Raise DataError if a file, or a text that stands for many, expands too much. Damage is left to who reads it."""
    with suppress(pa.ArrowInvalid, OSError):
        file = pq.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        columns = [(group.column(i), file.schema.column(i)) for group in groups for i in range(group.num_columns)]
        values = sum(column.num_values * max(4, kind.length or 0) for column, kind in columns)
        check_expansion(path, max(values, sum(group.total_byte_size for group in groups)))
        texts = [column for column, kind in columns if kind.physical_type == "BYTE_ARRAY"]
        begun = {c.path_in_schema: c.total_uncompressed_size for c in texts if "DELTA_BYTE_ARRAY" in c.encodings}
        shared = {c.path_in_schema for c in texts if any("DICTIONARY" in e for e in c.encodings)} - begun.keys()
        rows, expanded = min(SCANNED, max(1, HARMLESS_BYTES // max(begun.values(), default=1))), 0
        file = pq.ParquetFile(path, read_dictionary=[*shared])
        for batch in file.iter_batches(batch_size=rows, columns=[*shared, *begun]):
            expanded += sum(map(_text_bytes, batch.columns))
            check_expansion(path, expanded)


def _text_bytes(array: Any) -> int:
    """Return the bytes of all texts in an array, however often one of them is there."""
    if pa.types.is_nested(array.type):
        inner = [array.keys, array.items] if pa.types.is_map(array.type) else array.flatten()
        return sum(map(_text_bytes, inner if isinstance(inner, list) else [inner]))
    if not pa.types.is_dictionary(array.type):
        return int(array.nbytes)
    return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects: a struct has every field that some row's object has."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(item) for item in value]
    return value
