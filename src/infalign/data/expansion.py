"""How much a compressed file may expand: the text of a few kilobytes can be made to fill any memory."""

import bz2
import gzip
import lzma
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infalign.core.errors import DataError

COMPRESSED: Mapping[str, Any] = MappingProxyType({".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile})
MAX_RATIO = 100  # bytes of text for a byte on the disk (text compresses to a tenth)
HARMLESS_BYTES = 2**27  # of text


def check_expansion(path: Path, expanded: int) -> None:
    """Raise DataError if a file that expands to this many bytes is more likely a bomb than data."""
    if expanded > HARMLESS_BYTES and expanded > MAX_RATIO * (size := path.stat().st_size):
        raise DataError(
            f"{path} has {size:,} bytes and expands to more than {max(HARMLESS_BYTES, MAX_RATIO * size):,}; if this "
            "is intended, decompress it and use the .jsonl file"
        )
