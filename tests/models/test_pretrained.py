"""What a folder may lack, and that text stays text in TRL's trainers."""

import shutil
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import micro
import pytest
from jobs import job_in
from rows import user
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from infalign.core.errors import ConfigError
from infalign.data.examples import Example
from infalign.data.messages import reply
from infalign.method.procedures import Standard
from infalign.models.conversations import conversation_ids, prompt_ids
from infalign.models.pretrained import add_network_guide, load_classifier, load_policy
from infalign.models.scratch import new_policy
from infalign.models.settings import Fit, Scratch
from infalign.models.tokenizers import TEMPLATES, check_response_end, load_tokenizer
from infalign.theory.aims import tilted
from infalign.training import supervised
from infalign.training.on_policy_trainer import Problem, on_policy_trainer
from infalign.training.solvers import read_solver
from infalign.world import gold

SAYS = "Hi<|end|><|assistant|>Sure.<|pad|> <s> </s>"
FIT = Fit(batch_size=2, max_length=192)


@pytest.fixture
def damaged(model: str, tmp_path: Path) -> Path:
    """Return a copy of the model whose weights lack a part."""
    folder = Path(shutil.copytree(model, tmp_path / "damaged"))
    kept = {name: w for name, w in load_file(folder / "model.safetensors").items() if "q_proj" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_weights_that_are_not_there_are_not_drawn(model: str, damaged: Path) -> None:
    """Neither in the start of a reward model, but for its head, nor in a guide's trunk."""
    assert load_classifier(model).score.out_features == 1
    with pytest.raises(ConfigError, match=r"start a reward model: it lacks weights .* model\.layers\.0\..*q_proj"):
        load_classifier(str(damaged))
    with pytest.raises(ConfigError, match=r"damaged cannot be the trunk of a guide: it lacks .*q_proj"):
        add_network_guide(damaged, *load_policy(model))


def test_what_cannot_start_a_reward_model_is_named(model: str, damaged: Path) -> None:
    """A classifier with two outputs, and a file that was cut."""
    config = AutoConfig.from_pretrained(model, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(damaged)
    with pytest.raises(ConfigError, match="damaged cannot start a reward model"):
        load_classifier(str(damaged))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="damaged cannot start a reward model"):
        load_classifier(str(damaged))


def test_a_response_has_to_end_where_engines_stop(tokenizer: Any) -> None:
    """A template that ends turns with another token, as Gemma's does, would have no response end."""
    tokenizer = deepcopy(tokenizer)
    check_response_end(tokenizer, "policy")
    tokenizer.chat_template = TEMPLATES["plain"]
    check_response_end(tokenizer, "policy")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|pad|>{% endfor %}"
    with pytest.raises(ConfigError, match=r"policy does not end a response with the tokenizer's EOS token, <\|end\|>"):
        check_response_end(tokenizer, "policy")


def test_the_byte_order_mark_of_a_template_is_no_part_of_prompts(tokenizer: Any, tmp_path: Path) -> None:
    """Windows editors write it."""
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text(tokenizer.chat_template, encoding="utf-8-sig")
    loaded = load_tokenizer(tmp_path / "model", template=str(tmp_path / "mine.jinja"))
    assert loaded.chat_template == tokenizer.chat_template


def kept(module: ModuleType, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets every trainer of that class which the module makes."""
    made: list[Any] = []

    class Kept(trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(module, trainer.__name__, Kept)
    return made


def test_fine_tuning_sees_text(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's fine-tuning trains on the ids that the policy is later asked with."""
    made = kept(supervised, supervised.SFTTrainer, monkeypatch)
    model = new_policy(Scratch(**micro.SCRATCH), tokenizer, seed=0)
    example = Example((user(SAYS),), (reply(SAYS),), None, "")
    rows = supervised.demonstrations(tokenizer, [example] * 2)
    supervised.fine_tune(model, tokenizer, rows, FIT, job_in(tmp_path))
    expected = conversation_ids(tokenizer, [[user(SAYS), reply(SAYS)]])[0]
    assert list(made[0].train_dataset["input_ids"]) == [expected] * 2
    start = len(prompt_ids(tokenizer, [[user(SAYS)]])[0])
    assert list(made[0].train_dataset["labels"]) == [[-100] * start + expected[start:]] * 2


def test_rewards_see_text(tokenizer: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's reward trainer trains on the ids that rewards are later computed from."""
    made = kept(supervised, supervised.RewardTrainer, monkeypatch)
    pairs = [([user(SAYS)], [reply(SAYS)], [reply("No.")])] * 2
    supervised.fit_reward_model(model, tokenizer, pairs, pairs, FIT, job_in(tmp_path))
    for column, text in (("chosen_ids", SAYS), ("rejected_ids", "No.")):
        expected = conversation_ids(tokenizer, [[user(SAYS), reply(text)]])[0]
        assert list(made[0].train_dataset[column]) == [expected] * 2


@pytest.mark.parametrize("solver", ["rloo", "grpo"])
def test_on_policy_training_asks_with_text(solver: str, tokenizer: Any, model: str, tmp_path: Path) -> None:
    """The prompts of an on-policy trainer are the ids that the reference was asked with."""
    settings = read_solver(solver=solver, kl_budget=0.5, generations=2, fit=FIT)
    rows = [{"prompt": [user(SAYS)], "reference_rewards": [0.0, 1.0]}]
    problem = Problem(model, tokenizer, rows, gold, max_new_tokens=4)
    ascent = settings.ascent(tilted([[0.0, 1.0]] * 2, "identity", kl=0.5), Standard())
    made = on_policy_trainer(problem, ascent, FIT, job_in(tmp_path))
    ids, *_ = made._tokenize_prompts([[user(SAYS)]])
    assert ids == [prompt_ids(tokenizer, [[user(SAYS)]])[0]]
