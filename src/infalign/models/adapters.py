"""LoRA adapters as PEFT saves them: merged into the model below them. Needs the ``train`` extra."""

import json
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from infalign.core.errors import ConfigError
from infalign.models.pretrained import load_policy, loading, read_tokenizer, read_weights
from infalign.models.settings import is_hub_id


def adapter_base(folder: str) -> str:
    """Return the folder or hub id of the model that a LoRA adapter was trained on, as the adapter names it.

    Raises ConfigError for an adapter of another kind, for one that names no base, and for a base that is elsewhere.
    """
    try:
        about = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
        kind, base = about["peft_type"], about["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read {folder}/adapter_config.json ({error}); save the adapter again") from error
    if kind != "LORA" or not isinstance(base, str) or not base:
        raise ConfigError(
            f"{folder} is an adapter of type {kind} on {base or 'no base'}; only LoRA adapters that name their base "
            "model can be loaded: merge it into its base and use the merged folder"
        )
    revision = about.get("revision") or "main"
    if not Path(base).is_dir() and (revision != "main" or not is_hub_id(base)):
        raise ConfigError(
            f"{folder}/adapter_config.json: base_model_name_or_path is {base}, revision {revision}, and no folder "
            "here; set it to a folder with this base, as `hf download --revision` makes one of the hub"
        )
    return base


def merge_adapter(model: Any, folder: str | Path) -> Any:
    """Return a model with the LoRA adapter in ``folder`` merged into it.

    Raises ConfigError for an adapter that is not in safetensors, or of another model, with the weights that are not
    the model's or are missing.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from torch.nn import Parameter

    cannot = f"cannot merge the LoRA adapter {folder} into {model.name_or_path}"
    names = _weight_names(folder, cannot)
    with loading(cannot), catch_warnings():
        simplefilter("ignore")  # PEFT warns of missing weights
        adapted = PeftModel.from_pretrained(model, folder)
        wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # An embedding that training enlarged is in the file of its own accord, and PEFT has read it.
    odd = sorted(name for name in names ^ wanted if "lora_" in name or name in wanted)
    if odd:
        raise ConfigError(f"{cannot}: only one of them has {', '.join(odd[:6])}{' …' if len(odd) > 6 else ''}")
    embedding, head = adapted.get_input_embeddings(), adapted.get_output_embeddings()
    if head is not None and (hasattr(embedding, "base_layer") or hasattr(head, "base_layer")):
        plain = getattr(head, "base_layer", head)  # if tied, peft would merge the adapter of one into both
        plain.weight = Parameter(plain.weight.detach().clone())
        adapted.config.tie_word_embeddings = False
    with loading(cannot):
        return adapted.merge_and_unload().eval()


def _weight_names(folder: str | Path, cannot: str) -> set[str]:
    """Return the names of an adapter's weights. Raises ConfigError unless they can be read from safetensors."""
    from safetensors import safe_open

    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise ConfigError(f"{folder} has no adapter_model.safetensors; weights in pickle files are never read")
    with loading(cannot), safe_open(file, framework="pt") as weights:
        return set(weights.keys())


def load_merged(folder: str) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)``: the LoRA adapter in ``folder``, merged into its base.

    The model is a causal language model or, as the adapter says, a classifier with one output; the tokenizer is the
    adapter's, or the base's if it has none. Raises ConfigError for an adapter that does not fit the base.
    """
    from peft import PeftConfig
    from transformers import AutoModelForSequenceClassification

    base = adapter_base(folder)
    cannot = f"cannot load the LoRA adapter {folder} on its base_model_name_or_path, {base}"
    names = {name.removeprefix("base_model.model.") for name in _weight_names(folder, cannot)}
    with loading(cannot):
        about = PeftConfig.from_pretrained(folder)
    if about.task_type == "SEQ_CLS":
        model = read_weights(
            AutoModelForSequenceClassification, base, cannot, brought=names, num_labels=1, dtype="float32"
        )
    else:
        model = load_policy(base)[0]
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    tokenizer = read_tokenizer(folder if has_tokenizer else base, cannot)
    if len(tokenizer) > len(model.get_input_embeddings().weight):  # tokens that the adapter adds
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return merge_adapter(model, folder), tokenizer
