"""Rows of a data set in the hub's layout."""

import os
import shutil
import subprocess
import sys

import micro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import comparison, written

from infalign.data.hub import Hub, hub_rows
from infalign.data.sources import read_examples
from infalign.recipe.reading import load_recipe
from infalign.steps.run import Run


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder in the layout of Anthropic/hh-rlhf."""
    datasets = pytest.importorskip("datasets", reason="needs infalign[train]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hh" / "harmless-base"
    folder.mkdir(parents=True)
    written(folder / "train.jsonl.gz", [comparison()])
    return tmp_path / "hh"


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


def test_a_copy_in_the_folder_of_data_goes_before_the_hub(tmp_path, hub_folder):
    """It is read without a network; another content of it is another key of the run, and another folder is not."""
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run"))
    sources = "data.sources=[{hub: {id: A/hh, data_dir: harmless-base}}]"
    for name in ("a", "b"):
        shutil.copytree(hub_folder, tmp_path / name / "A" / "hh")
    recipes = [load_recipe(path, [sources, f"data.folder={tmp_path / name}"]) for name in ("a", "b")]
    ((example,), _) = read_examples(recipes[0].data, recipes[0].data.sources, seed=0)
    assert example.rejected
    keys = [Run.of(recipe).key("data") for recipe in recipes]
    assert keys[0] == keys[1]
    written(tmp_path / "b" / "A" / "hh" / "harmless-base" / "train.jsonl.gz", [comparison("Other")])
    assert Run.of(recipes[1]).key("data") != keys[0]


def test_without_a_network_the_error_says_how_to_bring_the_files(tmp_path):
    """The hub cannot be asked: one sentence with the command."""
    recipe = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run"))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "infalign", "run", recipe, "--until", "data"]
    command += ["--set", "data.sources=[{hub: Anthropic/hh-rlhf}]"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert "`hf download Anthropic/hh-rlhf --repo-type dataset --local-dir Anthropic/hh-rlhf`" in found.stderr
