"""Models in installed packages and in the hub's cache are found with size and licence."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from infalign.errors import ConfigError
from infalign.models.available import Available, in_hub_cache, in_packages
from infalign.models.gguf import is_gguf, place


def test_a_gguf_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its licence is the file's own; the package is not imported."""
    (tmp_path / "some_model").mkdir()
    (tmp_path / "some_model" / "__init__.py").write_text("raise SystemExit")
    file = tmp_path / "some_model" / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_license("mit")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    info = tmp_path / "some_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("some_model/__init__.py,,\nsome_model/m.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = [model for model in in_packages() if model.name == "package:some-model"]
    assert found == [Available("package:some-model", file.stat().st_size, "mit", "installed: m.gguf")]


def test_a_model_folder_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what a recipe reads where it names the package; of several each has its path."""
    files = ["some_encoder/one/config.json", "some_encoder/one/model.safetensors", "some_encoder/one/README.md"]
    for name, text in zip(files, ["{}", "weights", "---\nlicense: mit\n---\n"], strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    info = tmp_path / "some_encoder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-encoder\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(tmp_path)
    folder = str(tmp_path / "some_encoder" / "one")
    found = [model for model in in_packages() if "some-encoder" in model.name]
    assert found == [Available("package:some-encoder", len("weights"), "mit", "installed: one/")]
    assert place("package:some-encoder") == folder
    assert not is_gguf(folder)
    assert place(folder) == folder
    shutil.copytree(folder, tmp_path / "some_encoder" / "two")
    with (info / "RECORD").open("a") as record:
        record.writelines(f"{name.replace('one', 'two')},,\n" for name in files)
    assert {model.name for model in in_packages() if "some_encoder" in model.name} == {folder, folder[:-3] + "two"}
    with pytest.raises(ConfigError, match="holds 2 models; give the path of one"):
        place("package:some-encoder")


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its licence is that of its card; data sets are left out, and a missing cache is empty."""
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert list(in_hub_cache()) == []
    files: dict[str, Any] = {"README.md": "---\nlicense: bsd\n---\n# A model\n", "config.json": "{}"}
    for kind in ("models", "datasets"):
        commit = tmp_path / "hub" / f"{kind}--owner--name" / "snapshots" / "abc"
        commit.mkdir(parents=True)
        for name, text in files.items():
            (commit / name).write_text(text)
    size = sum(map(len, files.values()))
    assert list(in_hub_cache()) == [Available("owner/name", size, "bsd", "in the hub's cache")]
