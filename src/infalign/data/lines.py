"""Shared by the readers: lines with their place, and checks for duplicate names and for what expands too much."""

import bz2
import gzip
import lzma
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError

COMPRESSED: dict[str, Any] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
MAX_RATIO = 100  # bytes of text for a byte on the disk (text compresses to a tenth)
HARMLESS_BYTES = 2**27  # of text
MAX_LINE_BYTES = 2**26  # bytes
MAX_BLANK_LINES = 1_000_000  # blank lines, where others are less than a tenth of them


def lines(file: BufferedIOBase, path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a binary file with its place, as text."""
    # A binary file splits at \n only; a decompression bomb may have no \n at all, or nothing else.
    blank = 0
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
        where = f"{path} line {number}"
        blank += line.isspace()
        if blank > MAX_BLANK_LINES and blank > 0.9 * number:
            raise DataError(f"{where}: {blank:,} blank lines up to here; remove blank lines from the file")
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{where}: longer than {MAX_LINE_BYTES:,} bytes; put one row per line, or shorten it")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
        yield where, text


def check_expansion(path: Path, expanded: int) -> None:
    """Raise DataError if a file that expands to this many bytes is more likely a bomb than data."""
    if expanded > HARMLESS_BYTES and expanded > MAX_RATIO * (size := path.stat().st_size):
        raise DataError(
            f"{path} has {size:,} bytes and expands to more than {max(HARMLESS_BYTES, MAX_RATIO * size):,}; if this "
            "is intended, decompress it and use the .jsonl file"
        )


def check_unique(names: Sequence[str]) -> None:
    """Raise ValueError for a duplicate name, whose value would be ambiguous."""
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise ValueError(f"the name {twice!r} occurs twice")


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as an ``object_pairs_hook``. Raises ValueError for a duplicate name."""
    check_unique([key for key, _ in pairs])
    return dict(pairs)
