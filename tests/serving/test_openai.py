"""`infalign serve`: a real server that OpenAI's own client asks."""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import micro
import numpy as np
import openai
import pytest
from faults.server import RolloutServer
from openai import AsyncOpenAI, OpenAI

from infalign.core.errors import ConfigError
from infalign.core.storage import listed, read_table
from infalign.evaluation.intervals import estimate
from infalign.method.procedures import BestOfN, parse_procedure
from infalign.models.pretrained import conversation_ids, load_policy, load_tokenizer
from infalign.serving.answers import Answer, ServedPolicy
from infalign.serving.batches import Batches
from infalign.serving.draws import LocalDraws
from infalign.serving.openai import MAX_BYTES, Desk
from infalign.serving.policy import open_policy
from infalign.serving.web import TOKEN_VARIABLE, token_for

PROMPT = "How do I bake bread?"
Serving = Callable[..., AbstractContextManager[str]]


def policy(run: Path, **changes: Any) -> ServedPolicy:
    """Return a freshly loaded policy, as it can be served once."""
    return replace(open_policy(run), **changes)


@pytest.fixture(scope="module")
def url(evaluated_run: Path, serving: Serving) -> Iterator[str]:
    """Return the URL of a server of the policy."""
    with serving(policy(evaluated_run)) as found:
        yield found


def client_of(url: str, **options: Any) -> OpenAI:
    """Return OpenAI's client, which repeats nothing."""
    return OpenAI(**{"base_url": url, "api_key": "none", "max_retries": 0} | options)


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    """Return a client of the server."""
    with client_of(url) as found:
        yield found


def asked(text: str = PROMPT, model: str = "aware", **more: Any) -> dict[str, Any]:
    """Return a request."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def metrics(url: str) -> dict[str, float]:
    """Return what the server counts."""
    lines = httpx2.get(url.replace("/v1", "/metrics")).raise_for_status().text.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}


def until(url: str, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Wait until the server's metrics fulfil a condition, and return them."""
    while not holds(found := metrics(url)):
        time.sleep(0.01)
    return found


def library(run: Path, text: str, procedure: str, *, seed: int, choice: int = 0) -> Answer:
    """Return the answer that the library gives without a server."""

    async def answer() -> Answer:
        served = policy(run)
        async with served.working():
            one = served.asked(
                [{"role": "user", "content": text}], parse_procedure(procedure), seed=seed, choice=choice
            )
            return await served.answer(one)

    return asyncio.run(answer())


def concurrently(url: str, requests: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Return the answers to requests of as many clients at once, or the errors."""

    async def all_of_them() -> list[Any]:
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=600, **options) as client:
            calls: list[Awaitable[Any]] = [client.chat.completions.create(**request) for request in requests]
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_64_clients_at_once_get_what_each_would_get_alone(evaluated_run: Path, url: str) -> None:
    """Their draws are made and scored together, and counted."""
    before = metrics(url)
    answers = concurrently(url, [asked(f"Explain the number {i}.", seed=i, model="aware:best-of-4") for i in range(64)])
    for i in (0, 1, 33, 63):
        alone = library(evaluated_run, f"Explain the number {i}.", "best-of-4", seed=i)
        (choice,) = answers[i].choices
        assert choice.message.content == alone.text
        assert choice.infalign == {
            "draws": 4,
            "served": alone.served,
            "rewards": pytest.approx(alone.rewards),
            "base_draws": 0,
        }
        assert answers[i].usage.completion_tokens == alone.tokens
        assert answers[i].model == "aware:best-of-4"
    spent = {name: value - before[name] for name, value in metrics(url).items()}
    assert (spent["infalign_answers_total"], spent["infalign_draws_total"], spent["infalign_scores_total"]) == (
        64,
        256,
        256,
    )
    assert spent["infalign_score_batches_total"] < 64
    assert spent["infalign_draw_tokens_total"] == sum(answer.usage.completion_tokens for answer in answers)


def test_a_plain_draw_streams_as_it_is_drawn(client: OpenAI) -> None:
    """Its text comes in pieces that make the whole answer, with the usage at the end if asked for."""
    request = asked(model="aware:standard", seed=5)
    whole = client.chat.completions.create(**request)
    *pieces, last = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    texts = [piece.choices[0].delta.content for piece in pieces]
    assert sum(map(bool, texts)) > 1
    assert "".join(texts) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)
    assert pieces[-1].choices[0].infalign["rewards"] == []


def test_a_chosen_answer_streams_when_it_is_known(client: OpenAI) -> None:
    """Best-of-N has one piece: nobody reads what is not served."""
    request = asked(model="aware:best-of-4", seed=5)
    whole = client.chat.completions.create(**request)
    (piece,) = client.chat.completions.create(**request, stream=True)
    assert piece.choices[0].delta.content == whole.choices[0].message.content
    assert piece.choices[0].infalign == whole.choices[0].infalign


def test_every_choice_is_an_answer_of_its_own(evaluated_run: Path, client: OpenAI) -> None:
    """n choices have n times the draws, and the same seed gives the same ones, streamed or not."""
    request = asked(model="aware:worst-of-3", seed=9, n=3)
    found = client.chat.completions.create(**request)
    expected = [library(evaluated_run, PROMPT, "worst-of-3", seed=9, choice=choice) for choice in range(3)]
    assert [choice.message.content for choice in found.choices] == [answer.text for answer in expected]
    assert len({choice.message.content for choice in found.choices}) == 3
    assert found.usage.completion_tokens == sum(answer.tokens for answer in expected)
    for choice in found.choices:
        assert choice.infalign["rewards"][choice.infalign["served"]] == min(choice.infalign["rewards"])
    pieces = {piece.choices[0].index: piece for piece in client.chat.completions.create(**request, stream=True)}
    assert [pieces[i].choices[0].delta.content for i in range(3)] == [answer.text for answer in expected]


def test_a_seed_that_the_server_chose_can_be_asked_for_again(client: OpenAI) -> None:
    """Without a seed answers differ, and each says the seed that gives it again."""
    first, second = (client.chat.completions.create(**asked()) for _ in range(2))
    assert first.choices[0].message.content != second.choices[0].message.content
    again = client.chat.completions.create(**asked(seed=first.infalign["seed"]))
    assert again.choices[0].message.content == first.choices[0].message.content


def test_rewinding_stops_at_the_first_draw_that_passes(client: OpenAI) -> None:
    """Its threshold is drawn from the base policy once a prompt, and the answer says how many draws it took."""
    taken = []
    for seed in range(12):
        answer = client.chat.completions.create(**asked("How is tea made?", "aware:rewind:0.75:6", seed=seed))
        about = answer.choices[0].infalign
        assert about["base_draws"] == (32 if seed == 0 else 0)
        assert len(about["rewards"]) == about["draws"]
        assert about["served"] == about["draws"] - 1
        taken.append(about["rewards"])
    failed = [reward for rewards in taken for reward in rewards[:-1]]
    passed = [rewards[-1] for rewards in taken if len(rewards) < 6]
    assert failed
    assert passed
    assert max(failed) < min(passed)


def test_what_is_longer_is_cut_and_what_may_be_longer_is_not(client: OpenAI) -> None:
    """max_tokens cuts every draw; beyond the length of training there is nothing."""
    whole, cut, more = (
        client.chat.completions.create(**asked(seed=2, model="aware:standard", **{name: limit}))
        for name, limit in (("max_tokens", 12), ("max_completion_tokens", 3), ("max_tokens", 4000))
    )
    assert whole.choices == more.choices
    assert cut.usage.completion_tokens == 3
    assert cut.choices[0].finish_reason == "length"
    assert whole.choices[0].message.content.startswith(
        cut.choices[0].message.content.rstrip("\N{REPLACEMENT CHARACTER}")
    )


TURN = {"role": "user", "content": PROMPT}


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "gpt-4"}, 404, "model", "this server has aware"),
        ({"model": "reference"}, 404, "model", "--policy NAME` serves the run's other policies: reference"),
        ({"model": "aware:best-of-none"}, 404, "model", "unknown procedure 'best-of-none'"),
        ({"model": "aware:best-of-2000"}, 400, "model", "1,024 are the most"),
        ({"model": "aware-best-of-2"}, 404, "model", "does not exist"),
        ({"model": "aware:2nd-best-of-1000000000"}, 404, "model", "of at most 100,000 draws"),
        ({"model": "aware:rewind:0.75:4", "max_tokens": 3}, 400, "model", "quantile of draws of 3 tokens at most"),
        ({"model": "aware:rewind:0.99:2"}, 400, "model", "do not show the quantile 0.99"),
        ({"temperature": 0.7}, 400, "temperature", "leave it out or set it to 1"),
        ({"top_p": 0.9}, 400, "top_p", "is not served"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "is not served"),
        ({"extra_body": {"top_k": 5}}, 400, "top_k", "leave it out"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"seed": 2**70}, 400, "seed", "less than"),
        ({"messages": []}, 400, "messages", "messages is empty; give at least a message of the user"),
        ({"messages": [TURN | {"role": "tool"}]}, 400, "messages", "has the role 'tool'"),
        ({"messages": [TURN | {"role": "assistant"}]}, 400, "messages", "does not end with a user turn"),
        ({"messages": [TURN | {"content": "word " * 300}]}, 400, "messages", "up to 12 exceeds the model's context of"),
        ({"messages": [TURN | {"content": None}]}, 400, "messages.0.content", "the content of a message is not text"),
        ({"messages": [{"content": PROMPT}]}, 400, "messages.0.role", "the role of a message is not text"),
        ({"messages": [TURN | {"content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "with a text"),
        ({"messages": [TURN | {"content": [{"text": {"a": 1}}]}]}, 400, "messages.0.content", "with a text"),
        ({"messages": [3]}, 400, "messages", "not an object with role and content"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_served_is_refused_with_the_field(
    client: OpenAI, change: dict[str, Any], status: int, param: str, said: str, stream: bool
) -> None:
    """Nothing is drawn from another distribution than the one that was measured, and the client's error says why."""
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**asked() | change, stream=stream)
    assert refused.value.status_code == status
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert said in refused.value.message


@pytest.mark.parametrize("path", ["completions", "responses", "embeddings"])
def test_an_unknown_path_says_which_there_are(client: OpenAI, path: str) -> None:
    """OpenAI's client shows the sentence, not a bare page."""
    with pytest.raises(openai.NotFoundError) as refused:
        client.post(f"/{path}", body={"model": "aware"}, cast_to=object)
    said = f"there is no '/v1/{path}'; this server has /v1/chat/completions and /v1/models"
    about = {"type": "invalid_request_error", "param": None, "code": "unknown_url"}
    assert refused.value.body == {"message": said, **about}


def test_a_prompt_that_is_too_long_for_the_base_is_refused(evaluated_run: Path, client: OpenAI) -> None:
    """A short answer of the policy fits beside it, but the threshold takes draws of the base of the run's length."""
    tokenizer, talk = load_tokenizer(evaluated_run / "data" / "tokenizer"), dict(TURN)
    while len(conversation_ids(tokenizer, [talk], add_generation_prompt=True)) < 182:
        talk["content"] += "."
    short = {"messages": [talk], "max_tokens": 1}
    assert client.chat.completions.create(**asked() | short).choices
    with pytest.raises(openai.BadRequestError, match="the base policy cannot show the quantile"):
        client.chat.completions.create(**asked(model="aware:rewind:0.75:4") | short)


def test_what_asks_for_nothing_is_no_reason_to_refuse(client: OpenAI) -> None:
    """Clients send defaults; parts of text are joined."""
    plain = client.chat.completions.create(**asked(seed=1))
    defaults = {"temperature": 1.0, "top_p": 1, "frequency_penalty": 0, "stop": None, "user": "me", "logprobs": False}
    parts = [{"type": "text", "text": part} for part in (PROMPT[:4], PROMPT[4:])]
    found = client.chat.completions.create(
        **asked(seed=1, **defaults) | {"messages": [{"role": "user", "content": parts}]}
    )
    assert found.choices == plain.choices


def test_other_bodies_are_refused(url: str) -> None:
    """No JSON, and JSON that is no object."""
    for content in (b"{", b"[]", b'{"model": "aware"}'):
        found = httpx2.post(f"{url}/chat/completions", content=content)
        assert found.status_code == 400
        assert found.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("told", [True, False])
def test_a_body_that_no_context_holds_is_not_read_to_its_end(url: str, told: bool) -> None:
    """A client cannot fill the server's memory, whether or not it tells the length first; the next one is served."""
    content = iter([b" " * MAX_BYTES, json.dumps(asked()).encode()])
    found = httpx2.post(f"{url}/chat/completions", content=b"".join(content) if told else content)
    assert found.status_code == 413
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert "more than 4,000,000 bytes" in found.json()["error"]["message"]
    whole = json.dumps(asked(model="aware:standard")).encode().ljust(MAX_BYTES)
    assert httpx2.post(f"{url}/chat/completions", content=whole, timeout=60).status_code == 200


def test_the_server_says_what_it_has(client: OpenAI, url: str) -> None:
    """Models with procedures that can be asked for; health."""
    assert [model.id for model in client.models.list()] == ["aware", "aware:best-of-4", "aware:standard"]
    assert client.chat.completions.create(**asked()).model == "aware:best-of-4"
    health = httpx2.get(url.replace("/v1", "/health")).json()
    assert health == {"status": "ok", "policy": "aware", "procedure": "best-of-4"}


@pytest.mark.parametrize(("host", "token", "expected"), [("127.0.0.1", "", None), ("0.0.0.0", "s3", "s3")])
def test_an_empty_token_is_none(monkeypatch: pytest.MonkeyPatch, host: str, token: str, expected: str | None) -> None:
    """One that no header can carry is refused, and not shown."""
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert token_for(host) == expected
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret\n")
    with pytest.raises(ConfigError, match="holds a line break") as refused:
        token_for(host)
    assert "s3cret" not in str(refused.value)


def test_a_folder_may_have_a_colon_in_its_name(evaluated_run: Path) -> None:
    """What follows the whole name is the procedure."""
    desk = Desk(policy(evaluated_run, name="mine:2"), most=1)
    assert desk.procedure("mine:2").name == "best-of-4"
    assert desk.procedure("mine:2:rewind:0.75:6").name == "rewind:0.75:6"


def test_the_page_shows_what_works(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python example of docs/serving.md runs against a server."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8080/v1", url), names)
    names["client"].close()
    assert "'draws': 4" in capsys.readouterr().out


class Gate:
    """A reward that waits until it is opened, and then is `micro.brightness`."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, rows: list[Any]) -> list[float]:
        self.open.wait(600)
        return micro.brightness([], [text for _, text in rows])


def test_more_than_it_can_do_is_refused_and_done_later(evaluated_run: Path, serving: Serving) -> None:
    """Beyond ``most`` answers a client is told to ask again, and OpenAI's client does; what was taken is answered."""
    gate = Gate()
    with serving(policy(evaluated_run, scores=Batches(gate)), most=3) as url:
        answers: list[Any] = []
        taken = threading.Thread(target=lambda: answers.extend(concurrently(url, [asked(n=1), asked(n=2)])))
        taken.start()
        until(url, lambda found: found["infalign_answers_in_progress"] == 3)
        assert httpx2.post(f"{url}/chat/completions", json=asked(n=4)).json()["error"]["param"] == "n"
        refused = httpx2.post(f"{url}/chat/completions", json=asked())
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        (error,) = concurrently(url, [asked(stream=True)], max_retries=0)
        assert isinstance(error, openai.InternalServerError)
        patient = threading.Thread(target=lambda: answers.extend(concurrently(url, [asked()], max_retries=50)))
        patient.start()
        until(url, lambda found: found["infalign_refused_total"] >= 3)
        gate.open.set()
        taken.join()
        patient.join()
        assert sorted(len(answer.choices) for answer in answers) == [1, 1, 2]
        assert metrics(url)["infalign_answers_in_progress"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_work(evaluated_run: Path, serving: Serving, stream: bool) -> None:
    """Of the draws that a client asked for those are abandoned that are not made when it goes; the next is served."""
    model, tokenizer = load_policy(evaluated_run / "models" / "aware")
    with serving(policy(evaluated_run, draws=LocalDraws(model, tokenizer, rows=2))) as url:

        async def ask_and_go() -> None:
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
                if stream:  # plain draws, of which the first pieces come at once
                    pieces = await client.chat.completions.create(**asked(model="aware:standard", n=128), stream=True)
                    await anext(aiter(pieces))
                    await pieces.close()
                    return
                call = asyncio.create_task(client.chat.completions.create(**asked(model="aware:best-of-64", n=128)))
                while not (await asyncio.to_thread(metrics, url))["infalign_draws_total"]:
                    pass
                call.cancel()

        asyncio.run(ask_and_go())
        found = until(
            url, lambda found: found["infalign_answers_in_progress"] == found["infalign_draws_in_progress"] == 0
        )
        assert found["infalign_abandoned_draws_total"] > 0
        assert found["infalign_abandoned_draws_total"] + found["infalign_draws_total"] == (128 if stream else 8192)
        assert concurrently(url, [asked()])[0].choices[0].message.content


def test_a_reward_that_fails_is_said_and_spoils_no_other(evaluated_run: Path, serving: Serving) -> None:
    """The answer whose reward is missing is an error of the server, before or inside a stream."""

    def picky(rows: list[Any]) -> list[float]:
        if any("bad" in turns[0]["content"] for turns, _ in rows):
            raise ValueError("no reward for this")
        return [0.0] * len(rows)

    with serving(policy(evaluated_run, scores=Batches(picky))) as url:
        requests = [asked("bad" if i % 3 == 0 else "good", stream=i % 2 == 0) for i in range(9)]
        for i, answer in enumerate(concurrently(url, requests, max_retries=0)):
            if i % 3 == 0:
                assert isinstance(answer, openai.InternalServerError)
                assert answer.type == "server_error"
            else:
                assert not isinstance(answer, Exception)
        mixed = asked("bad", model="aware:0.5*standard+0.5*best-of-2", n=16, seed=0, stream=True)
        with client_of(url) as client, pytest.raises(openai.APIError, match="unexpected ValueError"):
            list(client.chat.completions.create(**mixed))
        assert metrics(url)["infalign_answers_in_progress"] == 0


@pytest.mark.parametrize(("served", "is_measured"), [("best-of-4", True), ("best-of-2", False), ("best-of-8", False)])
def test_what_is_served_wins_as_often_as_was_measured(
    evaluated_run: Path, url: str, served: str, is_measured: bool
) -> None:
    """Answers of the server win against the reference's Best-of-4 as the evaluation says of the policy's Best-of-4.

    On every prompt of the evaluation, with the same samples of the reference; the difference from the evaluation has an
    interval around 0, and the same answers by Best-of-2 or Best-of-8 have none.
    """
    first = json.loads((evaluated_run / "results.json").read_text())["prompts"]
    prompts = read_table(evaluated_run / "data" / "test_prompts.parquet").slice(0, first)
    rewards = {
        model: read_table(evaluated_run / "evaluation" / model / "scores.parquet")["reward"]
        .to_numpy()
        .reshape(first, -1)
        for model in ("reference", "aware")
    }
    best = BestOfN(4)

    def wins(selected_PM: Any, weights_PM: Any) -> Any:
        base_PB = best.weights(rewards["reference"])
        beats = (selected_PM[:, :, None] > rewards["reference"][:, None]) + 0.5 * (
            selected_PM[:, :, None] == rewards["reference"][:, None]
        )
        return np.einsum("pm,pmb,pb->p", weights_PM, beats, base_PB)

    measured_P = wins(rewards["aware"], best.weights(rewards["aware"]))
    requests = [
        {"model": f"aware:{served}", "messages": conversation, "n": 96, "seed": 0}
        for conversation in listed(prompts, "prompt")
    ]
    answers = [concurrently(url, [request])[0] for request in requests]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    found_PM = np.array([micro.brightness([], row) for row in texts])
    found_P = wins(found_PM, np.full(found_PM.shape, 1 / found_PM.shape[1]))
    gap = estimate(found_P - measured_P, confidence=0.99)
    assert (gap.low < 0 < gap.high) == is_measured, gap
    assert gap.high - gap.low < 0.15


def test_an_engine_at_a_url_draws_and_this_server_chooses(
    evaluated_run: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives four draws in one request, the best by reward is served, and seeds are refused."""
    monkeypatch.setattr("infalign.serving.policy.RETRY_SECONDS", 0.5)
    with (
        RolloutServer(*load_policy(evaluated_run / "models" / "aware")) as engine,
        serving(open_policy(evaluated_run, engine_url=engine.url, engine_model="policy")) as url,
        client_of(url) as client,
    ):
        answer = client.chat.completions.create(**asked())
        about = answer.choices[0].infalign
        assert (about["draws"], len(about["rewards"])) == (4, 4)
        assert about["rewards"][about["served"]] == max(about["rewards"])
        assert about["rewards"][about["served"]] == micro.brightness([], [answer.choices[0].message.content])[0]
        assert engine.bodies[-1]["n"] == 4
        assert engine.bodies[-1]["model"] == "policy"
        assert answer.model_extra == {}  # it may not give the same again
        cut = list(client.chat.completions.create(**asked(model="aware:standard", max_tokens=2, stream=True)))
        assert cut[-1].choices[0].finish_reason in ("length", "stop")
        assert engine.bodies[-1]["max_tokens"] == 2
        with pytest.raises(openai.BadRequestError, match="leave seed out"):
            client.chat.completions.create(**asked(seed=1))
        engine.broken_after = 0
        with pytest.raises(openai.InternalServerError, match="did not answer"):
            client.chat.completions.create(**asked())


def test_help_and_page_say_that_one_temperature_is_served(main: Any) -> None:
    """Who wants another finds out before the server is up."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert all("Only temperature 1 is served" in said for said in (main("serve", "--help")[1], page))


def test_the_command_serves_with_a_token(evaluated_run: Path) -> None:
    """The client's API key is the token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("serve", evaluated_run, "--policy", "reference", "--procedure", "standard", "--port", port)
    path = os.pathsep.join(filter(None, [str(Path(micro.__file__).parent), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [micro.COMMAND, *map(str, words)],
        env=os.environ | {"INFALIGN_SERVE_TOKEN": "secret", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert url == f"http://127.0.0.1:{port}/v1"
        with client_of(url, api_key="secret", max_retries=60) as client:
            assert client.chat.completions.create(**asked(model="reference")).model == "reference:standard"
        with client_of(url, api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        assert httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
        assert httpx2.get(f"http://127.0.0.1:{port}/metrics").status_code == 401
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")
