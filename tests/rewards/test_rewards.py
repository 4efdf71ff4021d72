"""Reward sources against a real classifier, TRL's own reward trainer, and rewards that are none."""

import shutil
from collections import deque
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from infalign.core.errors import ConfigError, DataError, InfalignError, StoppedError
from infalign.data.examples import prompt_id
from infalign.models.packed import PackedBatch, can_pack
from infalign.rewards.base import score
from infalign.rewards.classifier import ClassifierReward, check_classifier
from infalign.rewards.function import function_reward
from infalign.rewards.scores import NamedReward, score_to
from infalign.world import gold

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why is the sky blue? " * 3}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sûr ?"},
    ],
]
RESPONSES = ["Hello!", "", "Yes, I am quite sure about that one."]


def tiny_tokenizer(**changes: object) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a chat template, padding on the left unless told otherwise."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<eos>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": TEMPLATE, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(settings | changes))


def tiny_config(**changes: object) -> LlamaConfig:
    """Return the configuration of a small Llama with dropout, so that only evaluation mode repeats its numbers."""
    settings = {
        "vocab_size": 258,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.3,
        "attention_dropout": 0.5,
        "max_position_embeddings": 256,
        "num_labels": 1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return LlamaConfig(**(settings | changes))


def tiny_classifier(**changes: object) -> LlamaForSequenceClassification:
    """Return a random classifier."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(tiny_config(**changes))


@pytest.fixture(scope="module")
def classifier() -> ClassifierReward:
    """Return the random classifier as a reward."""
    return ClassifierReward(tiny_classifier(), tiny_tokenizer())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder with the random classifier and its tokenizer."""
    tiny_classifier().save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_token_ids_are_those_of_trl(classifier, tmp_path):
    """Each conversation becomes exactly the ids that TRL's RewardTrainer trains on, for chosen and rejected alike."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rejected = ["No.", "Rayleigh\n\nscattering", " "]
    pairs = Dataset.from_dict(
        {
            "prompt": PROMPTS,
            "chosen": [[{"role": "assistant", "content": response}] for response in RESPONSES],
            "rejected": [[{"role": "assistant", "content": response}] for response in rejected],
        }
    )
    settings = RewardConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    trainer = RewardTrainer(tiny_classifier(), settings, train_dataset=pairs, processing_class=tiny_tokenizer())
    assert classifier.tokenize(PROMPTS, RESPONSES) == list(trainer.train_dataset["chosen_ids"])
    assert classifier.tokenize(PROMPTS, rejected) == list(trainer.train_dataset["rejected_ids"])


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("pad_token_id", [0, None])
def test_a_reward_does_not_depend_on_its_batch(padding_side, pad_token_id):
    """One row at a time or all at once, padding on either side, padding token or EOS as padding: the same reward."""
    pad_token = None if pad_token_id is None else "<pad>"
    tokenizer = tiny_tokenizer(padding_side=padding_side, pad_token=pad_token)
    reward = ClassifierReward(tiny_classifier(pad_token_id=pad_token_id), tokenizer)
    together = reward(PROMPTS, RESPONSES)
    alone = [reward([prompt], [response])[0] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    small = ClassifierReward(reward.model, tokenizer, batch_tokens=150)(PROMPTS, RESPONSES)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(small, alone, atol=1e-5)
    assert np.ptp(alone) > 0.01


def test_a_reward_is_read_where_the_classifier_was_trained():
    """Where EOS pads, transformers reads the token before the EOS that ends a text, and so does a packed pass."""
    tokenizer = tiny_tokenizer(pad_token=None)
    reward = ClassifierReward(tiny_classifier(pad_token_id=None), tokenizer)
    texts = reward.tokenize(PROMPTS, RESPONSES)
    assert all(text[-1] == tokenizer.eos_token_id for text in texts)
    with torch.inference_mode():
        plain = [reward.model.eval()(input_ids=torch.tensor([text])).logits.item() for text in texts]
    np.testing.assert_allclose(reward(PROMPTS, RESPONSES), plain, atol=1e-5)
    np.testing.assert_allclose([reward([p], [r])[0] for p, r in zip(PROMPTS, RESPONSES, strict=True)], plain, atol=1e-5)


def test_responses_to_a_prompt_share_its_computation(classifier):
    """A packed pass gives each the reward that it has alone, also where one begins with another or is the same."""
    assert can_pack(classifier.model, PackedBatch.scores)
    responses = ["Yes", "Yes, I am", "No", "Yes", ""]
    prompts = [prompt for prompt in PROMPTS for _ in responses]
    together = classifier(prompts, responses * len(PROMPTS))
    alone = [classifier([prompt], [text])[0] for prompt, text in zip(prompts, responses * len(PROMPTS), strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert together[0] == together[3]
    padded = dict(classifier._padded([*map(tuple, classifier.tokenize(prompts, responses * len(PROMPTS)))]))
    rewards = [outputs[0] for outputs in padded.values()]
    np.testing.assert_allclose(sorted(rewards), sorted(set(together)), atol=1e-5)


def test_a_bidirectional_classifier_does_not_see_padding():
    """A BERT, whose tokens could attend to padding on the right, gives each row the reward that it has alone."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        num_labels=1,
    )
    reward = ClassifierReward(BertForSequenceClassification(config), tiny_tokenizer())
    assert not can_pack(reward.model, PackedBatch.scores)
    alone = [reward([prompt], [response])[0] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    np.testing.assert_allclose(reward(PROMPTS, RESPONSES), alone, atol=1e-5)


def test_the_reward_is_the_head_at_the_last_token(classifier):
    """The reward is the score head applied to the hidden state of the row's last token, by hand and without padding."""
    model = classifier.model
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor(classifier.tokenize([prompt], [response]))
        with torch.no_grad():
            expected = model.score(model.model.eval()(ids).last_hidden_state[0, -1]).item()
        assert classifier([prompt], [response])[0] == pytest.approx(expected, abs=1e-6)


def test_a_saved_classifier_gives_the_same_rewards(classifier, checkpoint):
    """Loading a folder restores the classifier: same rewards, in float32 whatever the caller's mode."""
    loaded = ClassifierReward.load(checkpoint)
    loaded.model.train()
    np.testing.assert_allclose(loaded(PROMPTS, RESPONSES), classifier(PROMPTS, RESPONSES), atol=1e-6)
    assert loaded([], []) == []


def test_bfloat16_rewards_are_close(classifier, checkpoint):
    """A classifier loaded in bfloat16 gives the rewards of float32 up to its rounding."""
    loaded = ClassifierReward.load(checkpoint, dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    np.testing.assert_allclose(loaded(PROMPTS, RESPONSES), classifier(PROMPTS, RESPONSES), atol=0.2)


def test_rows_that_are_too_long_name_their_prompt(classifier):
    """A row beyond the model's context is refused with its prompt's id and both lengths, never cut."""
    with pytest.raises(DataError, match=rf"prompt {prompt_id(PROMPTS[0])}: .* has 525 tokens and .* reads 256;"):
        classifier(PROMPTS, [*["x" * 500], *RESPONSES[1:]])


def two_outputs(folder: Path) -> None:
    """Make the head of a classifier one of two outputs."""
    tiny_classifier(num_labels=2).save_pretrained(folder)


def language_model(folder: Path) -> None:
    """Put a language model in the place of a classifier."""
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)


def without_tokenizer(folder: Path) -> None:
    """Remove the tokenizer."""
    for file in [*folder.glob("tokenizer*"), folder / "chat_template.jinja"]:
        file.unlink()


@pytest.mark.parametrize(
    ("change", "by_configuration", "by_loading"),
    [
        (two_outputs, "reward has 2 outputs", "has 2 outputs; a reward model has one"),
        (
            language_model,
            "reward holds LlamaForCausalLM, no sequence classifier; give it fit",
            "score.weight is not in",
        ),
        (without_tokenizer, None, "reward"),
        (shutil.rmtree, None, "reward: there is no such folder"),
    ],
)
def test_a_folder_that_holds_no_reward_model_is_refused(change, by_configuration, by_loading, checkpoint):
    """By its configuration alone where that says so, or when it is loaded: a random head would reward at random."""
    check_classifier(checkpoint)
    change(checkpoint)
    with pytest.raises(ConfigError, match=by_loading):
        ClassifierReward.load(checkpoint)
    if by_configuration:
        with pytest.raises(ConfigError, match=by_configuration):
            check_classifier(checkpoint)


def test_a_tokenizer_must_be_able_to_render_and_pad():
    """No chat template, or neither a padding nor an EOS token, is a ConfigError that names what is missing."""
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification has no chat template"):
        ClassifierReward(tiny_classifier(), tiny_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match=r"neither a padding nor an EOS token"):
        ClassifierReward(tiny_classifier(pad_token_id=None), tiny_tokenizer(pad_token=None, eos_token=None))


def test_functions_are_found_by_name(tmp_path, monkeypatch):
    """``module:function`` imports the user's function, which scores like any other source."""
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompts, responses):\n    return [len(r) for r in responses]\nbest = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = function_reward("my_rewards:length")
    assert score(reward, PROMPTS, RESPONSES, name="length").tolist() == [6, 0, 36]
    with pytest.raises(ConfigError, match=r"my_rewards has no function best"):
        function_reward("my_rewards:best")
    with pytest.raises(ConfigError, match=r"my_rewards has no function worst"):
        function_reward("my_rewards:worst")
    with pytest.raises(ConfigError, match=r"cannot import my_penalties .*PYTHONPATH"):
        function_reward("my_penalties:length")


@pytest.mark.parametrize("spec", ["my_rewards", "my_rewards:", ":length", ".my_rewards:length", "a b:c", ""])
def test_badly_written_names_say_how_to_write_them(spec):
    """A name without module, colon or function is refused with the spelling that works."""
    with pytest.raises(ConfigError, match=r"write it as package\.module:function"):
        function_reward(spec)


def test_scores_come_in_row_order_however_many_they_are():
    """Rewards are float64 in the order of the rows, which are requested 4,096 at a time."""
    responses = ["x" * n for n in np.random.default_rng(0).integers(99, size=10_000)]
    calls: list[int] = []

    def length(prompts, responses):
        calls.append(len(prompts))
        return np.array([len(response) for response in responses], np.float32) / 4

    rewards = score(length, PROMPTS[:1] * 10_000, responses, name="length")
    assert rewards.dtype == np.float64
    assert rewards.tolist() == [len(response) / 4 for response in responses]
    assert calls == [4096, 4096, 1808]


def test_a_reward_that_raises_is_told_with_its_rows_and_its_line():
    """What a function raises is our error: which rows it was asked for, what it raised and where; ours pass as is."""

    def broken(prompts, responses):
        return [1 / len(response) for response in responses]

    rows = rf"rows 0 to 2 \(first prompt {prompt_id(PROMPTS[0])}\)"
    what = r"ZeroDivisionError in test_rewards.py, line \d+: division by zero"
    with pytest.raises(InfalignError, match=rf"reward mine, asked for {rows}, raised {what}"):
        score(broken, PROMPTS, RESPONSES, name="mine")
    with pytest.raises(DataError, match="has no user turn"):
        score(gold, [[]], ["Hello!"], name="mine")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, StoppedError])
def test_a_signal_ends_a_reward_function(stop):
    """Ctrl-C and SIGTERM end the process also while it computes rewards."""

    def interrupted(prompts, responses):
        raise stop

    with pytest.raises(stop):
        score(interrupted, PROMPTS, RESPONSES, name="mine")


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, pd.Series, pa.array, deque])
def test_sequences_and_arrays_are_rewards(kind):
    """Also a torch tensor that still has its graph, and whole numbers up to 2^53."""
    assert score(lambda *_: kind([1.5, 2.0**53]), PROMPTS[:2], RESPONSES[:2], name="mine").tolist() == [1.5, 2.0**53]
    learning = torch.tensor([1.5, 2.5], requires_grad=True)
    assert score(lambda *_: learning, PROMPTS[:2], RESPONSES[:2], name="mine").tolist() == [1.5, 2.5]


def test_stopped_scoring_goes_on_bit_for_bit(classifier, tmp_path):
    """Killed at any shard, a classifier's stored scores end the same as those of one undisturbed run, ties included."""
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    responses = ["a", "b", "a", "a long one " * 3, *"cdce", "", "f", "g", ""]

    def keep(folder, reward):
        options = {"shard_responses": 1, "on_progress": lambda done, total: None}
        return score_to(tmp_path / folder, NamedReward(reward, "reward", "a"), prompts, responses, **options)

    whole = keep("whole", classifier)
    calls = iter(range(9))

    def dying(*rows):
        if next(calls) % 2:
            raise KeyboardInterrupt
        return classifier(*rows)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            keep("killed", dying)
    assert keep("killed", classifier).tolist() == whole.tolist()
    assert (whole[0], whole[4], whole[8]) == (whole[2], whole[6], whole[11])
    np.testing.assert_allclose(whole, score(classifier, prompts, responses, name="reward"), atol=1e-5)
