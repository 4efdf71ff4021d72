"""Rows of a data set in the hub's layout."""

import bz2
import gzip
import lzma

import pytest
from rows import comparison, write_gzip

from infalign.core.errors import DataError
from infalign.data.hub import hub_rows


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder in the layout of Anthropic/hh-rlhf."""
    datasets = pytest.importorskip("datasets", reason="needs infalign[train]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hh" / "harmless-base"
    folder.mkdir(parents=True)
    write_gzip(folder / "train.jsonl.gz", [comparison()])
    return tmp_path / "hh"


@pytest.mark.parametrize("compressed", [gzip.open, bz2.open, lzma.open])
def test_a_compressed_file_of_a_folder_may_not_expand_without_limit(hub_folder, compressed):
    """Which is seen before datasets writes it expanded into its cache."""
    ending = {gzip.open: "gz", bz2.open: "bz2", lzma.open: "xz"}[compressed]
    bomb = hub_folder / "harmless-base" / f"train.jsonl.{ending}"
    (hub_folder / "harmless-base" / "train.jsonl.gz").unlink()
    with compressed(bomb, "wb") as file:
        for _ in range(140):
            file.write(b"\n" * 2**20)
    with pytest.raises(DataError, match=rf"train\.jsonl\.{ending} has [\d,]+ bytes and expands to more than"):
        next(hub_rows(str(hub_folder), split="train", data_dir="harmless-base"))


def test_a_broken_file_is_named_with_its_row(hub_folder):
    """An error of ours, in one line."""
    (hub_folder / "broken").mkdir()
    (hub_folder / "broken" / "train.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"broken\[train\]: the files cannot be read .*row 1\)$"):
        next(hub_rows(str(hub_folder), split="train", data_dir="broken"))
