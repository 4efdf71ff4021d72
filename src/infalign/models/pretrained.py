"""Untrusted model folders: only safetensors and text files are read. Needs the ``train`` extra."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from infalign.core.errors import ConfigError, InfalignError
from infalign.core.storage import hash_file, unwritable, writing
from infalign.models.settings import is_hub_id

ADAPTER = "adapter"  # in a model's folder: its LoRA adapter, before it was merged
TRANSFORMATION = "transformation.json"  # in a model's folder: the tabulated transformation that it was trained on
MODEL_FILES = {".safetensors", ".json", ".jinja", ".model", ".txt"}  # weights, configuration, tokenizer
HUB_SECONDS = 10.0


def load_policy(path: str | Path, *, device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` of a causal language model from a folder or the hub, in evaluation mode.

    Reads safetensors only and runs no code of the folder. A tokenizer without a padding token pads with EOS.
    Raises `ConfigError` if the path is missing, holds no (complete) causal language model, or has no EOS token.
    """
    from transformers import AutoModelForCausalLM

    from infalign.models import guided  # noqa: F401 - so that transformers knows it

    config = config_of(path)
    tokenizer = read_tokenizer(path, f"{path} is not a model that can be loaded")
    # AutoModelForCausalLM would give any other checkpoint a new random head and say so in a log line only.
    check_causal(config, path)
    eos_token_id(tokenizer, path)
    cannot = f"cannot load the weights in {path}"
    model = read_weights(AutoModelForCausalLM, path, cannot, config=config, dtype=dtype)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def check_causal(config: Any, path: str | Path) -> None:
    """Raise ConfigError for the configuration of a model that is no causal language model."""
    if not _is_causal(config):
        made = " ".join(config.architectures or []) or "no architecture"
        raise ConfigError(f"{path} contains {made}, not a causal language model; use one, such as a chat model")


def _is_causal(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from infalign.models.guided import GuidedForCausalLM

    causal = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), GuidedForCausalLM.__name__}
    return not causal.isdisjoint(config.architectures or [])


def load_without_head(path: str | Path, *, device: str = "cpu", dtype: str = "float32") -> Any:
    """Load the network of a causal language model or of an encoder, without its head, in evaluation mode.

    Raises ConfigError as `load_policy`, and for a model that reads one text and writes another.
    """
    from transformers import AutoModel

    config = config_of(path)
    if _is_causal(config):
        return load_policy(path, device=device, dtype=dtype)[0].base_model
    if config.is_encoder_decoder:
        raise ConfigError(f"{path} is an encoder-decoder model; a head needs a language model or an encoder")
    model = read_weights(AutoModel, path, f"cannot load the weights in {path}", config=config, dtype=dtype)
    return model.to(device).eval()


def config_of(path: str | Path) -> Any:
    """Return the configuration of a model folder or hub id; raises ConfigError if there is none, or an adapter's."""
    from transformers import AutoConfig
    from transformers.utils import find_adapter_config_file

    if is_adapter(path):
        raise ConfigError(f"{path} is a LoRA adapter, but a whole model is needed here; merge it into its base")
    if is_hub_id(str(path)) and not Path(path).exists() and find_adapter_config_file(str(path)):
        raise ConfigError(f"{path} is a LoRA adapter; `hf download {path} --local-dir FOLDER` and use the folder")
    with loading(f"{path} is not a model that can be loaded"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds a LoRA adapter, as PEFT saves it, without the model below it."""
    return (Path(folder) / "adapter_config.json").is_file() and not (Path(folder) / "config.json").is_file()


def read_weights(
    kind: Any, path: str | Path, cannot: str, *, new_head: bool = False, brought: Container[str] = (), **options: Any
) -> Any:
    """Load a model of an Auto class from safetensors or a GGUF, running no code of its folder.

    Raises a ConfigError that begins with ``cannot`` for whatever transformers raises, and for weights that are missing:
    but for those of a head that may be new, those that are ``brought`` by an adapter, and those of an encoder's pooler,
    which is above the states and a part of a head.
    """
    options |= {"use_safetensors": True, "trust_remote_code": False}
    with loading(cannot):
        model, info = kind.from_pretrained(path, output_loading_info=True, **options)
    below = f"{model.base_model_prefix}." if new_head else ""
    needed = (name for name in info["missing_keys"] if name.startswith(below) and "pooler." not in name)
    missing = sorted(name for name in needed if name not in brought)
    if missing:
        raise ConfigError(f"{cannot}: it lacks weights of its architecture: {', '.join(missing)}")
    return model


def read_tokenizer(path: str | Path, cannot: str, **options: Any) -> Any:
    """Load a tokenizer, running no code of its folder. Raises a ConfigError that begins with ``cannot``."""
    from transformers import AutoTokenizer

    with loading(cannot):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)


def add_network_guide(trunk: str | Path, reference: Any, tokenizer: Any, *, top_tokens: int = 0) -> Any:
    """Return the reference with an untrained guide on the network of the model folder or hub id ``trunk``.

    Its Q tells the reference's ``top_tokens`` likeliest tokens apart, by default all. Vocabularies may be padded to
    different sizes: the trunk's embeddings of tokens that it lacks are zeros. Raises ConfigError if the trunk cannot be
    loaded or has another tokenizer than the reference's, ``tokenizer``.
    """
    from transformers import AutoModel

    from infalign.models.guided import GuidedForCausalLM

    cannot = f"{trunk} cannot be the trunk of a guide"
    model = read_weights(AutoModel, trunk, cannot, dtype="float32")
    if read_tokenizer(trunk, cannot).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{cannot}: its tokenizer differs from the reference's")
    own, vocabulary = len(model.get_input_embeddings().weight), reference.config.vocab_size
    if own < vocabulary:
        model.resize_token_embeddings(vocabulary, mean_resizing=False).weight.data[own:] = 0.0
    return GuidedForCausalLM.with_network(reference, model.to(reference.device), top_tokens)


def eos_token_id(tokenizer: Any, source: str | Path = "the model") -> int:
    """Return the id of the token that ends a response."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {source} has no EOS token, so no response would end; set its eos_token")
    return int(tokenizer.eos_token_id)


def generation_of(path: str | Path) -> Any:
    """Return the generation configuration of a model folder or hub id, or None if it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def load_classifier(start: str) -> Any:
    """Return a classifier with one output on the model folder or hub id ``start``, its head new if there is none.

    Raises ConfigError if the model cannot be loaded, or lacks weights below the head.
    """
    from transformers import AutoModelForSequenceClassification

    cannot = f"{start} cannot start a reward model"
    return read_weights(AutoModelForSequenceClassification, start, cannot, new_head=True, num_labels=1, dtype="float32")


@contextmanager
def loading(cannot: str) -> Iterator[None]:
    """Raise a ConfigError that begins with ``cannot`` for whatever a library raises of a model inside the block."""
    try:
        yield
    except InfalignError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for a folder that it cannot read
        said = " ".join(str(error).split())
        why = f"{type(error).__name__}: {said[:300]}"
        if "trust_remote_code" in said:
            why = "it needs code of its own, which is never run; choose a model that transformers supports directly"
        elif "named model.safetensors" in said:
            why = "it has no model.safetensors; weights in pickle files can run code and are never read"
        raise ConfigError(f"{cannot}: {why}") from error


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Raise as `writing`, also for what safetensors says of the disk."""
    from safetensors import SafetensorError

    try:
        with writing(path):
            yield
    except SafetensorError as error:
        raise unwritable(path, str(error)) from error


def check_reachable(model: str) -> None:
    """Ask the hub once for a model that is neither here nor in its cache; its client would try for minutes.

    Raises ConfigError if the hub cannot be reached or does not have the model.
    """
    if Path(model).exists() or not is_hub_id(model):
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        HfApi().model_info(model, timeout=HUB_SECONDS)
    except HfHubHTTPError as error:
        raise ConfigError(
            f"the hub refused {model}; correct the name, or run `hf auth login` for a gated model: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    except Exception as error:  # of the client, or of the network below it
        raise ConfigError(
            f"{model} is not a local folder, and the hub cannot be reached ({type(error).__name__}); on a machine "
            f"with a network, run `hf download {model} --local-dir FOLDER`, copy the folder here and use it instead"
        ) from error


def model_digest(model: str, of_file: Callable[[Path], str] = hash_file) -> str:
    """Return the hash of what a model folder's weights, configuration and tokenizer hold; a hub id is its own.

    ``of_file`` returns the hash of one file, `hash_file`'s or one that is known.
    """
    if not Path(model).is_dir():
        return model
    digest = blake2b(digest_size=16)
    for path in model_files(model):
        digest.update(path.name.encode() + bytes.fromhex(of_file(path)))
    return digest.hexdigest()


def model_files(folder: str | Path) -> list[Path]:
    """Return a folder's weights, configuration and tokenizer. Raises ConfigError for what is no file, as a pipe."""
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in MODEL_FILES)
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{path} is no file; fetch the model again")
    return files
