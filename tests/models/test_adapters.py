"""A LoRA adapter is the model below it with the adapter's weights, or it is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from infalign.core.errors import ConfigError
from infalign.models.adapters import merge_adapter
from infalign.models.conversion import convert
from infalign.models.pretrained import load_policy
from infalign.rewards.classifier import ClassifierReward

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of converted models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))


def adapt(base: str, folder: Path, task: TaskType = TaskType.CAUSAL_LM, **settings: Any) -> Any:
    """Save an adapter with weights of its own, and return the model with the adapter."""
    kinds = {TaskType.CAUSAL_LM: AutoModelForCausalLM, TaskType.SEQ_CLS: AutoModelForSequenceClassification}
    model = kinds[task].from_pretrained(base, **({"num_labels": 1} if task is TaskType.SEQ_CLS else {}))
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj"]} | settings
    adapted = get_peft_model(model, LoraConfig(r=2, task_type=task, init_lora_weights=False, **settings)).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture
def adapter(model: str, tmp_path: Path) -> Path:
    """The folder of an adapter of the model."""
    adapt(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_policy_is_its_base_with_the_adapter(model: str, tmp_path: Path) -> None:
    """The same logits; the tokenizer is the base's, as the adapter has none."""
    adapted = adapt(model, tmp_path / "adapter")
    merged, tokenizer = load_policy(convert(str(tmp_path / "adapter")))
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft: that the embedding is tied
@pytest.mark.parametrize("ends", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=" ".join)
@pytest.mark.parametrize("tied", [False, True], ids=["two adapters", "ensure_weight_tying"])
def test_tied_embeddings_are_adapted_each_for_itself(model: str, tmp_path: Path, ends: list[str], tied: bool) -> None:
    """The merged model has the adapted one's logits; peft merges both into the one weight."""
    adapted = adapt(model, tmp_path / "adapter", target_modules=ends, ensure_weight_tying=tied)
    assert adapted.config.tie_word_embeddings
    merged, _ = load_policy(convert(str(tmp_path / "adapter")))
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft: that it saves the embedding, which is tied
@pytest.mark.parametrize("kept", [None, ["embed_tokens", "lm_head"]], ids=["saved by peft", "modules_to_save"])
def test_tokens_that_an_adapter_adds_are_there(model: str, tmp_path: Path, kept: list[str] | None) -> None:
    """The base is resized to the adapter's tokenizer, as peft's own loader does."""
    larger, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<think>", "</think>"])
    larger.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=kept, init_lora_weights=False)
    adapted = get_peft_model(larger, config).eval()
    for folder in (adapted, tokenizer):
        folder.save_pretrained(tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == model
    merged, found = load_policy(convert(str(tmp_path / "adapter")))
    assert found.get_vocab() == tokenizer.get_vocab()
    tokens = torch.arange(len(tokenizer) - 40, len(tokenizer))[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)


def test_a_reward_is_its_base_with_the_adapter_and_the_adapters_head(model: str, tmp_path: Path) -> None:
    """The same outputs as of the adapted classifier."""
    adapted = adapt(model, tmp_path / "adapter", TaskType.SEQ_CLS)
    found = ClassifierReward.load(tmp_path / "adapter")
    texts = ["Fine.", "Where is it?"]
    expected = ClassifierReward(adapted.merge_and_unload(), AutoTokenizer.from_pretrained(model))([HELLO] * 2, texts)
    assert found([HELLO] * 2, texts) == pytest.approx(expected, abs=1e-5)


def test_a_head_that_nobody_trained_is_named(model: str, tmp_path: Path) -> None:
    """Neither base nor adapter has one: it would be random."""
    adapt(model, tmp_path / "adapter", TaskType.SEQ_CLS)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: w for name, w in load_file(file).items() if "score" not in name}, file)
    with pytest.raises(ConfigError, match=r"LoRA adapter .* it lacks weights .*score\.weight"):
        convert(str(tmp_path / "adapter"))


@pytest.mark.parametrize(("change", "named"), [("layers.0", r"layers\.0\..*lora_A"), ("q_proj", "q_proj")])
def test_weights_in_only_one_of_adapter_and_model_are_named(adapter: Path, change: str, named: str) -> None:
    """Weights under other names, as another model's have, are left over and missing."""
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace(change, "other"): w for name, w in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=rf"cannot merge .*: only one of them has .*{named}"):
        convert(str(adapter))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "is an adapter of type .* merge it into its base"),
        ({"base_model_name_or_path": None}, "is an adapter of type .* merge it into its base"),
        ({"base_model_name_or_path": "/no/where"}, "_config.json: base_model_name_or_path is /no/where, .* set it"),
        ({"base_model_name_or_path": "a/model", "revision": "v2"}, "is a/model, revision v2, .* set it"),
    ],
)
def test_another_kind_and_a_base_that_is_absent_are_refused(adapter: Path, changes: dict[str, Any], said: str) -> None:
    """With the adapter and what to do; a revision of the hub is not taken for the newest."""
    about = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(about | changes))
    with pytest.raises(ConfigError, match=said):
        convert(str(adapter))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft: that it cannot be merged
def test_an_adapter_that_cannot_be_merged_is_named(model: str, tmp_path: Path) -> None:
    """As one with biases of its own on layers without."""
    adapt(model, tmp_path / "adapter", lora_bias=True)
    with pytest.raises(ConfigError, match=r"cannot merge the LoRA adapter .*/adapter into .*lora_bias=True"):
        convert(str(tmp_path / "adapter"))


def test_where_a_whole_model_is_needed_an_adapter_is_called_one(adapter: Path) -> None:
    """As the trunk of a guide, which is not converted."""
    with pytest.raises(ConfigError, match="is a LoRA adapter, but a whole model is needed here"):
        load_policy(adapter)


@pytest.mark.parametrize("config", ["[]", '{"peft_type": "LORA", "r": "x"}'])
def test_what_is_no_adapter_is_named(config: str, model: str, tmp_path: Path) -> None:
    """Whatever peft raises of it."""
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="cannot merge"):
        merge_adapter(load_policy(model)[0], tmp_path)


def test_an_adapter_is_converted_anew_for_another_base(adapter: Path, model: str, tmp_path: Path) -> None:
    """The base is part of the content."""
    first = convert(str(adapter))
    base = Path(shutil.copytree(model, tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    save_file({name: w * 2 for name, w in weights.items()}, base / "model.safetensors", {"format": "pt"})
    about = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(base)}))
    assert convert(str(adapter)) != first
