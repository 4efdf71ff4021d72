"""A frozen model with a head on the mean states of the response, alone, in packs, and from its folder."""

from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
import torch
from rows import user
from transformers import AutoConfig, AutoModel

from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import reply
from infalign.models.conversations import conversation_ids, prompt_ids
from infalign.models.packed import PackedBatch, can_pack, packing
from infalign.models.pooled import ANY_TOKEN, PooledForSequenceClassification, response_opening
from infalign.models.pretrained import load_without_head
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.classifier import ClassifierReward
from infalign.training.common import save_model
from infalign.training.frozen_head import fit_head, fit_weights, pooled_states, prompt_folds

SCRATCH = Scratch(vocabulary=300, hidden=16, layers=6, context=128)
LAYER = 4  # on which the preferences depend


@pytest.fixture(scope="module")
def base() -> Any:
    """A small language model and its tokenizer."""
    tokenizer = micro.tokenizer()
    return new_policy(SCRATCH, tokenizer, seed=0).eval(), tokenizer


def on(model: Any, layers: list[int], tokenizer: Any, seed: int = 0) -> PooledForSequenceClassification:
    """Return a random head on these layers of a model."""
    head = PooledForSequenceClassification.on(model, layers, response_opening(tokenizer))
    head.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return head


def small(kind: str, tokenizer: Any, **more: Any) -> Any:
    """Return a small model of some kind."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), num_hidden_layers=4, **shape, **more)
    return AutoModel.from_config(config).eval()


def state(model: Any, tokenizer: Any, prompt: str, response: str, layer: int) -> torch.Tensor:
    """Return the mean state of a response in a layer, from a plain pass over the whole model."""
    asked = prompt_ids(tokenizer, [[user(prompt)]])[0]
    turns = [user(prompt), reply(response)]
    ids = conversation_ids(tokenizer, [turns])[0]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return states[layer][0, len(asked) :].mean(0)


@pytest.mark.parametrize("kind", ["all tokens", "windows", "encoder"])
def test_the_output_is_the_head_on_the_mean_state(kind: str, base: Any, tmp_path: Path) -> None:
    """However many are scored together, packed or padded, and from the saved folder, whatever marks messages spell."""
    model, tokenizer = base
    if kind == "windows":
        model = small("mistral", tokenizer, sliding_window=4)
    elif kind == "encoder":
        folder = micro.encoder(tmp_path / "encoder")
        model, tokenizer = load_without_head(folder), load_tokenizer(folder)
    reader = on(model.base_model, [1, 3], tokenizer)
    assert reader.model.base.config.num_hidden_layers == min(4, model.config.num_hidden_layers)
    marks = "[SEP] assistant: <|assistant|>"
    texts = [(f"How {marks} now?", "Write."), ("How?", f"Write {marks} so."), ("The moon?", "I do not."), ("How?", "")]
    states = [torch.cat([state(model, tokenizer, *text, layer) for layer in (1, 3)]) for text in texts]
    pairs = [([user(prompt)], [reply(response)], [reply(response)]) for prompt, response in texts if response]
    found = pooled_states(reader, tokenizer, pairs, micro.silent)
    np.testing.assert_allclose(found, np.stack([np.stack([own, own]) for own in states[:3]]), rtol=1e-4, atol=1e-5)
    expected = [float(reader.score.weight[0] @ own) for own in states]
    prompts, responses = [[user(prompt)] for prompt, _ in texts], [response for _, response in texts]
    save_model(reader, tokenizer, tmp_path)
    for reward in (ClassifierReward(reader, tokenizer), ClassifierReward.load(tmp_path)):
        assert can_pack(reward.model, PackedBatch.scores) == (kind == "all tokens")
        together = reward(prompts, responses)
        alone = [reward([prompt], [response])[0] for prompt, response in zip(prompts, responses, strict=True)]
        reward.__dict__["_packs"] = False
        for found in (together, alone, reward(prompts, responses)):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_response_may_be_joined_with_its_opening() -> None:
    """A line break of the template and one of the response are one token: the mean begins after it, only there."""
    tokenizer = train_tokenizer(["Why?\n\n\nIt is so.\n\n\nAnd you?"] * 9, SCRATCH)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    model = new_policy(SCRATCH, tokenizer, seed=0).eval()
    opening = response_opening(tokenizer)
    assert opening == [tokenizer.convert_tokens_to_ids("<|assistant|>"), ANY_TOKEN]
    reader = on(model.base_model, [LAYER], tokenizer)
    reward, texts = ClassifierReward(reader, tokenizer), ["It is so.", "\n\nIt is so.", "And you?"]
    joined = reward.tokenize([[user("Why?")]], texts[1:2])[0]
    begins = joined.index(opening[0]) + 2
    assert tokenizer.decode(joined[begins - 1]) == "\n\n"
    with torch.no_grad():
        states = model(torch.tensor([joined]), output_hidden_states=True).hidden_states[LAYER][0]
    together = reward([[user("Why?")]] * 3, texts)
    assert together[1] == pytest.approx(float(reader.score.weight[0] @ states[begins:].mean(0)), rel=1e-4)
    np.testing.assert_allclose(together, [reward([[user("Why?")]], [text])[0] for text in texts], rtol=1e-4)
    reward.__dict__["_packs"] = False
    np.testing.assert_allclose(together, reward([[user("Why?")]] * 3, texts), rtol=1e-4)


def test_a_pair_longer_than_the_model_reads_is_an_error(tmp_path: Path) -> None:
    """With both lengths, and what to set."""
    folder = micro.encoder(tmp_path)
    model, tokenizer = load_without_head(folder), load_tokenizer(folder)
    pairs = [([user("How")], [reply("z " * 600)], [reply("a")])]
    with pytest.raises(DataError, match="the head's model accepts at most 512; set head"):
        fit_head(model, tokenizer, pairs, seed=0, on_progress=micro.silent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_saved_head_scores_as_before(base: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    """Also where a configuration lists a type for every layer, and in half precision, packed."""
    _, tokenizer = base
    model = small(kind, tokenizer).to(getattr(torch, dtype))
    reader = on(model, [2], tokenizer)
    save_model(reader, tokenizer, tmp_path)
    loaded = ClassifierReward.load(tmp_path, dtype=dtype)
    assert loaded.model.model.base.dtype == model.dtype
    assert can_pack(loaded.model, PackedBatch.scores)
    asked = [[user("How?")], [user("How?")]], ["Write.", "Write a function."]
    np.testing.assert_allclose(loaded(*asked), ClassifierReward(reader, tokenizer)(*asked), rtol=1e-6)


def test_prefixes_have_the_mean_so_far(base: Any) -> None:
    """The hidden state at a token is what the output would read if the response ended there."""
    model, tokenizer = base
    opening = response_opening(tokenizer)
    reader = PooledForSequenceClassification.on(model.base_model, [LAYER], opening).model
    ids = [5, 6, *opening, 7, 8, 9, 10]
    with torch.no_grad():
        whole = reader(torch.tensor([ids])).last_hidden_state[0]
        for end in range(len(opening) + 3, len(ids) + 1):
            part = reader(torch.tensor([ids[:end]])).last_hidden_state[0, -1]
            torch.testing.assert_close(whole[end - 1], part)
        with packing(reader):
            packed = PackedBatch.pack([ids[:-3]] * 2, [ids[-3:], ids[-3:-1]])  # some of the response in the prompt
            torch.testing.assert_close(packed.last_states(reader), whole[[-1, -2]])


def test_a_head_finds_the_layer_and_its_direction(base: Any) -> None:
    """Preferences that are linear in the mean state of one layer are learned from it, and hold for new responses."""
    model, tokenizer = base
    rng = np.random.default_rng(0)
    words = ["how", "do", "I", "write", "the", "moon", "a", "function", "explain", "please"]
    direction = torch.randn(SCRATCH.hidden, generator=torch.Generator().manual_seed(3))

    def pairs(count: int) -> list[Any]:
        found = []
        for _ in range(count):
            prompt, *texts = (" ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(3))
            worth = {text: float(direction @ state(model, tokenizer, prompt, text, LAYER)) for text in texts}
            better, worse = sorted(texts, key=lambda text: -worth[text])
            found.append(([user(prompt)], better, worse))
        return found

    seen: list[tuple[int, int]] = []
    reward_model, chosen = fit_head(
        *(model, tokenizer, [(prompt, [reply(c)], [reply(r)]) for prompt, c, r in pairs(300)]),
        seed=0,
        on_progress=lambda done, total, _: seen.append((done, total)),
    )
    assert LAYER in chosen.layers
    assert seen[-1] == (300, 300)
    assert np.mean(chosen.margins > 0) > 0.85
    reward, fresh = ClassifierReward(reward_model, tokenizer), pairs(100)
    prompts, better, worse = map(list, zip(*fresh, strict=True))
    assert np.mean(np.array(reward(prompts, better)) > np.array(reward(prompts, worse))) > 0.85


def test_the_penalized_minimum_has_no_gradient() -> None:
    """By the closed form of the gradient, for two penalties; a stronger one has smaller weights."""
    gaps = np.random.default_rng(0).normal(size=(50, 4)) + 0.3
    norms = []
    for penalty in (0.01, 1.0):
        w = fit_weights(gaps, penalty)
        gradient = -(gaps / (1 + np.exp(gaps @ w))[:, None]).mean(0) + penalty * w
        assert np.abs(gradient).max() < 1e-4
        norms.append(np.linalg.norm(w))
    assert norms[0] > norms[1]


def test_the_pairs_of_a_prompt_share_a_fold() -> None:
    """Otherwise validation would see prompts that it was fitted on."""
    prompts = ["a", "b", "c", "a", "d", "b", "e"]
    found = prompt_folds(prompts, seed=1)
    assert all(len({*found[np.array(prompts) == p]}) == 1 for p in prompts)


def test_a_response_must_begin_where_no_message_can_say_so(base: Any) -> None:
    """A template that opens it with plain text, or not at all, is refused."""
    _, tokenizer = base
    assert response_opening(tokenizer)
    for opening in ("Assistant: ", ""):
        template = "{% for m in messages %}{% if m.role == 'assistant' %}" + opening + "{% endif %}{{ m.content }}"
        template += "{% endfor %}{% if add_generation_prompt %}" + opening + "{% endif %}"
        other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
        other.chat_template = template
        with pytest.raises(ConfigError, match="does not open a response with a special token"):
            response_opening(other)
