"""How much a compressed file may expand: the text of a few kilobytes can be made to fill any memory."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from types import MappingProxyType
from zlib import error as damaged

from infalign.core.errors import DataError

Open = Callable[[Path], BufferedIOBase]
COMPRESSED: Mapping[str, Open] = MappingProxyType({".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile})
CHUNK_BYTES = 2**20
MAX_RATIO, HARMLESS_BYTES = (
    100,
    2**27,
)  # bytes of text for a byte on the disk (text compresses to a tenth); bytes of text at all


def check_expansion(path: Path, expanded: int) -> None:
    """Raise DataError if a file that expands to so many bytes is more likely a bomb than data."""
    if expanded > HARMLESS_BYTES and expanded > MAX_RATIO * (size := path.stat().st_size):
        raise DataError(
            f"{path} has {size:,} bytes and expands to more than {max(HARMLESS_BYTES, MAX_RATIO * size):,}; if that is "
            "meant, write it again as .jsonl, which is not compressed"
        )


def check_compressed(path: Path) -> None:
    """Expand a compressed file and hold nothing of it. Raises DataError if it expands too much.

    Damage is left to who reads it.
    """
    with suppress(OSError, EOFError, damaged, lzma.LZMAError), COMPRESSED[path.suffix](path) as file:
        while file.read(CHUNK_BYTES):
            check_expansion(path, file.tell())
