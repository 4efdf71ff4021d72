"""Rollouts follow the policy exactly, whatever engine draws them, and survive interruptions and bad servers."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.server import token_logprobs
from micro import silent
from scipy.stats import chisquare
from tiny_models import EOS, PROMPT, tiny, words
from transformers import GenerationConfig

from infalign.core.errors import ConfigError, DataError
from infalign.models.pretrained import load_policy
from infalign.sampling import rollouts
from infalign.sampling.engine import Draw, Engine, Prompt, Response, Sampling
from infalign.sampling.rollouts import draw, read_rollouts
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine
from infalign.training.common import save_model


def exact(model: Any) -> dict[tuple[int, ...], float]:
    """Return the probability of every response of at most two tokens."""

    @torch.no_grad()
    def after(ids: list[int]) -> np.ndarray:
        return model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).numpy()

    first = after(PROMPT)
    pairs = {(a, b): first[a] * p for a in range(len(first)) if a != EOS for b, p in enumerate(after([*PROMPT, a]))}
    return {(EOS,): first[EOS]} | pairs


SLOW_FAMILIES = [pytest.param(family, marks=pytest.mark.slow) for family in ("Qwen2", "Mistral", "Olmo2")]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma", "GPT2", *SLOW_FAMILIES])
def test_logprob_is_that_of_a_plain_forward_pass(family: str) -> None:
    """With grouped heads, biases and normed queries, after compaction, beside longer and shorter prompts."""
    model = tiny(family, **({"sliding_window": None} if family == "Mistral" else {}))
    engine = SharedPrefixEngine(model, words(), Sampling(80))
    longer, shorter = Prompt("p", [*PROMPT, 7, 8, 9]), Prompt("shorter", [9])  # with tools a conversation is longer
    asked = [(Prompt("p", PROMPT), range(24)), (longer, range(2)), (shorter, [3, 8])]
    together = iter(engine.sample_together([(prompt, index) for prompt, indices in asked for index in indices]))
    lengths = set()
    for prompt, indices in asked:
        for alone in engine.sample(prompt.token_ids, prompt.prompt_id, indices):
            response = next(together)
            assert response.token_ids == alone.token_ids
            lengths.add(len(response.token_ids))
            expected = math.fsum(token_logprobs(model, prompt.token_ids, response.token_ids))
            for found in (response, alone):
                assert found.logprob == pytest.approx(expected, abs=2e-6 * len(response.token_ids), rel=0)
    assert len(lengths) > 5


@pytest.mark.parametrize("engine", [SharedPrefixEngine, TransformersEngine])
def test_frequencies_are_the_probabilities(engine: Any, tmp_path: Path) -> None:
    """All responses of two tokens come as often as the model says, whatever generation_config.json says."""
    tiny(vocab_size=8).save_pretrained(tmp_path)
    words(8).save_pretrained(tmp_path)
    greedy = {"do_sample": True, "top_k": 5, "temperature": 0.1, "repetition_penalty": 9.0, "suppress_tokens": [4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(greedy))
    model, tokenizer = load_policy(tmp_path)
    probabilities = exact(model)
    responses = engine(model, tokenizer, Sampling(2)).sample(PROMPT, "p", range(4000))
    counts = Counter(response.token_ids for response in responses)
    assert set(counts) <= set(probabilities)
    common = [ids for ids, p in probabilities.items() if p * 4000 >= 5]
    rare = [ids for ids in probabilities if ids not in common]
    observed = [counts[ids] for ids in common] + [sum(counts[ids] for ids in rare)]
    expected = [4000 * probabilities[ids] for ids in common] + [4000 * sum(probabilities[ids] for ids in rare)]
    cells = len(common) + bool(rare)
    assert chisquare(observed[:cells], expected[:cells]).pvalue > 1e-3
    for response in responses[:50]:
        assert response.logprob == pytest.approx(math.log(probabilities[response.token_ids]), abs=1e-5)


def test_both_engines_draw_the_same_responses(policy: tuple[Any, Any]) -> None:
    """Token ids hold the EOS that ended a response and the text does not; no EOS means finish "length"."""
    fast = SharedPrefixEngine(*policy, Sampling(30)).sample(PROMPT, "p", range(60))
    slow = TransformersEngine(*policy, Sampling(30)).sample(PROMPT, "p", range(60))
    assert [(r.token_ids, r.text, r.finish) for r in fast] == [(r.token_ids, r.text, r.finish) for r in slow]
    greedy = [e(*policy, Sampling(5, greedy=True)) for e in (SharedPrefixEngine, TransformersEngine)]
    assert len({r.token_ids for engine in greedy for r in engine.sample(PROMPT, "p", [0, 1])}) == 1
    assert [r.logprob for r in fast] == pytest.approx([r.logprob for r in slow], abs=1e-4)
    assert {response.finish for response in fast} == {"stop", "length"}
    for response in fast:
        assert EOS not in response.token_ids[:-1]
        assert (response.finish == "stop") == (response.token_ids[-1] == EOS)
        assert len(response.token_ids) == 30 or response.finish == "stop"
        assert response.text.split() == [f"w{i}" for i in response.token_ids if i != EOS]


@pytest.mark.parametrize("engine", [SharedPrefixEngine, TransformersEngine])
def test_every_end_of_a_model_ends_a_response_and_padding_is_not_drawn(engine: Any, tmp_path: Path) -> None:
    """Ends are the tokenizer's EOS and those of the generation configuration, and are saved; padding has no share."""
    model, real = tiny(vocab_size=40), 24
    model.generation_config.eos_token_id = [7, 11]
    save_model(model, words(real), tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == sorted([EOS, 7, 11])
    model.generation_config.eos_token_id = [7, 11]
    responses = engine(model, words(real), Sampling(12)).sample(PROMPT, "p", range(200))
    assert {response.token_ids[-1] for response in responses if response.finish == "stop"} == {EOS, 7, 11}
    for response in responses:
        ended = response.finish == "stop"
        assert max(response.token_ids) < real
        assert not {EOS, 7, 11}.intersection(response.token_ids[:-1] if ended else response.token_ids)
        assert response.text.split() == [f"w{i}" for i in response.token_ids[: len(response.token_ids) - ended]]
    with torch.no_grad():
        first = model(torch.tensor([PROMPT])).logits[0, -1, :real].double().log_softmax(-1)
    alone = next(response for response in responses if len(response.token_ids) == 1)
    assert alone.logprob == pytest.approx(float(first[alone.token_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("engine", [SharedPrefixEngine, TransformersEngine])
def test_a_response_does_not_depend_on_its_batch(engine: Any, policy: tuple[Any, Any]) -> None:
    """K can grow: the first 8 of 16 are the 8, in any order of indices; other seeds and prompt ids draw others."""
    sampler = engine(*policy, Sampling(20))
    ids = [r.token_ids for r in sampler.sample(PROMPT, "p", range(16))]
    assert [r.token_ids for r in sampler.sample(PROMPT, "p", range(8))] == ids[:8]
    assert [r.token_ids for r in sampler.sample(PROMPT, "p", [11, 3])] == [ids[11], ids[3]]
    assert [r.token_ids for r in sampler.sample(PROMPT, "q", range(16))] != ids
    assert [r.token_ids for r in engine(*policy, Sampling(20, seed=1)).sample(PROMPT, "p", range(16))] != ids


@pytest.mark.parametrize("engine", [SharedPrefixEngine, TransformersEngine])
def test_the_model_is_left_as_it_was(engine: Any, policy: tuple[Any, Any]) -> None:
    """The attention implementation and generation config come back, after an error in the middle too."""
    model = policy[0]
    sampler, calls = engine(*policy, Sampling(9)), itertools.count()
    before = model.config._attn_implementation, model.generation_config

    def fail(*_: Any) -> None:
        if next(calls) == 4:
            raise MemoryError

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        sampler.sample(PROMPT, "p", range(4))
    hook.remove()
    assert (model.config._attn_implementation, model.generation_config) == before


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Mistral", {"sliding_window": 16}), ("Gemma2", {}), ("StableLm", {}), ("Falcon", {}), ("Mamba", {})],
)
def test_models_that_cannot_share_a_prefix_are_refused(family: str, settings: dict[str, Any]) -> None:
    """Windows, soft caps, private attention code and recurrence are found before anything is drawn."""
    model = tiny(family, **settings)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.kind: transformers"):
        SharedPrefixEngine(model, words(), Sampling(4))
    assert len(TransformersEngine(model, words(), Sampling(4)).sample(PROMPT, "p", range(3))) == 3


@pytest.mark.parametrize("engine", [SharedPrefixEngine, TransformersEngine])
def test_impossible_requests_are_refused(engine: Any) -> None:
    """Empty, over-long and foreign prompts, a missing EOS, dropout and NaN are errors that name what to do."""
    model = tiny()
    sampler = engine(model, words(), Sampling(100))
    for prompt, message in (([], "empty"), ([5] * 29, "context of 128"), ([40], "vocabulary of 40")):
        with pytest.raises(DataError, match=f"'p'.*{message}"):
            sampler.sample(prompt, "p", [0])
    sampler.sample([5] * 28, "p", [0])
    with pytest.raises(ConfigError, match="no EOS token"):
        engine(model, words(eos=None), Sampling(4))
    model.train()
    with pytest.raises(ConfigError, match=r"model\.eval"):
        sampler.sample(PROMPT, "p", [0])
    torch.nn.init.constant_(model.eval().lm_head.weight, math.nan)
    with pytest.raises(ConfigError, match="NaN"):
        sampler.sample(PROMPT, "p", range(3))


class Interrupted(Engine):
    """An engine that stops after ``limit`` batches."""

    def __init__(self, engine: SharedPrefixEngine, limit: int) -> None:
        self.engine, self.left = engine, limit

    def sample_together(self, draws: Sequence[tuple[Prompt, int]]) -> list[Response]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.engine.sample_together(draws)


PROMPTS = [Prompt(f"p{i}", [5, i + 4]) for i in range(7)]
IDS = [prompt.prompt_id for prompt in PROMPTS]


@pytest.mark.parametrize(("batch", "limits"), [(6, (1, 3, 2)), (12, (1, 2))], ids=["a prompt", "two prompts"])
def test_an_interrupted_draw_continues_and_ends_identical(
    tmp_path: Path, policy: tuple[Any, Any], batch: int, limits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch a run stops at, those before it are kept, and running again ends as one run, but for shards."""
    monkeypatch.setattr(rollouts, "RESPONSES_PER_BATCH", batch)
    monkeypatch.setattr(rollouts, "SHARD_PROMPTS", 4)
    engine = SharedPrefixEngine(*policy, Sampling(12))
    draw(engine, PROMPTS, 6, tmp_path / "whole", on_progress=silent)
    stopped = tmp_path / "stopped"
    for limit in limits:
        with pytest.raises(KeyboardInterrupt):
            draw(Interrupted(engine, limit), PROMPTS, 6, stopped, on_progress=silent)
    (stopped / ".part-00001.parquet.tmp").write_bytes(b"torn")
    (stopped / "part-x.parquet").write_bytes(b"torn")
    seen: list[tuple[int, int]] = []
    draw(engine, PROMPTS, 6, stopped, on_progress=lambda *progress: seen.append(progress[:2]))
    assert seen == [(36, 42), (42, 42)]
    assert read_rollouts(stopped, IDS, 6).equals(read_rollouts(tmp_path / "whole", IDS, 6))


def test_a_draw_that_is_stopped_has_the_batches_of_a_whole_one(tmp_path: Path, policy: tuple[Any, Any]) -> None:
    """Rounding depends on who is drawn beside whom, so a batch that is stopped is kept whole or not at all."""
    batches = list[list[Draw]]()

    class Seen(SharedPrefixEngine):
        def sample_together(self, draws: Sequence[Draw]) -> list[Response]:
            batches.append(list(draws))
            return super().sample_together(draws)

    def stop(done: int, total: int, said: str) -> None:
        if done:
            raise KeyboardInterrupt

    engine, prompts = Seen(*policy, Sampling(2)), [Prompt(f"p{i}", [5, i + 4]) for i in range(20)]
    draw(engine, prompts, 30, tmp_path / "whole", on_progress=silent)
    whole, batches = batches, list[list[Draw]]()
    with pytest.raises(KeyboardInterrupt):
        draw(engine, prompts, 30, tmp_path / "stopped", on_progress=stop)
    draw(engine, prompts, 30, tmp_path / "stopped", on_progress=silent)
    assert batches == whole
    assert [len(batch) for batch in whole] == [120] * 5


class Sizes(Engine):
    """An engine on some device, which notes how many responses it is asked for at once."""

    def __init__(self, device_type: str) -> None:
        self.device_type, self.sizes = device_type, Counter[int]()

    def sample_together(self, draws: Sequence[tuple[Prompt, int]]) -> list[Response]:
        self.sizes[len(draws)] += 1
        return [Response((1,), "", "length", -1.0) for _ in draws]


@pytest.mark.parametrize(
    ("device_type", "k", "sizes"), [("cpu", 32, {128: 8}), ("cuda", 32, {512: 2}), ("cuda", 100, {800: 4})]
)
def test_a_gpu_draws_eight_times_as_many(tmp_path: Path, device_type: str, k: int, sizes: dict[int, int]) -> None:
    """128 on a CPU, 1,024 on a GPU at most, of 1, 2, 4, 8 or all 16 prompts of a shard."""
    engine = Sizes(device_type)
    draw(engine, [Prompt(str(i), [5]) for i in range(32)], k, tmp_path, on_progress=silent)
    assert engine.sizes == sizes


def test_missing_and_doubled_rollouts_are_named(tmp_path: Path, policy: tuple[Any, Any]) -> None:
    """Reading what is not there, or there twice, is an error."""
    engine = SharedPrefixEngine(*policy, Sampling(4))
    with pytest.raises(DataError, match=r"2 of 2 rollouts \(first: number 0 of prompt 'p0'\) are missing"):
        read_rollouts(tmp_path, ["p0"], 2)
    draw(engine, PROMPTS[:2], 3, tmp_path, on_progress=silent)
    with pytest.raises(DataError, match=r"2 of 8 rollouts \(first: number 3 of prompt 'p0'\) are missing"):
        read_rollouts(tmp_path, ["p0", "p1"], 4)
    (tmp_path / "part-00001.parquet").write_bytes((tmp_path / "part-00000.parquet").read_bytes())
    with pytest.raises(DataError, match=r"number 0 of prompt 'p1'\) are duplicated"):
        read_rollouts(tmp_path, ["p1"], 3)
