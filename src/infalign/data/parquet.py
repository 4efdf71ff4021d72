"""Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infalign.data.lines import check_once

ENDINGS = (".parquet",)


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its number, from 0."""
    number = 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_once(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
