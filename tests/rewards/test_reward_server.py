"""Rewards from a server: real HTTP on 127.0.0.1, every fault a server can have, and scores that outlive it."""

import asyncio
import io
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import micro
import numpy as np
import pyarrow.parquet as pq
import pytest
import stamina
from faults.server import RewardServer, Server
from rich.console import Console
from stamina.instrumentation import get_on_retry_hooks

from infalign.core.errors import ConfigError, DataError, PartialError
from infalign.data.examples import prompt_id
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.rewards.base import score
from infalign.rewards.scores import check_unchanged, score_to
from infalign.rewards.server import RemoteReward
from infalign.rewards.settings import RewardSource
from infalign.sampling.engine import Sampling
from infalign.sampling.server import ServerEngine
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.world import gold

PROMPTS = [
    [{"role": "user", "content": "How do I bake bread?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How do I move house?"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}, {"role": "user", "content": "Sûr ?"}],
]
ASKED = [prompt for prompt in PROMPTS for _ in range(3)]
SAID = [f"{'please ' * i}knead the dough {j}" for j in range(3) for i in range(3)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer with the chat template of models from scratch."""
    return train_tokenizer(["How do I write a function?", "Please explain the moon."] * 9, Scratch(**micro.SCRATCH))


@pytest.fixture
def server() -> Iterator[RewardServer]:
    """Return a running server; stamina retries at once and at most six times."""
    with stamina.set_testing(True, attempts=6), RewardServer() as running:
        yield running


# Requests


def test_rewards_are_those_of_the_server_and_the_request_is_openrlhfs(server: RewardServer, tokenizer: Any) -> None:
    """Batches of ``batch`` rows carry query, prompts and labels; ``rewards`` come back bit for bit, in row order."""
    reward = RemoteReward(server.url, tokenizer, batch=4, in_flight=1)
    assert score(reward, ASKED, SAID, name="reward").tolist() == gold(ASKED, SAID)
    assert [len(body["query"]) for body in server.bodies] == [4, 4, 1]
    assert server.bodies[2] == {
        "query": ["<|user|>Hi<|end|><|assistant|>Hey<|end|><|user|>Sûr ?<|end|><|assistant|>" + SAID[8]],
        "prompts": ["<|user|>Hi<|end|><|assistant|>Hey<|end|><|user|>Sûr ?<|end|><|assistant|>"],
        "labels": [prompt_id(PROMPTS[2])],
    }
    assert reward([], []) == []


def test_passing_faults_are_repeated(server: RewardServer, tokenizer: Any) -> None:
    """After 500, 408, 429, a reset connection and a server that hangs the rewards are those of a healthy server."""
    server.script = [500, 408, 429, "reset", "hang"]
    reward = RemoteReward(server.url, tokenizer, read_seconds=5.0)
    assert reward(ASKED, SAID) == gold(ASKED, SAID)
    assert len(server.bodies) == 6


def test_the_wait_that_a_server_asks_for_is_granted(server: RewardServer, tokenizer: Any) -> None:
    """With Retry-After: 1 the next request comes a second later."""
    stamina.set_testing(False)
    server.script = [429]
    begun = time.monotonic()
    assert RemoteReward(server.url, tokenizer)(ASKED, SAID) == gold(ASKED, SAID)
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_a_refusal_is_an_error_at_once_and_hides_the_key(
    server: RewardServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """What no repetition can cure costs one request; the body's first 300 characters are quoted, never the key."""
    monkeypatch.setenv("REWARD_KEY", "secret")
    server.script = [status]
    reward = RemoteReward(server.url, tokenizer, api_key_env="REWARD_KEY")
    with pytest.raises(ConfigError, match=rf"refused the request with status {status}: .*bad key \*\*\* x+$") as caught:
        reward(ASKED, SAID)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).partition(f"{status}: ")[2]) == 300
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret"]


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nX-Other: 1", " secret", "secret\x7f", "sécret", "two secret"])
def test_a_key_that_is_none_is_refused_at_once_and_not_shown(
    server: RewardServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A trailing line break, as files of keys have it, is told before anything is asked, for rewards and rollouts."""
    monkeypatch.setenv("REWARD_KEY", key)
    with pytest.raises(ConfigError, match="REWARD_KEY holds a line break") as caught:
        RemoteReward(server.url, tokenizer, api_key_env="REWARD_KEY")
    assert "cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="REWARD_KEY holds a line break"):
        ServerEngine(server.url, "tiny", tokenizer, Sampling(4), api_key_env="REWARD_KEY")
    assert not server.bodies


def test_a_key_that_is_not_set_is_a_config_error(tokenizer: Any) -> None:
    """The variable that should hold the key is named before anything is asked."""
    with pytest.raises(ConfigError, match="REWARD_KEY"):
        RemoteReward("http://127.0.0.1:1", tokenizer, api_key_env="REWARD_KEY")


@pytest.mark.parametrize(
    ("fault", "read_seconds", "said"),
    [
        (503, 10.0, "status 503"),
        ("reset", 10.0, "RemoteProtocolError"),
        ("hang", 1.0, "ReadTimeout"),
        ("trickle", 1.0, "ReadTimeout: the answer began"),
    ],
)
def test_a_server_that_stays_away_stops_the_run_in_bounded_time(
    server: RewardServer, tokenizer: Any, fault: Any, read_seconds: float, said: str
) -> None:
    """After the time for retries a PartialError names the rows, their first prompt and what to do."""
    stamina.set_testing(False)
    server.script = [server.answer({"prompts": [], "query": []}) | {"rewards": [1.0] * 4}, *[fault] * 50]
    with pytest.raises(
        PartialError, match=rf"batch 2.* rows 4 to 7 \(first prompt {prompt_id(ASKED[4])}\).*{said}.*kept"
    ):
        RemoteReward(server.url, tokenizer, batch=4, in_flight=1, retry_seconds=0.5, read_seconds=read_seconds)(
            ASKED, SAID
        )


def test_a_refused_connection_stops_the_run_resumably(server: RewardServer, tokenizer: Any) -> None:
    """A port where nothing listens is a server that may come back: exit code 4."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(PartialError, match="ConnectError") as caught:
        RemoteReward(url, tokenizer)(ASKED, SAID)
    assert caught.value.exit_code == 4


# Answers


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("null", "found a NoneType"),
        ('"0.5"', "found a str"),
        ("true", "found a bool"),
        ("NaN", "found nan"),
        ("-Infinity", "found -inf"),
        ("1e999", "found inf"),
        ("9" * 400, "found inf"),
        ("[0.5]", "found a list"),
    ],
)
def test_an_answer_that_is_no_finite_number_is_refused_with_its_place(
    server: RewardServer, tokenizer: Any, value: str, found: str
) -> None:
    """One bad value among good ones names url, batch, row and prompt; nothing is converted or left out."""
    server.script = [{"rewards": [0, 1, 2, 3.5]}, f'{{"rewards": [0, 1, {value}, 3]}}'.encode()]
    with pytest.raises(DataError) as caught:
        RemoteReward(server.url, tokenizer, batch=4, in_flight=1)(ASKED, SAID)
    place = f"reward {server.url} (batch 2), row 6 (prompt {prompt_id(ASKED[6])}): {found}"
    assert str(caught.value).startswith(place)
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": [1.0] * 8}, "returned 8 rewards for the 9 responses of rows 0 to 8"),
        ({"rewards": [1.0] * 10}, "returned 10 rewards for the 9 responses"),
        ({"rewards": None}, "returned NoneType for the 9 responses"),
        ({"rewards": 1.0}, "returned float for the 9 responses"),
        ({"rewards": {str(i): 1.0 for i in range(9)}}, "returned dict for the 9 responses"),
        ({"scores": [1.0] * 9}, "no JSON object with `rewards`, it begins .*scores"),
        ([1.0] * 9, "no JSON object with `rewards`"),
        (b"<html>gateway</html>", "no JSON object with `rewards`, it begins '<html>gateway"),
        (b"", "no JSON object"),
        (b"\xff\xfe{", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
    ],
)
def test_an_answer_of_another_shape_is_refused(server: RewardServer, tokenizer: Any, answer: Any, message: str) -> None:
    """Too few, too many, none, or something else than the contract is an error that quotes what came."""
    server.script = [answer]
    with pytest.raises(DataError, match=rf"reward {server.url} \(batch 1\).*{message}"):
        RemoteReward(server.url, tokenizer)(ASKED, SAID)
    assert len(server.bodies) == 1


# Scores that are kept


def keep(directory: Path, reward: Any, **settings: Any) -> np.ndarray:
    """Score all rows into a directory, a prompt a shard."""
    ignored = {"on_progress": lambda done, total: None}
    return score_to(
        directory, reward, ASKED, SAID, **{"name": "reward", "made_by": "a", "shard_responses": 1} | ignored | settings
    )


def test_a_server_that_dies_and_comes_back_costs_only_what_it_had_not_scored(
    server: RewardServer, tokenizer: Any, tmp_path: Path
) -> None:
    """Dead after two of three prompts and back again: one more request, and the rewards of an undisturbed run."""
    reward = RemoteReward(server.url, tokenizer, in_flight=1)
    server.broken_after = 2
    with pytest.raises(PartialError, match="scores so far are kept"):
        keep(tmp_path, reward)
    assert len(list(tmp_path.iterdir())) == 2
    server.broken_after = None
    server.bodies.clear()
    seen: list[tuple[int, int]] = []
    assert keep(tmp_path, reward, on_progress=lambda *p: seen.append(p)).tolist() == gold(ASKED, SAID)
    assert [body["labels"] for body in server.bodies] == [[prompt_id(PROMPTS[2])] * 3]
    assert seen == [(6, 9), (9, 9)]
    assert keep(tmp_path, reward).tolist() == gold(ASKED, SAID)
    assert len(server.bodies) == 1


def test_many_shards_are_scored_at_once_and_land_in_their_places(
    server: RewardServer, tokenizer: Any, tmp_path: Path
) -> None:
    """Sixteen requests meet at the server by default; shards are those of one request after another, to the byte."""
    asked = [[{"role": "user", "content": f"How do I bake {i} breads?"}] for i in range(32)]
    options = {"name": "reward", "made_by": "a", "shard_responses": 1, "on_progress": lambda done, total: None}
    said = [f"knead the dough {i} times" for i in range(32)]
    score_to(tmp_path / "one", RemoteReward(server.url, tokenizer, in_flight=1), asked, said, **options)
    assert server.most_at_once == 1
    server.meeting = threading.Barrier(16)
    rewards = score_to(tmp_path / "many", RemoteReward(server.url, tokenizer), asked, said, **options)
    assert rewards.tolist() == gold(asked, said)
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


def test_rewards_are_those_of_their_rows_in_whatever_order_they_come(
    server: RewardServer, tokenizer: Any, tmp_path: Path
) -> None:
    """Answers that take random times, some of them after a failure, still land at the rows that asked."""
    asked = [[{"role": "user", "content": f"How do I bake {i} breads?"}] for i in range(60)]
    said = [f"knead the dough {i} times" for i in range(60)]
    random, answer = np.random.default_rng(0), server.answer

    def late(body: dict[str, list[str]], fault: str | None = None) -> dict[str, Any]:
        time.sleep(random.uniform(0, 0.05))
        return answer(body, fault)

    server.answer = late  # type: ignore[method-assign]
    server.script = [None, 503, None, "reset", None, 500] * 6
    reward = RemoteReward(server.url, tokenizer, batch=1)
    options = {"name": "reward", "made_by": "a", "shard_responses": 2, "on_progress": lambda done, total: None}
    with stamina.set_testing(True, attempts=9):
        assert score_to(tmp_path, reward, asked, said, **options).tolist() == gold(asked, said)
    assert len(server.bodies) == 60 + 18


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
    ("path", "output", "message"),
    [
        ("classify", {"probs": [0.1, 0.9]}, "returned 2 rewards for the 1 responses"),
        ("classify", {"data": [0.1]}, "no JSON object with one `data`, whose output is `probs`"),
        ("pooling", {"data": [[0.5, 1.5]]}, "returned 2 rewards for the 1 responses"),
        ("pooling", {"data": []}, "no JSON object with one `data`"),
        ("pooling", {"data": "AAAA"}, "returned str"),
    ],
)
def test_a_model_of_vllm_that_is_no_reward_model_is_refused(
    tokenizer: Any, path: str, output: dict[str, Any], message: str
) -> None:
    """A classifier with two labels, an embedding model, or an answer of the other endpoint."""
    with VLLMServer() as server:
        server.outputs = lambda reward: output
        with pytest.raises(DataError, match=message):
            RemoteReward(f"{server.url}/{path}", tokenizer)(ASKED, SAID)


def test_repetitions_of_two_threads_are_logged_and_then_stamina_is_as_before(
    server: RewardServer, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hooks are the whole process's; each repetition says its URL, the reason and the wait."""
    before = get_on_retry_hooks()
    server.meeting, server.script = threading.Barrier(2), [503, 503]
    reward = RemoteReward(server.url, tokenizer)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(reward, ASKED, SAID) for _ in range(2)]
        assert [future.result() for future in found] == [gold(ASKED, SAID)] * 2
    assert get_on_retry_hooks() == before
    said = f"{server.url}: status 503; again in 0 s, for 300 s more"
    assert [record.getMessage() for record in caplog.records] == [said, said]


def test_a_name_that_does_not_resolve_holds_nobody_up(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of an attempt covers the resolver, which hangs and cannot be ended; nobody waits for it."""
    over = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        over.wait(300)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with stamina.set_testing(True, attempts=2), pytest.raises(PartialError, match="ReadTimeout: no answer within"):
        RemoteReward("http://hangs.example/get_reward", tokenizer, read_seconds=0.2)(ASKED, SAID)
    over.set()


def test_a_reward_is_asked_from_inside_an_event_loop(server: RewardServer, tokenizer: Any) -> None:
    """As in a notebook, or an asynchronous trainer."""

    async def trainer() -> list[float]:
        return RemoteReward(server.url, tokenizer)(ASKED, SAID)

    assert asyncio.run(trainer()) == gold(ASKED, SAID)


def test_equal_responses_are_asked_once_and_rows_can_be_added(tmp_path: Path) -> None:
    """A reward that never repeats itself still ties equal responses to a prompt, also those that come later."""
    numbers = iter(range(100))

    def restless(prompts: list[Any], responses: list[str]) -> list[int]:
        return [next(numbers) for _ in responses]

    options = {"name": "reward", "made_by": "a", "on_progress": lambda done, total: None}
    first = score_to(tmp_path, restless, ASKED[:4], ["a", "b", "a", "a"], **options)
    assert first.tolist() == [0, 1, 0, 2]  # the same text, to another prompt, in row 3
    more = score_to(tmp_path, restless, [*ASKED[:4], ASKED[0]], ["c", "b", "a", "a", "c"], **options)
    assert more.tolist() == [3, 1, 0, 2, 3]


def test_shards_of_another_reward_are_removed(tmp_path: Path) -> None:
    """Scores of two rewards are never mixed: what another one left is gone when the first row is asked for."""
    keep(tmp_path, lambda _, responses: [0.0] * len(responses), made_by="old")
    assert keep(tmp_path, gold, made_by="new").tolist() == gold(ASKED, SAID)
    assert len(list(tmp_path.iterdir())) == 3


def test_bad_answers_leave_the_shards_before_them(server: RewardServer, tokenizer: Any, tmp_path: Path) -> None:
    """A NaN in the second shard stops the run with the first one kept, and no partial file."""
    server.script = [{"rewards": [1, 2, 3]}, b'{"rewards": [1, NaN, 3]}']
    with pytest.raises(DataError, match="found nan"):
        keep(tmp_path, RemoteReward(server.url, tokenizer, in_flight=1))
    assert [path.name for path in tmp_path.iterdir()] == ["part-00000.parquet"]
    table = pq.read_table(tmp_path / "part-00000.parquet").to_pylist()
    assert [(row["prompt"], row["response"], row["reward"]) for row in table] == [
        (PROMPTS[0], text, value) for text, value in zip(SAID[:3], [1.0, 2.0, 3.0], strict=True)
    ]


@pytest.mark.parametrize(("scale", "same"), [(1.0, True), (1.00005, True), (1.001, False), (-1.0, False)])
def test_a_server_must_still_give_the_rewards_it_gave(
    server: RewardServer, tokenizer: Any, tmp_path: Path, scale: float, same: bool
) -> None:
    """Rounding passes, another scale or sign is refused, shards of another url are not compared; one request."""
    reward = RemoteReward(server.url, tokenizer)
    keep(tmp_path, reward)
    shards = sorted(tmp_path.iterdir())
    server.bodies.clear()
    server.scale = scale
    check_unchanged(reward, shards, name="reward", made_by="another")
    assert not server.bodies
    if same:
        check_unchanged(reward, shards, name="reward", made_by="a")
    else:
        with pytest.raises(DataError, match=r"now gives .* where it gave .*not the reward that scored before"):
            check_unchanged(reward, shards, name="reward", made_by="a")
    assert [len(body["query"]) for body in server.bodies] == [3]  # the first shard has no fourth row


# Recipes


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"url": "localhost:5000"}, "starts with http"),
        ({"url": "ftp://host/x"}, "starts with http"),
        ({"url": "http://me:secret@host/x"}, "use api_key_env"),
        ({"url": "ftp://me:secret@host/x"}, "use api_key_env"),
        ({"url": "http://host/x?revision=2&api_key=secret"}, "api_key=….*use api_key_env"),
        ({"url": "http://host/x?access_token=secret"}, "access_token=….*use api_key_env"),
        ({"url": "http://host/x", "api_key_env": "sk-secret"}, "not the key itself"),
        ({"url": "http://host", "function": "a:b"}, "not both"),
        ({"url": ["http://a/classify", "http://b/get_reward"]}, "asked alike"),
        ({"url": ["http://a/classify", "http://b/pooling"]}, "asked alike"),
        ({"url": "http://host", "model": "someone/model"}, "a `url` is used as it is"),
        ({"function": "a:b", "api_key_env": "KEY"}, "api_key_env is for a `url`"),
    ],
)
def test_a_source_says_one_thing(source: dict[str, str], message: str) -> None:
    """A URL that is none, one with a password, and two sources at once are refused."""
    with pytest.raises(ValueError, match=message):
        RewardSource(**source)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Return a folder with a policy and a run whose rollouts are drawn and rewarded by the function gold."""
    folder = tmp_path_factory.mktemp("sampled")
    new_policy(Scratch(**micro.SCRATCH), tokenizer, seed=0).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    recipe = Recipe.model_validate(micro.given(folder / "run", str(folder / "policy")))
    whole_run.run_recipe(recipe, until="calibrate", console=Console(file=io.StringIO()))
    return folder


@pytest.fixture
def remote(sampled: Path, server: RewardServer, tmp_path: Path) -> str:
    """Return a recipe whose run has rollouts and is to be rewarded by the server."""
    root = Path(shutil.copytree(sampled / "run", tmp_path / "run"))
    return micro.write(
        tmp_path / "recipe.yaml", micro.given(root, str(sampled / "policy")) | {"reward": {"url": server.url}}
    )


def samples(root: Path) -> list[dict[str, Any]]:
    """Return the responses that the reference policy is evaluated on."""
    (shard,) = (root / "evaluation" / "reference" / "samples").iterdir()
    return pq.read_table(shard).to_pylist()


def calibrated(root: Path) -> list[list[float]]:
    """Return the reference rewards of all prompts of a run."""
    return pq.read_table(root / "calibrated.parquet")["reference_rewards"].to_pylist()


def test_a_run_with_a_server_is_calibrated_as_with_the_function(
    main: Any, sampled: Path, server: RewardServer, remote: str
) -> None:
    """Through a server that dies after two parts and returns, `calibrate` gives gold's own rewards bit for bit.

    The second call asks for the four golden rows and what is missing only, and a third call for nothing.
    """
    root = Path(load_recipe(remote).run_dir)
    server.broken_after = 2 + 1  # part 0, the golden rows before part 1, part 1
    code, _, err = main("run", remote, "--until", "calibrate")
    assert code == 4, err
    assert "scores so far are kept" in err
    asked = {q for body in server.bodies[:3] for q in body["query"]}
    server.broken_after = None
    server.bodies.clear()
    code, _, err = main("run", remote, "--until", "calibrate")
    assert code == 0, err
    golden = sum(len(body["query"]) == 4 and set(body["query"]) <= asked for body in server.bodies)
    assert (golden, len(server.bodies)) == (2, 4)
    assert not asked & {q for body in server.bodies if len(body["query"]) > 4 for q in body["query"]}
    assert calibrated(root) == calibrated(sampled / "run")
    server.bodies.clear()
    assert main("run", remote, "--until", "calibrate")[0] == 0
    assert not server.bodies


def test_a_run_stops_where_another_server_answers(main: Any, server: RewardServer, remote: str) -> None:
    """A server of another scale after two parts is found before anything more is scored; another url starts anew."""
    server.broken_after = 3
    assert main("run", remote, "--until", "calibrate")[0] == 4
    server.broken_after = None
    server.scale = 3.0
    scores = Path(load_recipe(remote).run_dir) / "scores"
    before = {path: path.read_bytes() for path in scores.rglob("*.parquet")}
    code, _, err = main("run", remote, "--until", "calibrate")
    assert code == 3
    assert "not the reward that scored before" in err
    assert {path: path.read_bytes() for path in scores.rglob("*.parquet")} == before
    code, _, err = main("run", remote, "--until", "calibrate", "--set", f"reward.url={server.url}?revision=2")
    assert code == 0, err


def test_an_evaluation_keeps_the_scores_of_each_source(sampled: Path, server: RewardServer, tmp_path: Path) -> None:
    """A judge that does not answer leaves the reward's scores kept; with it back, the table has gold in all columns."""
    root = Path(shutil.copytree(sampled / "run", tmp_path / "run"))
    sources = {"reward": {"url": f"{server.url}?reward"}, "judge": {"url": server.url}}
    recipe = Recipe.model_validate(micro.given(root, str(sampled / "policy")) | sources)
    drawn, unit = (
        next(unit for unit in whole_run.units(Run.of(recipe)) if unit.name == name)
        for name in ("samples-reference", "evaluate-reference")
    )
    drawn.work(on_progress=lambda *_: None)
    assert drawn.so_far().said == "48 of 48 responses"
    server.broken_after = 1
    with pytest.raises(PartialError, match="no rewards within"):
        unit.work(on_progress=lambda *_: None)
    assert not (root / "evaluation" / "reference" / "scores.parquet").exists()
    distinct = len({(row["prompt_id"], row["text"]) for row in samples(root)})
    said = f"{distinct} responses scored by reward"
    assert unit.so_far().said == said
    server.broken_after = None
    server.bodies.clear()
    unit.work(on_progress=lambda *_: None)
    table = pq.read_table(root / "evaluation" / "reference" / "scores.parquet")
    assert table["reward"].equals(table["gold"])
    assert table["judge"].equals(table["gold"])
    golden, asked = (len(body["query"]) for body in server.bodies)
    assert (golden, asked) == (4, distinct)
