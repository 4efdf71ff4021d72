"""A GGUF is converted once to the folder of the model that it was written from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from micro import write_gguf

from infalign.core.errors import ConfigError
from infalign.models.conversion import convert, converted_folder, gguf_file, is_gguf, locate_model
from infalign.models.pretrained import load_policy
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch

SCRATCH = Scratch(vocabulary=320, hidden=32, layers=2, context=64)


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny policy and its tokenizer."""
    tokenizer = train_tokenizer(["hello there", "how are you", "fine thanks"], SCRATCH)
    return new_policy(SCRATCH, tokenizer, seed=0), tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "infalign"


def test_the_folder_computes_and_tokenises_as_the_model(model: Any, tmp_path: Path) -> None:
    """The same logits, token ids and EOS."""
    policy, tokenizer = model
    ours, its = load_policy(convert(str(write_gguf(policy, tokenizer, tmp_path / "tiny.gguf"))))
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, policy(tokens).logits)
    text = [{"role": "user", "content": "hello <|user|> there: ünï!"}]
    rendered = [t.apply_chat_template(text, add_generation_prompt=True)["input_ids"] for t in (its, tokenizer)]
    assert rendered[0] == rendered[1]
    assert its.eos_token_id == tokenizer.eos_token_id


def test_it_is_converted_once_for_a_content(model: Any, tmp_path: Path, cache: Path) -> None:
    """A folder that is there is used, and other bytes make another one."""
    file = write_gguf(*model, tmp_path / "tiny.gguf")
    folder = Path(convert(str(file)))
    assert [path.name for path in cache.iterdir()] == [folder.name]
    made = folder.stat().st_mtime_ns
    assert convert(str(file)) == str(folder)
    assert folder.stat().st_mtime_ns == made
    with file.open("ab") as open_file:
        open_file.write(b"\0")
    assert converted_folder(str(file)) != folder


@pytest.mark.parametrize("bytes_left", [0, 100, 5_000, -3_000])
def test_a_truncated_file_is_named(model: Any, tmp_path: Path, cache: Path, bytes_left: int) -> None:
    """And leaves no folder."""
    file = write_gguf(*model, tmp_path / "cut.gguf")
    file.write_bytes(file.read_bytes()[:bytes_left])
    with pytest.raises(ConfigError, match=r"cut\.gguf cannot be read as a GGUF"):
        convert(str(file))
    assert not cache.exists()


def test_quantised_weights_are_those_of_the_file(model: Any, tmp_path: Path) -> None:
    """Sixteen steps between the least and the largest of 32 weights: half a step is the most that is lost."""
    policy, tokenizer = model
    ours, _ = load_policy(convert(str(write_gguf(policy, tokenizer, tmp_path / "q.gguf", quantisation="Q4_1"))))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        found, blocks = (p.state_dict()[name].detach().reshape(-1, 32) for p in (ours, policy))
        step = (blocks.amax(1) - blocks.amin(1)) / 15
        assert (found - blocks).abs().amax() > 0
        assert ((found - blocks).abs().amax(1) <= 0.51 * step).all()


def test_one_part_of_several_is_refused(model: Any, tmp_path: Path) -> None:
    """The weights in the other parts would be random."""
    part = write_gguf(*model, tmp_path / "tiny-00001-of-00003.gguf")
    with pytest.raises(ConfigError, match=r"one of 3 parts .*llama-gguf-split --merge"):
        convert(str(part))


def test_a_tokenizer_that_changes_text_is_refused(model: Any, tmp_path: Path) -> None:
    """Prompts would not be what they were: it is read as SentencePiece, whose spaces are other signs."""
    file = write_gguf(*model, tmp_path / "text.gguf", kind="llama")
    with pytest.raises(ConfigError, match=r"tokenizer in .*text\.gguf does not return the text"):
        convert(str(file))


def test_what_is_named_must_be_there() -> None:
    """A file, or a package with exactly one."""
    assert is_gguf("models/some.gguf")
    assert not is_gguf("owner/name")
    with pytest.raises(ConfigError, match=r"the file none\.gguf does not exist"):
        gguf_file("none.gguf")
    with pytest.raises(ConfigError, match="the package nowhere-to-be-found is not installed; `pip install"):
        locate_model("package:nowhere-to-be-found")
    with pytest.raises(ConfigError, match="package numpy contains 0 models"):
        locate_model("package:numpy")


def test_a_package_names_its_one_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with two is refused, since each has a path of its own; no code of the package runs."""
    info = tmp_path / "some_encoder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-encoder\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("one", "two"):
        folder = tmp_path / "some_encoder" / name
        folder.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (folder / file).touch()
            with (info / "RECORD").open("a") as record:
                record.write(f"{(folder / file).relative_to(tmp_path)},,\n")
        if name == "one":
            assert locate_model("package:some-encoder") == str(folder)
            assert not is_gguf(str(folder))
    with pytest.raises(ConfigError, match="contains 2 models; give the path of one"):
        locate_model("package:some-encoder")
