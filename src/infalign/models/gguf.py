"""Models in GGUF files, converted once to the folders that everything else reads, and models in Python packages.

A recipe names a file, or with ``package:NAME`` an installed package that holds one, or a model folder; the package's
code is not run. The folder of a GGUF has the dequantised weights in float32, tokenizer and chat template, and lies in
the cache of the Hugging Face hub (``HF_HOME``) under the hash of the file. Needs the ``gguf`` extra.
"""

from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infalign.core.errors import ConfigError
from infalign.core.storage import fsync, hash_file, settle, writing
from infalign.models.pretrained import loading

PACKAGE = "package:"
PROBE = "Hello, how are you?\nFine – thanks! 2 + 2 = 4."


def locate_model(model: str) -> str:
    """Return the model folder in the package that a recipe names; any other name as it is.

    Raises ConfigError if the package holds several, and no GGUF.
    """
    if not model.startswith(PACKAGE):
        return model
    try:
        package = distribution(model.removeprefix(PACKAGE))
    except (PackageNotFoundError, ValueError):
        return model  # `gguf_file` says that it is not installed
    configs = (Path(str(file.locate())) for file in package.files or [] if file.name == "config.json")
    folders = [config.parent for config in configs if any(config.parent.glob("*.safetensors"))]
    if not folders or _ggufs(package):
        return model
    if len(folders) > 1:
        raise ConfigError(f"{model}: the package {package.name} holds {len(folders)} models; give the path of one")
    return str(folders[0])


def _ggufs(package: Distribution) -> list[Path]:
    """Return the GGUF files of an installed package."""
    return [Path(str(file.locate())) for file in package.files or [] if file.suffix == ".gguf"]


def is_gguf(model: str) -> bool:
    """Return whether a model, as `locate_model` returns it, is a GGUF file or a package with one."""
    return model.startswith(PACKAGE) or model.endswith(".gguf")


def gguf_file(model: str) -> Path:
    """Return the GGUF file that a recipe names. Raises ConfigError if there is none, or several."""
    if not model.startswith(PACKAGE):
        if not Path(model).is_file():
            raise ConfigError(f"there is no file {model}; correct the path")
        with Path(model).open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{model} cannot be read as a GGUF: it does not begin with these letters")
        return Path(model)
    name = model.removeprefix(PACKAGE)
    try:
        found = _ggufs(distribution(name))
    except (PackageNotFoundError, ValueError) as error:
        raise ConfigError(f"{model}: no package {name} is installed; `pip install {name}`") from error
    if len(found) != 1:
        raise ConfigError(f"{model}: the package {name} holds {len(found)} GGUF files; give the path of one")
    return found[0]


def converted_folder(model: str, of_file: Callable[[Path], str] = hash_file) -> Path:
    """Return the folder that `convert_gguf` makes of a GGUF, whether it exists or not.

    ``of_file`` returns the hash of one file, `hash_file`'s or one that is known.
    """
    from huggingface_hub.constants import HF_HOME

    file = gguf_file(model)
    return Path(HF_HOME) / "infalign" / f"{file.stem}-{of_file(file)[:16]}"


def convert_gguf(model: str) -> str:
    """Return the folder of a GGUF, which is converted on the first call.

    Raises ConfigError if the file is damaged, of an unsupported architecture or quantisation, or if its tokenizer does
    not return the text that it encodes.
    """
    folder = converted_folder(model)
    if folder.is_dir():
        return str(folder)
    policy, tokenizer = _read(model, gguf_file(model))
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            half = Path(temporary) / folder.name  # complete when it gets its name
            policy.save_pretrained(half)
            tokenizer.save_pretrained(half)
            settle(half)
            if not folder.is_dir():  # another process may have been faster
                half.rename(folder)
        fsync(folder.parent)
    return str(folder)


def _read(model: str, file: Path) -> tuple[Any, Any]:
    """Return the dequantised model and the tokenizer of a GGUF file."""
    try:
        import gguf  # noqa: F401 - transformers reads with it
    except ImportError as error:
        raise ConfigError(f"{model} is a GGUF; reading one needs `pip install 'infalign[gguf]'`") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    with loading(f"{file} cannot be read as a GGUF"):
        policy = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    text = tokenizer.decode(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    if text.strip() != PROBE:
        raise ConfigError(f"the tokenizer in {file} does not return the text that it encodes; use the original model")
    return policy, tokenizer
