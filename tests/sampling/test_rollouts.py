"""Rollouts follow the policy exactly, whatever engine draws them, and survive interruptions and bad servers."""

import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import retries
import torch
import transformers
from faults.server import RolloutServer, token_logprobs
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from infalign.core.errors import ConfigError, DataError, PartialError
from infalign.models.pretrained import load_policy
from infalign.sampling import rollouts
from infalign.sampling.engine import Engine, Prompt, Response, Sampling
from infalign.sampling.rollouts import draw, read_rollouts
from infalign.sampling.server import ServerEngine
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine

EOS = 3
PROMPT = [5, 1, 7, 2, 6]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def tiny(family: str = "Llama", vocab_size: int = 40, **settings: Any) -> Any:
    """Return a random causal language model with a far from uniform distribution."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(vocab_size=vocab_size, **SHAPE | settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def words(vocab_size: int = 40, eos: str | None = f"w{EOS}") -> Any:
    """Return a tokenizer whose token i is the word ``wi``."""
    vocabulary = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    vocabulary.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token=eos)


def shaped(logits: Any, sampling: Sampling) -> np.ndarray:
    """Return the distribution to sample from, by the definitions of temperature and nucleus."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights /= weights.sum()
    mass = 0.0
    kept = np.zeros_like(weights)
    for token in np.argsort(-weights):
        if mass < sampling.top_p:
            kept[token] = weights[token]
        mass += weights[token]
    return kept / kept.sum()


def exact(model: Any, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Return the probability of every response of at most two tokens."""

    @torch.no_grad()
    def after(ids: list[int]) -> np.ndarray:
        return shaped(model(torch.tensor([ids])).logits[0, -1].double().numpy(), sampling)

    first = after(PROMPT)
    pairs = {(a, b): first[a] * p for a in range(len(first)) if a != EOS for b, p in enumerate(after([*PROMPT, a]))}
    return {token_ids: p for token_ids, p in ({(EOS,): first[EOS]} | pairs).items() if p > 0}


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    """Return a tiny Llama and its tokenizer."""
    return tiny(), words()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Olmo2", "GPT2"])
def test_logprob_is_that_of_a_plain_forward_pass(family: str) -> None:
    """The shared prefix changes no log-probability, with grouped heads, biases and normed queries, after compaction.

    Nor do other prompts in the batch, longer and shorter ones, of which some end early.
    """
    model = tiny(family, **({"sliding_window": None} if family == "Mistral" else {}))
    engine = SharedPrefixEngine(model, words(), Sampling(80))
    longer, shorter = Prompt("longer", [*PROMPT, 7, 8, 9]), Prompt("shorter", [9])
    asked = [(Prompt("p", PROMPT), range(24)), (longer, range(2)), (shorter, [3, 8])]
    together = engine.sample_together(asked)
    assert len({len(response.token_ids) for response in together[0]}) > 5
    for (prompt, indices), responses in zip(asked, together, strict=True):
        alone = engine.sample(prompt.token_ids, prompt.prompt_id, indices)
        assert [response.token_ids for response in responses] == [response.token_ids for response in alone]
        for response in (*responses, *alone):
            expected = math.fsum(token_logprobs(model, prompt.token_ids, response.token_ids))
            assert response.logprob == pytest.approx(expected, abs=1e-6 * len(response.token_ids), rel=0)


@pytest.mark.parametrize("sampling", [Sampling(2), Sampling(2, temperature=0.6), Sampling(2, top_p=0.8)])
@pytest.mark.parametrize("engine", [SharedPrefixEngine, TransformersEngine])
def test_frequencies_are_the_probabilities(engine: Any, sampling: Sampling, tmp_path: Path) -> None:
    """All responses of two tokens come as often as the model says, whatever generation_config.json says."""
    tiny(vocab_size=8).save_pretrained(tmp_path)
    words(8).save_pretrained(tmp_path)
    greedy = {"do_sample": True, "top_k": 5, "temperature": 0.1, "repetition_penalty": 9.0, "suppress_tokens": [4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(greedy))
    model, tokenizer = load_policy(tmp_path)
    probabilities = exact(model, sampling)
    responses = engine(model, tokenizer, sampling).sample(PROMPT, "p", range(4000))
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
    """A response is a function of (seed, prompt_id, index), not of the engine."""
    fast = SharedPrefixEngine(*policy, Sampling(20)).sample(PROMPT, "p", range(30))
    slow = TransformersEngine(*policy, Sampling(20)).sample(PROMPT, "p", range(30))
    assert [r.token_ids for r in fast] == [r.token_ids for r in slow]
    assert [r.logprob for r in fast] == pytest.approx([r.logprob for r in slow], abs=1e-4)
    assert [(r.text, r.finish) for r in fast] == [(r.text, r.finish) for r in slow]


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
def test_a_response_ends_with_eos_or_at_the_limit(engine: Any, policy: tuple[Any, Any]) -> None:
    """Token ids hold the EOS that ended a response and the text does not; no EOS means finish "length"."""
    responses = engine(*policy, Sampling(30)).sample(PROMPT, "p", range(60))
    assert {response.finish for response in responses} == {"stop", "length"}
    for response in responses:
        assert EOS not in response.token_ids[:-1]
        assert (response.finish == "stop") == (response.token_ids[-1] == EOS)
        assert len(response.token_ids) == 30 or response.finish == "stop"
        assert response.text.split() == [f"w{i}" for i in response.token_ids if i != EOS]


def test_the_model_is_left_as_it_was(policy: tuple[Any, Any]) -> None:
    """The attention implementation and generation config come back, after an error in the middle too."""
    model = policy[0]
    engines: list[Engine] = [SharedPrefixEngine(*policy, Sampling(9)), TransformersEngine(*policy, Sampling(9))]
    before = model.config._attn_implementation, model.generation_config
    calls = itertools.count()

    def fail(*_: Any) -> None:
        if next(calls) == 4:
            raise MemoryError

    hook = model.register_forward_pre_hook(fail)
    try:
        for engine in engines:
            calls = itertools.count()
            with pytest.raises(MemoryError):
                engine.sample(PROMPT, "p", range(4))
            assert (model.config._attn_implementation, model.generation_config) == before
    finally:
        hook.remove()


def test_bfloat16_models_share_a_prefix() -> None:
    """Half precision passes the self-check and gives log-probabilities near the model's."""
    model = tiny().to(torch.bfloat16)
    for response in SharedPrefixEngine(model, words(), Sampling(10)).sample(PROMPT, "p", range(8)):
        expected = math.fsum(token_logprobs(model, PROMPT, response.token_ids))
        assert response.logprob == pytest.approx(expected, abs=0.1 * len(response.token_ids))


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
def test_impossible_requests_are_refused(engine: Any, policy: tuple[Any, Any]) -> None:
    """Empty, over-long and foreign prompts, a missing EOS and dropout are errors that name what to do."""
    model, tokenizer = policy
    sampler = engine(model, tokenizer, Sampling(100))
    for prompt, message in (([], "empty"), ([5] * 29, "context of 128"), ([40], "vocabulary of 40")):
        with pytest.raises(DataError, match=f"'p'.*{message}"):
            sampler.sample(prompt, "p", [0])
    sampler.sample([5] * 28, "p", [0])
    with pytest.raises(ConfigError, match="no EOS token"):
        engine(model, words(eos=None), Sampling(4))
    model.train()
    try:
        with pytest.raises(ConfigError, match=r"model\.eval"):
            sampler.sample(PROMPT, "p", [0])
    finally:
        model.eval()


def test_a_model_with_nan_weights_draws_nothing() -> None:
    """NaN logits are an error, not a token."""
    model = tiny()
    sampler = SharedPrefixEngine(model, words(), Sampling(4))
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(ConfigError, match="NaN"):
        sampler.sample(PROMPT, "p", range(3))
    with pytest.raises(ConfigError, match="NaN"):
        TransformersEngine(model, words(), Sampling(4)).sample(PROMPT, "p", range(3))


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": 0.0}, {"temperature": math.nan}, {"top_p": 1.5}]
)
def test_sampling_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    """No temperature, nucleus or length that defines no distribution is accepted."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**{"max_new_tokens": 4} | wrong)


# Loading


def test_a_saved_policy_loads(tmp_path: Path, policy: tuple[Any, Any]) -> None:
    """The loaded model is the saved one, in evaluation mode, and pads with EOS."""
    for part in policy:
        part.save_pretrained(tmp_path)
    model, tokenizer = load_policy(tmp_path)
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.pad_token_id == EOS
    assert token_logprobs(model, PROMPT, [4, EOS]) == token_logprobs(policy[0], PROMPT, [4, EOS])
    assert load_policy(tmp_path, dtype="bfloat16")[0].dtype == torch.bfloat16


def test_folders_without_a_policy_are_refused(tmp_path: Path) -> None:
    """Each unusable folder gives one sentence: no folder, a classifier, no head, no weights, torn weights, no EOS."""
    config = tiny().config
    with pytest.raises(ConfigError, match="missing is not a model"):
        load_policy(tmp_path / "missing")
    words().save_pretrained(tmp_path)
    for kind in ("LlamaForSequenceClassification", "LlamaModel"):
        getattr(transformers, kind)(config).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=f"{kind}, not a causal language model"):
            load_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"lacks weights .* lm_head.weight"):
        load_policy(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(tmp_path)
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(tmp_path)
    words(eos=None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no EOS token"):
        load_policy(tmp_path)


# Storage


class Interrupted:
    """An engine that stops after ``limit`` batches."""

    def __init__(self, engine: SharedPrefixEngine, limit: int) -> None:
        self.engine, self.left = engine, limit

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        (found,) = self.sample_together([(Prompt(prompt_id, prompt_ids), indices)])
        return found

    def sample_together(self, asked: Sequence[tuple[Prompt, Sequence[int]]]) -> list[list[Response]]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.engine.sample_together(asked)


PROMPTS = [Prompt(f"p{i}", [5, i + 4]) for i in range(7)]
IDS = [prompt.prompt_id for prompt in PROMPTS]


def silent(done: int, total: int) -> None:
    """Report no progress."""


@pytest.mark.parametrize(("batch", "limits"), [(6, (1, 3, 2)), (12, (1, 2))], ids=["a prompt", "two prompts"])
def test_an_interrupted_draw_continues_and_ends_identical(
    tmp_path: Path, policy: tuple[Any, Any], batch: int, limits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch a run stops at, those before it are kept, and running again ends as one run, but for shards."""
    monkeypatch.setattr(rollouts, "RESPONSES_PER_BATCH", batch)
    engine = SharedPrefixEngine(*policy, Sampling(12))
    draw(engine, PROMPTS, 6, tmp_path / "whole", shard_prompts=4, on_progress=silent)
    stopped = tmp_path / "stopped"
    for limit in limits:
        with pytest.raises(KeyboardInterrupt):
            draw(Interrupted(engine, limit), PROMPTS, 6, stopped, shard_prompts=4, on_progress=silent)
    (stopped / ".part-00001.parquet.tmp").write_bytes(b"torn")
    (stopped / "part-x.parquet").write_bytes(b"torn")
    seen: list[tuple[int, int]] = []
    draw(engine, PROMPTS, 6, stopped, shard_prompts=4, on_progress=lambda *progress: seen.append(progress))
    assert seen == [(36, 42), (42, 42)]
    assert read_rollouts(stopped, IDS, 6).equals(read_rollouts(tmp_path / "whole", IDS, 6))


def test_k_grows_without_redrawing(tmp_path: Path, policy: tuple[Any, Any]) -> None:
    """Asking for 6 where 4 are stored draws two more a prompt, and a smaller K still reads the first ones."""
    engine = SharedPrefixEngine(*policy, Sampling(12))
    draw(engine, PROMPTS, 4, tmp_path, on_progress=silent)
    four = read_rollouts(tmp_path, IDS, 4)
    draw(engine, PROMPTS, 6, tmp_path, on_progress=silent)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["part-00000.parquet", "part-00001.parquet"]
    assert read_rollouts(tmp_path, IDS, 4).equals(four)
    six = read_rollouts(tmp_path, IDS[::-1], 6)
    assert six["prompt_id"].to_pylist() == [prompt_id for prompt_id in IDS[::-1] for _ in range(6)]
    assert six["index"].to_pylist() == list(range(6)) * 7
    assert six.schema.field("token_ids").type == pa.list_(pa.int32())
    expected = engine.sample(PROMPTS[6].token_ids, "p6", range(6))
    assert six["token_ids"].to_pylist()[:6] == [list(response.token_ids) for response in expected]


def test_missing_and_doubled_rollouts_are_named(tmp_path: Path, policy: tuple[Any, Any]) -> None:
    """Reading what is not there, or there twice, and drawing for two prompts of one id are errors."""
    engine = SharedPrefixEngine(*policy, Sampling(4))
    with pytest.raises(DataError, match=r"2 of 2 rollouts, the first number 0 of prompt 'p0', are missing"):
        read_rollouts(tmp_path, ["p0"], 2)
    draw(engine, PROMPTS[:2], 3, tmp_path, on_progress=silent)
    with pytest.raises(DataError, match=r"2 of 8 rollouts, the first number 3 of prompt 'p0', are missing"):
        read_rollouts(tmp_path, ["p0", "p1"], 4)
    (tmp_path / "part-00001.parquet").write_bytes((tmp_path / "part-00000.parquet").read_bytes())
    with pytest.raises(DataError, match=r"number 0 of prompt 'p1', are duplicated"):
        read_rollouts(tmp_path, ["p1"], 3)
    with pytest.raises(DataError, match="'p0'; keep one"):
        draw(engine, [PROMPTS[0], PROMPTS[0]], 3, tmp_path, on_progress=silent)


# Servers


@pytest.fixture
def server(policy: tuple[Any, Any]) -> Iterator[RolloutServer]:
    """Return a running server; requests are repeated at once and at most twice."""
    with retries.attempts(3), RolloutServer(*policy) as running:
        yield running


def served(server: RolloutServer, *, in_flight: int = 32, **settings: Any) -> ServerEngine:
    """Return the engine of a test server."""
    sampling = Sampling(**{"max_new_tokens": 12} | settings)
    return ServerEngine(server.url, "tiny", server.tokenizer, sampling, in_flight=in_flight)


def test_a_server_draws_from_the_policy(server: RolloutServer) -> None:
    """Token ids, texts and log-probabilities arrive, and every sampler field is sent."""
    responses = served(server).sample(PROMPT, "p", range(10))
    assert len({response.token_ids for response in responses}) > 5
    for response in responses:
        assert response.logprob == pytest.approx(math.fsum(token_logprobs(server.model, PROMPT, response.token_ids)))
        assert response.text.split() == [f"w{i}" for i in response.token_ids if i != EOS]
        assert (response.finish == "stop") == (response.token_ids[-1] == EOS)
    sent = {
        "n": 10,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "ignore_eos": True,
        "stop_token_ids": [EOS],
        "seed": server.bodies[0]["seed"],
    }
    assert server.bodies == [{"model": "tiny", "prompt": PROMPT, "logprobs": 1, "return_token_ids": True} | sent]


def test_each_request_has_its_own_seed(server: RolloutServer) -> None:
    """It follows from the seed, the prompt's id and the first index: asked again it is the same, else another."""
    for seed, prompt_id, first in ((0, "p", 0), (0, "p", 0), (1, "p", 0), (0, "q", 0), (0, "p", 1)):
        served(server, seed=seed).sample(PROMPT, prompt_id, range(first, 2))
    again, *others = (body["seed"] for body in server.bodies)
    assert others[0] == again
    assert len({again, *others}) == 4
    assert all(type(seed) is int and 0 <= seed < 2**53 for seed in others)


MANY = [Prompt(f"p{i}", [5, i % 36 + 4, i // 36 + 4]) for i in range(40)]


def test_requests_are_under_way_together_and_bounded(server: RolloutServer, tmp_path: Path) -> None:
    """As many requests meet at the server as are allowed, at least 16 by default, never more; rows are in order."""
    draw(served(server, in_flight=1), MANY, 3, tmp_path / "one", on_progress=silent)
    assert server.most_at_once == 1
    server.meeting = threading.Barrier(8)
    draw(served(server, in_flight=8), MANY, 3, tmp_path / "eight", on_progress=silent)
    assert server.most_at_once == 8
    shards = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "eight")]
    assert len(shards[0]) == 3
    assert shards[0] == shards[1]
    server.meeting = threading.Barrier(16)
    draw(served(server), MANY[:32], 1, tmp_path / "default", on_progress=silent)
    assert 16 <= server.most_at_once <= 32


def test_nothing_runs_far_ahead_of_a_slow_answer(server: RolloutServer, tmp_path: Path) -> None:
    """While the first prompt is not answered, at most four times as many as are in flight begin."""
    release, answer = threading.Event(), server.answer

    def first_last(body: dict[str, Any], fault: str | None = None) -> dict[str, Any]:
        if body["prompt"] == MANY[0].token_ids:
            release.wait(30)
        return answer(body, fault)

    server.answer = first_last  # type: ignore[method-assign]
    engine, seen = served(server, in_flight=2), list[tuple[int, int]]()

    def progress(done: int, total: int) -> None:
        seen.append((done, len(server.bodies)))
        if done == 7:
            release.set()

    draw(engine, MANY, 1, tmp_path, on_progress=progress)
    assert max(begun for done, begun in seen if done <= 7) == 8
    ids = [prompt.prompt_id for prompt in MANY]
    drawn = pa.concat_tables(pq.read_table(path) for path in sorted(tmp_path.iterdir()))
    assert drawn["prompt_id"].to_pylist() == ids


def test_a_request_that_hangs_holds_up_no_other(server: RolloutServer, tmp_path: Path) -> None:
    """One in four requests is never answered: each attempt at it is cut off and repeated, and the others go on."""
    server.script = ["hang", None, None, None] * 3
    sampling = Sampling(12)
    engine = ServerEngine(server.url, "tiny", server.tokenizer, sampling, in_flight=4, read_seconds=2.0)
    seen = list[int]()
    draw(engine, MANY[:12], 2, tmp_path / "hung", on_progress=lambda done, total: seen.append(done))
    assert len(server.under_way) == 3  # they hang for ten seconds
    assert seen == list(range(0, 26, 2))
    server.script = []
    draw(served(server), MANY[:12], 2, tmp_path / "well", on_progress=silent)
    ids = [prompt.prompt_id for prompt in MANY[:12]]
    assert read_rollouts(tmp_path / "hung", ids, 2).equals(read_rollouts(tmp_path / "well", ids, 2))


def test_several_servers_share_the_requests_and_one_may_be_down(
    server: RolloutServer, policy: tuple[Any, Any], tmp_path: Path
) -> None:
    """They take turns, each is checked, and what one does not answer another does; the responses are the same."""
    with RolloutServer(*policy) as other:
        both = ServerEngine([server.url, other.url], "tiny", server.tokenizer, Sampling(12))
        draw(both, MANY, 2, tmp_path / "both", on_progress=silent)
        assert len(server.bodies) == len(other.bodies) == 20
        other.truncate_to = 0.3
        with pytest.raises(ConfigError, match=rf"{other.url}.*truncates"):
            both.check(PROMPT)
    server.bodies.clear()
    draw(both, MANY, 2, tmp_path / "one", on_progress=silent)
    assert len(server.bodies) == 40
    ids = [prompt.prompt_id for prompt in MANY]
    assert read_rollouts(tmp_path / "both", ids, 2).equals(read_rollouts(tmp_path / "one", ids, 2))


def test_an_interrupted_draw_does_not_wait_and_draws_nothing_twice(server: RolloutServer, tmp_path: Path) -> None:
    """Ctrl-C keeps what has come and ends at once though a server hangs; only the missing prompts are asked again."""
    draw(served(server), MANY, 3, tmp_path / "whole", on_progress=silent)
    server.script = [None] * 5 + ["hang"] * 35

    def interrupt(done: int, total: int) -> None:
        if done == 15:
            raise KeyboardInterrupt

    stopped, ids = tmp_path / "stopped", [prompt.prompt_id for prompt in MANY]
    with pytest.raises(KeyboardInterrupt):
        draw(served(server, in_flight=4), MANY, 3, stopped, on_progress=interrupt)
    assert server.under_way  # it hangs for ten seconds
    kept = {row["prompt_id"] for path in stopped.iterdir() for row in pq.read_table(path).to_pylist()}
    assert len(kept) == 5
    server.script = []
    server.bodies.clear()
    draw(served(server, in_flight=4), MANY, 3, stopped, on_progress=silent)
    asked = [tuple(body["prompt"]) for body in server.bodies]
    assert sorted(asked) == sorted(tuple(prompt.token_ids) for prompt in MANY if prompt.prompt_id not in kept)
    assert read_rollouts(stopped, ids, 3).equals(read_rollouts(tmp_path / "whole", ids, 3))


def test_logprob_is_nan_where_the_server_gives_none(server: RolloutServer) -> None:
    """A model's log-probability is not passed off as that of a tempered distribution, nor is a missing one 0."""
    server.script = ["no logprobs"]
    assert all(math.isnan(response.logprob) for response in served(server).sample(PROMPT, "p", range(2)))
    assert all(math.isnan(r.logprob) for r in served(server, temperature=0.7).sample(PROMPT, "p", range(2)))


def test_passing_faults_are_repeated(server: RolloutServer) -> None:
    """A 500, a 429, a reset and a short answer still end with all responses, the missing ones asked for again."""
    server.script = [(500, {}), (429, {})]
    assert len(served(server).sample(PROMPT, "p", range(10))) == 10
    server.script = ["reset", "short"]
    server.bodies.clear()
    responses = served(server).sample(PROMPT, "p", range(10))
    assert len({response.token_ids for response in responses}) > 5
    assert [body["n"] for body in server.bodies] == [10, 10, 5]


ENDED = {"finish_reason": "stop", "token_ids": [4, EOS]}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((400, {"error": "prompt too long"}), "refused the request.*prompt too long"),
        ((200, {"result": 1}), "no OpenAI-compatible server"),
        ((200, {"choices": []}), "returned 0 responses where 8"),
        ("no ids", "no token ids.*return_token_ids"),
        ("equal", "8 equal responses.*generation-config vllm"),
        ('{"finish_reason": "stop", "token_ids": [4, 5]}', "after token 5, but .* EOS, 3"),
        ('{"finish_reason": "abort"}', "'abort'"),
        ('{"prompt_token_ids": [9]}', "another prompt"),
        ('{"finish_reason": "length", "token_ids": [4, 5]}', "cut a response off after 2 tokens where 12"),
        (
            '{"finish_reason": "length", "token_ids": [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]}',
            "after 13 tokens where 12",
        ),
        (
            '{"logprobs": {"token_logprobs": [-1.0]}, "token_ids": [4, 3], "finish_reason": "stop"}',
            "1 log-prob.* for 2",
        ),
        ((200, {"choices": None}), "no OpenAI-compatible server"),
        ((200, {"choices": [3]}), "no OpenAI-compatible server"),
        ((200, b"[" * 100_000), "no OpenAI-compatible server"),
        ('{"token_ids": ["4", "3"]}', "no OpenAI-compatible server"),
        ('{"token_ids": [-1, 3]}', "no OpenAI-compatible server"),
        ('{"logprobs": {"token_logprobs": [null, null]}}', "no OpenAI-compatible server"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_once(server: RolloutServer, fault: Any, message: str) -> None:
    """What no repetition can cure is an error after one request."""
    server.script = [fault]
    with pytest.raises(ConfigError, match=message):
        served(server).sample([5, 2], "p", range(8))
    assert len(server.bodies) == 1


def test_a_policy_that_is_sure_may_answer_the_same(server: RolloutServer) -> None:
    """Eight equal responses are no fault where the policy's own probability makes them likely."""
    sure = {"token_ids": [4, 5, 6, 7, EOS], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.01] * 5}}
    server.script = [json.dumps(sure)]
    assert {response.finish for response in served(server).sample(PROMPT, "p", range(8))} == {"stop"}


def test_a_server_that_stays_away_stops_the_run_resumably(
    server: RolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time for retries the error says that the same command continues; empty prompts are not even sent."""
    monkeypatch.setattr("infalign.core.http.backoff", retries.backoff)
    server.script = [(503, {})] * 50
    engine = ServerEngine(server.url, "tiny", server.tokenizer, Sampling(4), retry_seconds=0.3)
    with pytest.raises(PartialError, match="run the same command again"):
        engine.sample(PROMPT, "p", range(2))
    with pytest.raises(DataError, match="'p' is empty"):
        engine.sample([], "p", range(2))


def test_the_api_key_is_sent_and_never_shown(server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the environment, and a server that echoes it does not get it into our error."""
    monkeypatch.setenv("TINY_KEY", "secret")
    engine = ServerEngine(server.url + "/v1/", "tiny", server.tokenizer, Sampling(4), api_key_env="TINY_KEY")
    server.script = [(401, {"error": "bad key secret"})]
    with pytest.raises(ConfigError, match=r"bad key \*\*\*"):
        engine.sample(PROMPT, "p", range(2))
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret"]
    monkeypatch.delenv("TINY_KEY")
    with pytest.raises(ConfigError, match="TINY_KEY"):
        ServerEngine(server.url, "tiny", server.tokenizer, Sampling(4), api_key_env="TINY_KEY")


def test_the_probe_finds_truncation_only_where_it_is(server: RolloutServer) -> None:
    """A server that draws from a nucleus while asked for everything is found; an honest one passes."""
    served(server).check(PROMPT)
    server.truncate_to = 0.3
    with pytest.raises(ConfigError, match="truncates its distribution"):
        served(server).check(PROMPT)


def test_a_server_whose_truncation_cannot_be_seen_is_refused(server: RolloutServer) -> None:
    """Without log-probabilities nothing is known of what it never draws."""
    server.truncate_to = 0.3
    server.script = ["no logprobs"]
    with pytest.raises(ConfigError, match="returns no log-probabilities"):
        served(server).check(PROMPT)
