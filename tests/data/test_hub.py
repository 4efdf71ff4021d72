"""Rows of a data set in the hub's layout."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import comparison, write_gzip

from infalign.core.errors import DataError
from infalign.data.hub import Hub, hub_rows
from infalign.data.sources import Source


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder in the layout of Anthropic/hh-rlhf."""
    datasets = pytest.importorskip("datasets", reason="needs infalign[train]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hh" / "harmless-base"
    folder.mkdir(parents=True)
    write_gzip(folder / "train.jsonl.gz", [comparison()])
    return tmp_path / "hh"


def test_a_broken_file_is_named_with_its_row(hub_folder):
    """An error of ours, in one line."""
    (hub_folder / "broken").mkdir()
    (hub_folder / "broken" / "train.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"broken/train\.jsonl line 2: not JSON"):
        list(hub_rows(Hub(id=str(hub_folder), data_dir="broken")))


CARD = """---
configs:
- {config_name: plain, data_files: [{split: train, path: plain/one.jsonl}, {split: test, path: plain/two.jsonl}]}
- {config_name: sheet, data_files: "sheet/*.csv"}
- {config_name: polite, data_files: "polite/*.parquet"}
---
"""


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"config": "plain"}, [{"a": "007", "day": "2024-01-02"}, {"a": 7, "day": "NA"}]),
        ({"config": "plain", "split": "test"}, [{"a": "1"}]),
        ({"config": "sheet"}, [{"a": "007", "day": "2024-01-02"}]),
        ({"config": "polite"}, [{"a": "1.0", "more": {"b": "2024-01-02"}}, {"a": "1", "more": {"c": 2}}]),
        ({"data_files": "sheet/one.csv"}, [{"a": "007", "day": "2024-01-02"}]),
    ],
)
def test_rows_of_a_configuration_keep_their_values(tmp_path, asked, found):
    """A source names configuration, split and files, and text that looks like a number or a date stays text."""
    pytest.importorskip("datasets", reason="needs infalign[train]")
    for name in ("plain", "sheet", "polite"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "plain" / "one.jsonl").write_text('{"a": "007", "day": "2024-01-02"}\n{"a": 7, "day": "NA"}\n')
    (tmp_path / "plain" / "two.jsonl").write_text('{"a": "1"}\n')
    (tmp_path / "sheet" / "one.csv").write_text("a,day\n007,2024-01-02\n")
    rows = [{"a": "1.0", "more": {"b": "2024-01-02"}}, {"a": "1", "more": {"c": 2}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "polite" / "one.parquet")
    assert [row for _, row in hub_rows(Hub(id=str(tmp_path), **asked))] == found


def test_a_source_of_the_hub_is_a_name_or_settings():
    """A text is the id; a split beside it is refused with the way to write it."""
    assert Source(hub="a/b").hub == Source(hub={"id": "a/b", "split": "train"}).hub
    with pytest.raises(ValueError, match=r"split is for a set; write `hub: {id: …, split: …}`"):
        Source(hub="a/b", split="test")
