"""Rewards from a server: real HTTP on 127.0.0.1, and scores that are kept. Its faults are in `faults.rewards`."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import retries
from faults.server import RewardServer, Server
from rows import assistant, user

from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import prompt_id
from infalign.rewards.base import Batch, score
from infalign.rewards.scores import NamedReward, check_unchanged, score_to
from infalign.rewards.server import RemoteReward
from infalign.world import gold

PROMPTS = [
    [user("How do I bake bread?")],
    [{"role": "system", "content": "Be short."}, user("How do I move house?")],
    [user("Hi"), assistant("Hey"), user("Sûr ?")],
]
ASKED = [prompt for prompt in PROMPTS for _ in range(3)]
SAID = [f"{'please ' * i}knead the dough {j}" for j in range(3) for i in range(3)]


@pytest.fixture
def server() -> Iterator[RewardServer]:
    """Return a running server; requests are repeated at once and at most six times."""
    with retries.attempts(6), RewardServer() as running:
        yield running


def test_requests_are_those_of_openrlhf(server: RewardServer, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Batches carry query, prompts, labels; rewards come back bit for bit, in order; what is repeated is logged."""
    reward = RemoteReward(server.url, tokenizer, batch=4, in_flight=1)
    server.script = [503]
    assert score(reward, ASKED, SAID, name="reward").tolist() == gold(ASKED, SAID)
    said = rf"{server.url}: status 503: .*; retrying in 0 s, for another 60 s"
    assert [re.fullmatch(said, record.getMessage()) is not None for record in caplog.records] == [True]
    assert [len(body["query"]) for body in server.bodies] == [4, 4, 4, 1]
    assert server.bodies[3] == {
        "query": ["<|user|>Hi<|end|><|assistant|>Hey<|end|><|user|>Sûr ?<|end|><|assistant|>" + SAID[8]],
        "prompts": ["<|user|>Hi<|end|><|assistant|>Hey<|end|><|user|>Sûr ?<|end|><|assistant|>"],
        "labels": [prompt_id(PROMPTS[2])],
    }
    assert reward([], []) == []


@pytest.mark.parametrize("status", [401, 302])
def test_a_refusal_is_an_error_at_once_and_hides_the_key(
    server: RewardServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """What no repetition can cure costs one request; the body's first 300 characters are quoted, never the key."""
    monkeypatch.setenv("REWARD_KEY", "secret")
    server.script = [status]
    reward = RemoteReward(server.url, tokenizer, api_key_env="REWARD_KEY")
    with pytest.raises(ConfigError, match=rf"refused the request: status {status}: .*bad key \*\*\* x+$") as caught:
        reward(ASKED, SAID)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).partition(f"{status}: ")[2]) == 300
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret"]


def keep(
    folder: Path, reward: Any, prompts: Any = ASKED, responses: Any = SAID, *, made_by: str = "a", **more: Any
) -> np.ndarray:
    """Score rows into a folder, a prompt a shard."""
    options = {"shard_responses": 1, "on_progress": lambda *_: None} | more
    return score_to(folder, NamedReward(reward, "reward", made_by), Batch(prompts, responses), **options)


def test_many_shards_are_scored_at_once_in_their_places(server: RewardServer, tokenizer: Any, tmp_path: Path) -> None:
    """Sixteen requests meet at the server by default; shards are those of one request after another, to the byte."""
    asked = [[user(f"How do I bake {i} breads?")] for i in range(32)]
    said = [f"knead the dough {i} times" for i in range(32)]
    keep(tmp_path / "one", RemoteReward(server.url, tokenizer, in_flight=1), asked, said)
    assert server.most_at_once == 1
    server.meeting = threading.Barrier(16)
    assert keep(tmp_path / "many", RemoteReward(server.url, tokenizer), asked, said).tolist() == gold(asked, said)
    assert server.most_at_once == 16
    shards = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "many")]
    assert len(shards[0]) == 32
    assert shards[0] == shards[1]


def test_what_is_under_way_when_a_request_fails_is_kept(server: RewardServer, tokenizer: Any, tmp_path: Path) -> None:
    """Of three requests at once one is refused: the error comes after the other two, whose scores are stored."""
    server.meeting = threading.Barrier(3)
    server.script = [400]
    with pytest.raises(ConfigError, match="status 400"):
        keep(tmp_path, RemoteReward(server.url, tokenizer))
    assert len(list(tmp_path.iterdir())) == 2
    server.meeting = None
    server.bodies.clear()
    assert keep(tmp_path, RemoteReward(server.url, tokenizer)).tolist() == gold(ASKED, SAID)
    assert len(server.bodies) == 1


class VLLMServer(Server):
    """A server with vLLM's /classify or /pooling that computes `gold` of the conversation."""

    outputs: ClassVar[Any] = staticmethod(lambda reward: {"label": "LABEL_0", "probs": [reward], "num_classes": 1})

    def answer(self, body: dict[str, Any], fault: str | None = None) -> dict[str, Any]:
        """Return what vLLM returns for a request with ``messages``."""
        assert body.keys() == {"messages", "use_activation"}
        assert body["use_activation"] is False
        *prompt, response = body["messages"]
        assert response["role"] == "assistant"
        (reward,) = gold([prompt], [response["content"]])
        return {"object": "list", "model": "rm", "data": [{"index": 0, **self.outputs(reward)}]}


def test_vllm_gives_the_raw_output_of_its_model_at_both_endpoints(tokenizer: Any) -> None:
    """/classify has it in ``probs``, /pooling in ``data``, at the last token if the model has one for each."""
    with VLLMServer() as server:
        assert RemoteReward(f"{server.url}/classify", tokenizer)(ASKED, SAID) == gold(ASKED, SAID)
        assert len(server.bodies) == len(SAID)
        server.outputs = lambda reward: {"object": "pooling", "data": [reward]}
        assert RemoteReward(f"{server.url}/pooling/", tokenizer)(ASKED, SAID) == gold(ASKED, SAID)
        server.outputs = lambda reward: {"object": "pooling", "data": [[7.0], [8.0], [reward]]}
        assert RemoteReward(f"{server.url}/pooling", tokenizer)(ASKED, SAID) == gold(ASKED, SAID)


@pytest.mark.parametrize(
    ("path", "output", "said"),
    [
        ("classify", {"probs": [0.1, 0.9]}, "returned 2 rewards for the 1 responses"),
        ("classify", {"scores": [0.1]}, "no JSON object with one `data`, whose output is `probs` or `data`"),
        ("pooling", {"data": [[0.5, 1.5]]}, "returned 2 rewards for the 1 responses"),
        ("pooling", {"data": []}, "no JSON object with one `data`"),
        ("pooling", {"data": "AAAA"}, "returned str"),
    ],
)
def test_vllm_without_a_reward_model_is_refused(tokenizer: Any, path: str, output: dict[str, Any], said: str) -> None:
    """A classifier with two labels, an embedding model, or an answer of the other endpoint."""
    with VLLMServer() as server:
        server.outputs = lambda reward: output
        with pytest.raises(DataError, match=said):
            RemoteReward(f"{server.url}/{path}", tokenizer)(ASKED, SAID)


def test_a_reward_is_asked_from_inside_an_event_loop(server: RewardServer, tokenizer: Any) -> None:
    """As in a notebook, or an asynchronous trainer."""

    async def trainer() -> list[float]:
        return RemoteReward(server.url, tokenizer)(ASKED, SAID)

    assert asyncio.run(trainer()) == gold(ASKED, SAID)


def test_shards_of_another_reward_are_removed(tmp_path: Path) -> None:
    """Scores of two rewards are never mixed: what another one left is gone when the first row is asked for."""
    keep(tmp_path, lambda _, responses: [0.0] * len(responses), made_by="old")
    assert keep(tmp_path, gold, made_by="new").tolist() == gold(ASKED, SAID)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(("scale", "same"), [(1.0, True), (1.00005, True), (1.001, False), (-1.0, False)])
def test_rewards_may_not_change(server: RewardServer, tokenizer: Any, tmp_path: Path, scale: float, same: bool) -> None:
    """Rounding passes, another scale or sign is refused, shards of another url are not compared; one request."""
    reward = RemoteReward(server.url, tokenizer)
    keep(tmp_path, reward)
    named = NamedReward(reward, "reward", "a")
    shards = sorted(tmp_path.iterdir())
    server.bodies.clear()
    server.scale = scale
    check_unchanged(NamedReward(reward, "reward", "another"), shards)
    assert not server.bodies
    if same:
        check_unchanged(named, shards)
    else:
        with pytest.raises(DataError, match=r"now returns .* instead of .*not the reward that scored before"):
            check_unchanged(named, shards)
    assert [len(body["query"]) for body in server.bodies] == [3]  # the first shard has no fourth row
