"""How much a compressed file may expand: the text of a few kilobytes can be made to fill any memory."""

from pathlib import Path

from infalign.errors import DataError

MOST, HARMLESS = 100, 2**27  # bytes of text for a byte on the disk (text compresses to a tenth); bytes of text at all


def check_expansion(path: Path, expanded: int) -> None:
    """Raise DataError if a file that expands to so many bytes is more likely a bomb than data."""
    if expanded > HARMLESS and expanded > MOST * (size := path.stat().st_size):
        raise DataError(
            f"{path} has {size:,} bytes and expands to more than {max(HARMLESS, MOST * size):,}; if that is meant, "
            "write it again as .jsonl, which is not compressed"
        )
