"""Rows of a data set in the hub's layout."""

import bz2
import gzip
import lzma

import pytest
from rows import comparison, write_gzip

from infalign.core.errors import ConfigError, DataError
from infalign.data.hub import hub_rows


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder in the layout of Anthropic/hh-rlhf."""
    datasets = pytest.importorskip("datasets", reason="needs infalign[train]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hh" / "harmless-base"
    folder.mkdir(parents=True)
    write_gzip(folder / "train.jsonl.gz", [comparison("Hi"), comparison("Ho")])
    write_gzip(folder / "test.jsonl.gz", [comparison("Hey")])
    return tmp_path / "hh"


def test_hub_rows_of_a_local_folder(hub_folder):
    """A folder in the hub's layout gives the rows of its split, each with its place."""
    rows = list(hub_rows(str(hub_folder), split="train", data_dir="harmless-base"))
    source = f"{hub_folder}/harmless-base[train]"
    assert rows == [(f"{source} row 0", comparison("Hi")), (f"{source} row 1", comparison("Ho"))]


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


def test_hub_errors_are_ours(hub_folder):
    """An unknown split or folder is a ConfigError and a broken file a DataError, each in one line."""
    with pytest.raises(ConfigError, match=r'\[valid\] cannot be loaded \(Unknown split "valid"'):
        next(hub_rows(str(hub_folder), split="valid", data_dir="harmless-base"))
    with pytest.raises(ConfigError, match=r"/nowhere\[train\] cannot be loaded"):
        next(hub_rows(str(hub_folder), split="train", data_dir="nowhere"))
    (hub_folder / "broken").mkdir()
    (hub_folder / "broken" / "train.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"broken\[train\]: the files cannot be read .*row 1\)$"):
        next(hub_rows(str(hub_folder), split="train", data_dir="broken"))
