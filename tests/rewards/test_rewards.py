"""Reward sources against a real classifier, TRL's own reward trainer, and rewards that are none."""

from collections import deque
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rows import assistant, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from infalign.core.errors import ConfigError, DataError, StoppedError
from infalign.data.messages import prompt_id
from infalign.method.calibration import calibrate
from infalign.method.reward import CalibratedReward
from infalign.models.packed import PackedBatch, can_pack
from infalign.rewards.base import Batch, score
from infalign.rewards.classifier import ClassifierReward, check_classifier
from infalign.rewards.scores import NamedReward, check_unchanged, score_to
from infalign.rewards.sources import function_reward

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = [
    [user("Hi")],
    [{"role": "system", "content": "Be short."}, user("Why is the sky blue? " * 3)],
    [user("2 + 2?"), assistant("4"), user("Sûr ?")],
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


SHAPE = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "initializer_range": 0.3, "num_labels": 1}


def tiny_config(**changes: object) -> LlamaConfig:
    """Return the configuration of a small Llama with dropout, so that only evaluation mode repeats its numbers."""
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaConfig(**(SHAPE | special | {"attention_dropout": 0.5, "max_position_embeddings": 256} | changes))


def bert(**changes: object) -> BertConfig:
    """Return the configuration of a small BERT."""
    return BertConfig(**(SHAPE | changes))


def tiny_classifier(**changes: object) -> LlamaForSequenceClassification:
    """Return a random classifier."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(tiny_config(**changes))


@pytest.fixture(scope="module")
def classifier() -> ClassifierReward:
    """Return the random classifier as a reward."""
    return ClassifierReward(tiny_classifier(), tiny_tokenizer())


def test_token_ids_are_those_of_trl(classifier, tmp_path):
    """Each conversation becomes exactly the ids that TRL's RewardTrainer trains on, for chosen and rejected alike."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    rejected = ["No.", "Rayleigh\n\nscattering", " "]
    pairs = Dataset.from_dict(
        {
            "prompt": PROMPTS,
            "chosen": [[assistant(response)] for response in RESPONSES],
            "rejected": [[assistant(response)] for response in rejected],
        }
    )
    settings = RewardConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    trainer = RewardTrainer(tiny_classifier(), settings, train_dataset=pairs, processing_class=tiny_tokenizer())
    assert classifier.tokenize(PROMPTS, RESPONSES) == list(trainer.train_dataset["chosen_ids"])
    assert classifier.tokenize(PROMPTS, rejected) == list(trainer.train_dataset["rejected_ids"])


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("pad_token_id", [0, None])
def test_the_reward_is_the_head_at_the_last_token(padding_side, pad_token_id):
    """In a batch of any size, padded on either side; where EOS pads, at the token before the EOS that ends a text."""
    pad_token = None if pad_token_id is None else "<pad>"
    tokenizer = tiny_tokenizer(padding_side=padding_side, pad_token=pad_token)
    reward = ClassifierReward(tiny_classifier(pad_token_id=pad_token_id), tokenizer)
    expected = []
    for text in reward.tokenize(PROMPTS, RESPONSES):
        assert text[-1] == tokenizer.eos_token_id
        ids = torch.tensor([text])
        with torch.no_grad():
            states = reward.model.model.eval()(ids).last_hidden_state
            plain = reward.model.eval()(input_ids=ids).logits
            by_hand = reward.model.score(states[:, -1 if pad_token else -2])
        assert plain.item() == pytest.approx(by_hand.item(), abs=1e-6)
        expected.append(plain.item())
    small = ClassifierReward(reward.model, tokenizer, batch_tokens=150)
    alone = [reward([prompt], [response])[0] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    for found in (reward(PROMPTS, RESPONSES), small(PROMPTS, RESPONSES), alone):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 0.01


def test_responses_to_a_prompt_share_its_computation(classifier):
    """A packed pass gives each the reward that it has alone, also where one begins with another or is the same."""
    assert can_pack(classifier.model, PackedBatch.scores)
    responses = ["Yes", "Yes, I am", "No", "Yes", ""]
    prompts = [prompt for prompt in PROMPTS for _ in responses]
    together = classifier(prompts, responses * len(PROMPTS))
    alone = [classifier([prompt], [text])[0] for prompt, text in zip(prompts, responses * len(PROMPTS), strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert together[0] == together[3]


@pytest.mark.parametrize(
    ("batch_tokens", "threads"), [(1, 1), (100, 1), (16384, 1), pytest.param(16384, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", [(LlamaForSequenceClassification, tiny_config), (BertForSequenceClassification, bert)])
def test_scored_again_in_any_batching_no_text_changes_its_rank(kind, batch_tokens, threads):
    """Rollouts keep their calibrated rewards, in other batches, in another order and on other threads."""
    torch.manual_seed(0)
    model, texts = kind[0](kind[1]()), [f"Answer {n % 13}." for n in range(16)]
    stored = np.array(ClassifierReward(model, tiny_tokenizer())([PROMPTS[1]] * 16, texts))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        reward = CalibratedReward(ClassifierReward(model, tiny_tokenizer(), batch_tokens=batch_tokens), "exp:10")
        again = [reward.scores([PROMPTS[1]] * 8, texts[i : i + 8], [np.sort(stored)] * 8) for i in (8, 0)]
    finally:
        torch.set_num_threads(before)
    assert [score.win_rate for half in again[::-1] for score in half] == calibrate(stored, np.sort(stored)).tolist()
    assert 0.0 < reward.reward.tolerance < 1e-4 * np.ptp(stored)


WIDE = partial(bert, hidden_size=128, initializer_range=0.08)  # its rewards round otherwise in a batch


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("kind", [(LlamaForSequenceClassification, tiny_config), (BertForSequenceClassification, WIDE)])
def test_one_text_first_and_no_text_scored_again_changes_its_rank(kind, size):
    """Rollouts of a run, then a reward loaded anew that scores one text first: alone or in others' company."""
    torch.manual_seed(0)
    model, rng = kind[0](kind[1]()), np.random.default_rng(0)
    assert can_pack(model, PackedBatch.scores) == (kind[0] is LlamaForSequenceClassification)
    words = ["rain", "falls on", "a", "red hill,", "slowly"]
    texts = [" ".join(rng.choice(words, rng.integers(1, 8))) for _ in range(24)]
    stored = np.sort(rewards := np.array(ClassifierReward(model, tiny_tokenizer())([PROMPTS[1]] * 24, texts)))
    reward = CalibratedReward(ClassifierReward(model, tiny_tokenizer()), "exp:10")
    reward.score(PROMPTS[0], "No.", stored)
    parts = [texts[i : i + size] for i in range(0, 24, size)]
    again = [one for part in parts for one in reward.scores([PROMPTS[1]] * size, part, [stored] * size)]
    assert [score.win_rate for score in again] == calibrate(rewards, stored).tolist()


def test_the_tolerance_grows_and_is_known_before_a_run_is_scored_again(classifier, tmp_path):
    """It covers a larger difference than it has seen, and rewards that a run stored otherwise."""
    reward = ClassifierReward(classifier.model, classifier.tokenizer)
    reward([PROMPTS[0]], ["No."])
    first = reward.tolerance
    reward.tolerate(first / 4)
    assert reward.tolerance == first > 0
    reward.tolerate(first)
    assert reward.tolerance == 8 * first
    named = NamedReward(ClassifierReward(classifier.model, classifier.tokenizer), "reward", "mine")
    score_to(tmp_path, named, Batch(PROMPTS, RESPONSES), on_progress=lambda *_: None)
    shard = tmp_path / "part-00000.parquet"
    table = pq.read_table(shard)
    moved = table.set_column(table.column_names.index("reward"), "reward", pa.array(np.array(table["reward"]) + 0.001))
    pq.write_table(moved, shard, write_page_checksum=True)
    check_unchanged(named, [shard])
    assert named.function.tolerance == pytest.approx(0.008, rel=1e-2)


def test_rows_that_are_too_long_name_their_prompt(classifier):
    """A row beyond the model's context is refused with its prompt's id and both lengths, never cut."""
    said = rf"prompt {prompt_id(PROMPTS[0])}: .* has 525 tokens, but .* accepts at most 256;"
    with pytest.raises(DataError, match=said):
        classifier(PROMPTS, [*["x" * 500], *RESPONSES[1:]])


def test_the_positions_of_a_roberta_begin_after_that_of_padding():
    """Of 65 positions 64 are for tokens: a row of 64 has a reward, and a longer one is refused by both lengths."""
    config = RobertaConfig(**(SHAPE | {"max_position_embeddings": 65, "pad_token_id": 0}))
    reward = ClassifierReward(RobertaForSequenceClassification(config), tiny_tokenizer())
    fits, long = "x" * 39, "x" * 40
    assert [len(ids) for ids in reward.tokenize(PROMPTS[:1] * 2, [fits, long])] == [64, 65]
    assert np.isfinite(reward(PROMPTS[:1], [fits])).all()
    with pytest.raises(DataError, match="has 65 tokens, but the reward model accepts at most 64;"):
        reward(PROMPTS[:1], [long])


def test_rewards_in_bfloat16_stay_apart():
    """The head computes in float32; in bfloat16 64 responses had a handful of rewards."""
    torch.manual_seed(0)
    model = tiny_classifier()
    model.score.weight.data.mul_(0.01).add_(0.1)  # rewards that are large beside their differences
    responses = [f"Answer number {n}." for n in range(64)]
    rewards = ClassifierReward(model.to(torch.bfloat16), tiny_tokenizer())([PROMPTS[0]] * 64, responses)
    assert len(set(rewards)) > 50


def test_only_a_folder_with_a_reward_model_is_loaded(classifier, tmp_path):
    """With its rewards, by the configuration alone where that says it, or when loaded: a random head never rewards."""
    folder = tmp_path / "reward"
    with pytest.raises(ConfigError, match="reward: the folder does not exist"):
        ClassifierReward.load(folder)
    tiny_classifier().save_pretrained(folder)
    with pytest.raises(ConfigError, match="reward"):
        ClassifierReward.load(folder)  # no tokenizer
    tiny_tokenizer().save_pretrained(folder)
    check_classifier(folder)
    loaded, half = ClassifierReward.load(folder), ClassifierReward.load(folder, dtype="bfloat16")
    loaded.model.train()  # a reward does not follow the caller's mode
    np.testing.assert_allclose(loaded(PROMPTS, RESPONSES), classifier(PROMPTS, RESPONSES), atol=1e-6)
    assert loaded([], []) == []
    assert half.model.dtype == torch.bfloat16
    np.testing.assert_allclose(half(PROMPTS, RESPONSES), classifier(PROMPTS, RESPONSES), atol=0.2)
    tiny_classifier(num_labels=2).save_pretrained(folder)
    with pytest.raises(ConfigError, match="reward has 2 outputs"):
        check_classifier(folder)
    with pytest.raises(ConfigError, match="has 2 outputs; a reward model must have one"):
        ClassifierReward.load(folder)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    with pytest.raises(ConfigError, match="reward is LlamaForCausalLM, not a sequence classifier; give it fit"):
        check_classifier(folder)
    with pytest.raises(ConfigError, match=r"not a trained classifier .* lacks weights .* score.weight"):
        ClassifierReward.load(folder)


def test_a_tokenizer_must_be_able_to_render_and_pad():
    """No chat template, or neither a padding nor an EOS token, is a ConfigError that names what is missing."""
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification has no chat template"):
        ClassifierReward(tiny_classifier(), tiny_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match=r"neither a padding nor an EOS token"):
        ClassifierReward(tiny_classifier(pad_token_id=None), tiny_tokenizer(pad_token=None, eos_token=None))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("my_rewards:best", "my_rewards has no function best"),
        ("my_rewards:worst", "my_rewards has no function worst"),
        ("my_penalties:length", "cannot import my_penalties .*PYTHONPATH"),
        *((spec, r"write it as package\.module:function") for spec in ("a", "a:", ":b", ".a:b", "a b:c", "")),
    ],
)
def test_functions_are_found_by_name(spec, said, tmp_path, monkeypatch):
    """``module:function`` imports the user's function, which scores like any other source; other names are refused."""
    source = "def length(prompts, responses):\n    return [len(r) for r in responses]\nbest = 3\n"
    (tmp_path / "my_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    reward = function_reward("my_rewards:length")
    assert score(reward, PROMPTS, RESPONSES, name="length").tolist() == [6, 0, 36]
    with pytest.raises(ConfigError, match=said):
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
