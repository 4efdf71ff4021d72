"""Rollouts from inference servers: what is asked, how many at once, and what no answer may do."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import retries
from faults.server import RolloutServer, token_logprobs
from micro import silent
from tiny_models import EOS, PROMPT, words

from infalign.core import http
from infalign.core.errors import ConfigError, DataError, PartialError
from infalign.sampling.engine import Prompt, Sampling, Vocabulary
from infalign.sampling.rollouts import draw, read_rollouts
from infalign.sampling.server import ServerEngine


@pytest.fixture
def server(policy: tuple[Any, Any]) -> Iterator[RolloutServer]:
    """Return a running server; requests are repeated at once and at most twice."""
    with retries.attempts(3), RolloutServer(*policy) as running:
        yield running


def served(server: RolloutServer, *, in_flight: int = 32, **settings: Any) -> ServerEngine:
    """Return the engine of a test server."""
    sampling = Sampling(**{"max_new_tokens": 12} | settings)
    return ServerEngine(server.url, "tiny", Vocabulary(server.tokenizer), sampling, in_flight=in_flight)


def test_a_server_draws_from_the_policy(server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids, texts and log-probabilities arrive; every sampler field is sent, the key and a seed of its own."""
    monkeypatch.setenv("TINY_KEY", "secret")
    vocabulary = Vocabulary(server.tokenizer)
    engine = ServerEngine(f"{server.url}/v1/", "tiny", vocabulary, Sampling(12), api_key_env="TINY_KEY")
    responses = engine.sample(PROMPT, "p", range(10))
    assert len({response.token_ids for response in responses}) > 5
    for response in responses:
        assert response.logprob == pytest.approx(math.fsum(token_logprobs(server.model, PROMPT, response.token_ids)))
        assert response.text.split() == [f"w{i}" for i in response.token_ids if i != EOS]
        assert (response.finish == "stop") == (response.token_ids[-1] == EOS)
    sent = {"model": "tiny", "prompt": PROMPT, "n": 10, "max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    sent |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    sent |= {"ignore_eos": True, "stop_token_ids": [EOS], "seed": server.bodies[0]["seed"]}
    assert server.bodies == [sent]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    server.bodies.clear()
    server.script = ["no logprobs"]
    assert math.isnan(served(server).sample(PROMPT, "p", [0])[0].logprob)
    for seed, prompt_id, first in ((0, "p", 0), (1, "p", 0), (0, "q", 0), (0, "p", 1)):
        served(server, seed=seed).sample(PROMPT, prompt_id, range(first, 2))
    again, *others = (body["seed"] for body in server.bodies)
    assert others[0] == again
    assert len({again, *others}) == 4
    with pytest.raises(DataError, match="'p' is empty"):
        engine.sample([], "p", range(2))


MANY = [Prompt(f"p{i}", [5, i % 36 + 4, i // 36 + 4]) for i in range(32)]


def test_requests_are_under_way_together_and_bounded(server: RolloutServer, tmp_path: Path) -> None:
    """As many requests meet at the server as are allowed, at least 16 by default, never more; rows are in order."""
    draw(served(server, in_flight=1), MANY, 2, tmp_path / "one", on_progress=silent)
    assert server.most_at_once == 1
    server.meeting = threading.Barrier(8)
    draw(served(server, in_flight=8), MANY, 2, tmp_path / "eight", on_progress=silent)
    assert server.most_at_once == 8
    shards = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "eight")]
    assert len(shards[0]) == 2
    assert shards[0] == shards[1]
    server.meeting = threading.Barrier(16)
    draw(served(server), MANY, 1, tmp_path / "default", on_progress=silent)
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

    def progress(done: int, total: int, said: str) -> None:
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
    engine = replace(served(server, in_flight=4), read_seconds=2.0)
    seen = list[int]()
    draw(engine, MANY[:12], 2, tmp_path / "hung", on_progress=lambda done, *_: seen.append(done))
    assert len(server.under_way) == 3  # they hang for ten seconds
    assert seen == list(range(0, 26, 2))
    server.script = []
    draw(served(server), MANY[:12], 2, tmp_path / "well", on_progress=silent)
    ids = [prompt.prompt_id for prompt in MANY[:12]]
    assert read_rollouts(tmp_path / "hung", ids, 2).equals(read_rollouts(tmp_path / "well", ids, 2))


def test_an_interrupted_draw_does_not_wait_and_draws_nothing_twice(server: RolloutServer, tmp_path: Path) -> None:
    """Ctrl-C keeps what has come and ends at once though a server hangs; only the missing prompts are asked again."""
    draw(served(server), MANY, 2, tmp_path / "whole", on_progress=silent)
    server.script = [None] * 5 + ["hang"] * 27

    def interrupt(done: int, total: int, said: str) -> None:
        if done == 10:
            raise KeyboardInterrupt

    stopped, ids = tmp_path / "stopped", [prompt.prompt_id for prompt in MANY]
    with pytest.raises(KeyboardInterrupt):
        draw(served(server, in_flight=4), MANY, 2, stopped, on_progress=interrupt)
    assert server.under_way  # it hangs for ten seconds
    kept = {row["prompt_id"] for path in stopped.iterdir() for row in pq.read_table(path).to_pylist()}
    assert len(kept) == 5
    server.script = []
    server.bodies.clear()
    draw(served(server, in_flight=4), MANY, 2, stopped, on_progress=silent)
    asked = [tuple(body["prompt"]) for body in server.bodies]
    assert sorted(asked) == sorted(tuple(prompt.token_ids) for prompt in MANY if prompt.prompt_id not in kept)
    assert read_rollouts(stopped, ids, 2).equals(read_rollouts(tmp_path / "whole", ids, 2))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((400, {"error": "prompt too long"}), "refused the request.*prompt too long"),
        ((200, {"result": 1}), "not an OpenAI-compatible server"),
        ((200, {"choices": []}), "returned 0 responses instead of 8"),
        ("no ids", "no token ids.*return_token_ids"),
        ("equal", "8 identical responses.*generation-config vllm"),
        ('{"finish_reason": "stop", "token_ids": [4, 5]}', "after token 5, but .* EOS, 3"),
        ('{"finish_reason": "abort"}', "'abort'"),
        ('{"prompt_token_ids": [9]}', "a different prompt"),
        ('{"finish_reason": "length", "token_ids": [4, 5]}', "cut a response off after 2 instead of 12 tokens"),
        (json.dumps({"finish_reason": "length", "token_ids": [4] * 13}), "after 13 instead of 12 tokens"),
        ('{"finish_reason": "stop", "token_ids": [4,3], "logprobs": {"token_logprobs": [-1.0]}}', "1 log-prob.* for 2"),
        ((200, b"[" * 100_000), "not an OpenAI-compatible server"),
        ('{"token_ids": ["4", "3"]}', "not an OpenAI-compatible server"),
        ('{"logprobs": {"token_logprobs": [null, null]}}', "not an OpenAI-compatible server"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_once(server: RolloutServer, fault: Any, message: str) -> None:
    """What no repetition can cure is an error after one request."""
    server.script = [fault]
    with pytest.raises(ConfigError, match=message):
        served(server).sample([5, 2], "p", range(8))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "other://proxy", "http://proxy:port"])
def test_no_proxy_is_asked_for_this_machine(server: RolloutServer, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    """One that cannot be used is named where it would be."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    engine = served(server)
    assert len(engine.sample([5, 2], "p", range(2))) == 2
    if proxy != "http://127.0.0.1:9":
        engine.server.url = "http://example.invalid/v1"
        with pytest.raises(ConfigError, match="the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used"):
            engine.sample([5, 2], "p", range(2))


@pytest.mark.parametrize(("no_proxy", "named"), [("", True), ("far.invalid", False)])
def test_an_error_names_the_proxy_that_was_asked(monkeypatch: pytest.MonkeyPatch, no_proxy: str, named: bool) -> None:
    """It may be the proxy that is down, not the server."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    engine = ServerEngine("http://far.invalid", "tiny", Vocabulary(words()), Sampling(2), retry_seconds=0.0)
    with pytest.raises(PartialError) as error:
        engine.sample([5, 2], "p", range(2))
    assert (", asked through the proxy of HTTP_PROXY, did not answer" in str(error.value)) == named


def test_what_a_server_said_before_it_died_is_in_the_error(server: RolloutServer) -> None:
    """The body of its 500 tells more than the connections that it resets afterwards; without seeds none is sent."""
    server.script = [(500, {"error": "EngineCore encountered an issue"}), "reset", "reset"]
    engine = ServerEngine(server.url, "tiny", Vocabulary(server.tokenizer), Sampling(4), seeded=False)
    said = r"first attempt failed with status 500: .*EngineCore.*, the last attempt failed with Re"
    with pytest.raises(PartialError, match=said):
        engine.sample(PROMPT, "p", range(2))
    assert "seed" not in server.bodies[0]


def test_a_full_server_is_waited_for(
    server: RolloutServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two slow requests at once, and a 503 for others: all are answered, with one warning."""

    class Full(list[Any]):
        def __bool__(self) -> bool:
            return True

        def pop(self, _: Any = -1) -> Any:
            return (503, {"error": "queue full"}) if len(server.under_way) > 2 else None

    def slowly(body: dict[str, Any], fault: str | None = None) -> dict[str, Any]:
        time.sleep(0.4)
        return answer(body, fault)

    monkeypatch.setattr(http, "backoff", lambda: repeat(0.05))
    server.script, answer = Full(), server.answer
    server.answer = slowly  # type: ignore[method-assign]
    engine = replace(served(server, in_flight=6), retry_seconds=0.3)
    assert len(list(engine.sample_each((prompt, range(1)) for prompt in MANY[:6]))) == 6
    assert sum("requests wait" in record.getMessage() for record in caplog.records) == 1
    server.script = [503] * 99
    with pytest.raises(PartialError, match=r"last attempt failed with status 503.*\. Lower in_flight"):
        engine.sample(PROMPT, "p", [0])


def test_a_policy_that_is_sure_may_answer_the_same(server: RolloutServer) -> None:
    """Eight equal responses are no fault where the policy's own probability makes them likely."""
    sure = {"token_ids": [4, 5, 6, 7, EOS], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.01] * 5}}
    server.script = [json.dumps(sure)]
    assert {response.finish for response in served(server).sample(PROMPT, "p", range(8))} == {"stop"}
    assert len(served(server, greedy=True).sample(PROMPT, "p", range(4))) == 4
    assert server.bodies[-1]["n"] == 1  # vLLM refuses several


def test_a_server_without_log_probabilities_is_refused_and_another_passes(server: RolloutServer) -> None:
    """Nothing is known of what it samples from; one request says so."""
    served(server).check(PROMPT)
    server.script = ["no logprobs"]
    with pytest.raises(ConfigError, match="returns no log-probabilities"):
        served(server).check(PROMPT)
    assert len(server.bodies) == 2
