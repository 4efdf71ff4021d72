"""Files are written whole or not at all, and what is damaged or absent is named."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import PROMPT, user

from infalign.core.errors import DataError
from infalign.core.storage import read_table, write_table, write_text
from infalign.data.files import read_rows
from infalign.data.messages import MESSAGES


def test_tables_round_trip(tmp_path):
    """A table of conversations comes back equal, whole or by column, and leaves one file."""
    rows = [{"prompt": PROMPT, "reward": 0.5}, {"prompt": [user("Hi")], "reward": 1.5}]
    table = pa.Table.from_pylist(rows, schema=pa.schema([("prompt", MESSAGES), ("reward", pa.float64())]))
    path = tmp_path / "shard=1" / "rows.parquet"  # a folder's name must not become a column
    path.parent.mkdir()
    write_table(path, table)
    assert read_table(path).equals(table)
    assert read_table(path, ["reward"]).to_pylist() == [{"reward": 0.5}, {"reward": 1.5}]
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(DataError, match=r"has no column \['score'\]"):
        read_table(path, ["reward", "score"])


def test_written_text_is_exact_and_follows_the_umask(tmp_path):
    """Text keeps its newlines, replaces the old file, and gets the mode of an ordinary new file."""
    path = tmp_path / "report.md"
    path.write_text("old")
    before = os.umask(0o027)
    try:
        write_text(path, "Φ\r\nβ\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == "Φ\r\nβ\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_is_absent_cut_or_changed_is_named_with_what_to_do(tmp_path):
    """One changed byte in a page of rewards fails its checksum, here and in read_rows, and never becomes a reward."""
    path = tmp_path / "rewards.parquet"
    with pytest.raises(DataError, match="does not exist; rerun the step that writes it"):
        read_table(path)
    write_table(path, pa.table({"reward": np.random.default_rng(0).normal(size=1000)}))
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-5])
    with pytest.raises(DataError, match="is damaged"):
        read_table(path)
    content[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged .*CRC.*; delete it and rerun"):
        read_table(path)
    with pytest.raises(DataError, match=r"cannot be read from the start .*CRC"):
        list(read_rows(path))
