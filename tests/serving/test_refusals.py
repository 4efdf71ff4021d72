"""What a server does not answer: requests that are refused, too many, and those that nobody waits for."""

import asyncio
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import micro
import openai
import pytest
from clients import PROMPT, asked, client_of, concurrently, metrics, policy, serving, until
from openai import AsyncOpenAI, OpenAI
from pydantic import ValidationError

from infalign.core.errors import RequestError
from infalign.method.by_name import ByName
from infalign.models.conversations import prompt_ids
from infalign.models.pretrained import load_policy
from infalign.models.tokenizers import load_tokenizer
from infalign.serving.app import MAX_BYTES
from infalign.serving.batches import Batches
from infalign.serving.draws import LocalDraws
from infalign.serving.policy import _scored
from infalign.serving.protocol import ApiError, parse_body

TURN = {"role": "user", "content": PROMPT}


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "gpt-4"}, 404, "model", "this server has aware"),
        ({"model": "reference"}, 404, "model", "--policy NAME` serves other policies of the run: reference"),
        ({"model": "aware:best-of-none"}, 404, "model", "unknown procedure 'best-of-none'"),
        ({"model": "aware:os:system"}, 404, "model", "unknown procedure 'os:system'"),
        ({"model": f"aware:{__file__}:TURN"}, 404, "model", "unknown procedure"),
        ({"model": "aware:best-of-2000"}, 400, "model", "the limit is 1,024"),
        ({"model": "aware-best-of-2"}, 404, "model", "does not exist"),
        ({"model": "aware:2nd-best-of-1000000000"}, 404, "model", "from 1 to 100,000"),
        ({"model": "aware:rewind:0.75:4", "max_tokens": 3}, 400, "model", "is unknown except for whole responses"),
        ({"model": "aware:rewind:0.75:4", "stop": ["."]}, 400, "model", "leave max_tokens and stop out"),
        ({"model": "aware:rewind:0.99:2"}, 400, "model", "are too few for the quantile 0.99"),
        ({"temperature": 0.7}, 400, "temperature", "leave temperature out or set it to 1"),
        ({"top_p": 0.9}, 400, "top_p", "is not supported"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "tools are not supported"),
        ({"model": f"aware:majority-of-{'9' * 900}"}, 404, "model", "from 1 to 100,000, found 900 digits"),
        ({"model": f"aware:majority-of-{'9' * 5000}"}, 400, "model", "at most 1000 characters"),
        ({"stop": list("abcde")}, 400, "stop", "at most 4"),
        ({"extra_body": {"top_k": 5}}, 400, "top_k", "leave it out"),
        ({"messages": []}, 400, "messages", "messages: List should have at least 1 item"),
        ({"messages": [TURN | {"role": "critic"}]}, 400, "messages", "found 'critic'"),
        ({"messages": [TURN | {"role": "assistant"}]}, 400, "messages", "does not end with a user turn"),
        ({"messages": [TURN | {"content": "word " * 300}]}, 400, "messages", "up to 12, it exceeds the model's"),
        ({"messages": [TURN] * 300}, 400, "messages", "it exceeds the model's context"),
        ({"messages": [TURN | {"content": None}]}, 400, "messages.0.content", "should be a valid string"),
        ({"messages": [TURN | {"content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "only text parts"),
        ({"messages": [TURN | {"content": [{"text": {"a": 1}}]}]}, 400, "messages.0.content", "only text parts"),
        ({"messages": [TURN] * 2049}, 400, "messages", "at most 2048 items"),
        ({"extra_body": {"f" * 5000: 5}}, 400, "f" * 1000, "fffff"),
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
    said = f"'/v1/{path}' does not exist; this server has /v1/chat/completions and /v1/models"
    about = {"type": "invalid_request_error", "param": None, "code": "unknown_url"}
    assert refused.value.body == {"message": said, **about}


def test_a_prompt_that_is_too_long_for_the_base_is_refused(trained_run: Path, client: OpenAI) -> None:
    """A short answer of the policy fits beside it, but the threshold takes draws of the base of the run's length."""
    tokenizer, talk = load_tokenizer(trained_run / "data" / "tokenizer"), dict(TURN)
    while len(prompt_ids(tokenizer, [[talk]])[0]) < 182:
        talk["content"] += "."
    short = {"messages": [talk], "max_tokens": 1}
    assert client.chat.completions.create(**asked() | short).choices
    with pytest.raises(openai.BadRequestError, match="the base policy's quantile is unknown"):
        client.chat.completions.create(**asked(model="aware:rewind:0.75:4") | short)


def with_field(field: bytes) -> bytes:
    """Return a request with a further field."""
    return json.dumps(asked()).encode()[:-1] + b", " + field + b"}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON that can be read"),
        (b"[]", "the body: Input should be an object"),
        (b'{"model": "aware"}', "messages: Field required"),
        (with_field(b'"model": "aware:standard"'), "the name 'model' occurs twice"),
        (with_field(b'"metadata": {"a": 1, "a": 2}'), "the name 'a' occurs twice"),
        (with_field(b'"metadata": {"a": NaN}'), "NaN is no number"),
        (with_field(b'"metadata": {"a": "\\ud800"}'), "half a surrogate pair"),
        (with_field(b'"metadata": {"a": "\\udc00"}'), "surrogate"),
        (with_field(b'"metadata": {"a": ' + b"9" * 5000 + b"}"), "4300 digits"),
        (with_field(b'"metadata": {"a": ' + b"[" * 500 + b"]" * 500 + b"}"), "recursion limit"),
        (json.dumps(asked()).encode("utf-16"), "is not JSON that can be read"),
    ],
)
def test_other_bodies_are_refused(url: str, content: bytes, said: str) -> None:
    """What is no JSON, what JSON leaves open, JSON that is no object, and no messages."""
    found = httpx2.post(f"{url}/chat/completions", content=content)
    assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in found.json()["error"]["message"]


@pytest.mark.parametrize("bad", [{"messages": [{"role": 1, "content": 2}] * 9000}, {"stop": [1] * 80_000}])
def test_the_first_error_ends_the_reading(bad: dict[str, Any]) -> None:
    """Whatever else is wrong with a request is not looked at, as thousands of errors take seconds to make."""
    with pytest.raises(ApiError) as refused:
        parse_body(json.dumps(asked() | bad).encode())
    assert isinstance(refused.value.__cause__, ValidationError)
    assert refused.value.__cause__.error_count() <= 2  # a turn has two fields


@pytest.mark.parametrize("told", [True, False])
def test_a_body_that_no_context_holds_is_not_read_to_its_end(url: str, told: bool) -> None:
    """A client cannot fill the server's memory, whether or not it tells the length first; the next one is served."""
    content = iter([b" " * MAX_BYTES, json.dumps(asked()).encode()])
    found = httpx2.post(f"{url}/chat/completions", content=b"".join(content) if told else content)
    assert found.status_code == 413
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert f"more than {MAX_BYTES:,} bytes" in found.json()["error"]["message"]
    whole = json.dumps(asked(model="aware:standard")).encode().ljust(MAX_BYTES)
    assert httpx2.post(f"{url}/chat/completions", content=whole, timeout=60).status_code == 200


class Gate:
    """A reward that waits until it is opened, and then is `micro.brightness`."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, rows: list[Any]) -> list[float]:
        self.open.wait(600)
        return micro.brightness([], [text for _, text, _ in rows])


def test_more_than_it_can_do_is_refused_and_done_later(trained_run: Path) -> None:
    """Beyond ``most`` answers a client is told to ask again, and OpenAI's client does; what was taken is answered."""
    gate = Gate()
    with serving(policy(trained_run, scores=Batches(gate)), most=3) as url:
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


def test_a_client_that_goes_frees_its_work(trained_run: Path) -> None:
    """Of the draws that a client asked for those are abandoned that are not made when it goes; the next is served."""
    model, tokenizer = load_policy(trained_run / "models" / "aware")
    with serving(policy(trained_run, draws=LocalDraws(model, tokenizer, rows=2))) as url:

        async def ask_and_go() -> None:
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
                call = asyncio.create_task(client.chat.completions.create(**asked(model="aware:best-of-64", n=128)))
                while not (await asyncio.to_thread(metrics, url))["infalign_draws_total"]:
                    pass
                call.cancel()

        asyncio.run(ask_and_go())
        under_way = ("infalign_answers_in_progress", "infalign_draws_in_progress")
        found = until(url, lambda found: not any(found[name] for name in under_way))
        assert found["infalign_abandoned_draws_total"] > 0
        assert found["infalign_abandoned_draws_total"] + found["infalign_draws_total"] == 8192
        assert concurrently(url, [asked()])[0].choices[0].message.content


def test_a_request_without_the_columns_of_the_reward_is_refused(trained_run: Path) -> None:
    """The answer that a checker needs comes as metadata."""

    def check(responses: list[str], answer: list[str]) -> list[float]:
        return [float(true in said) for said, true in zip(responses, answer, strict=True)]

    served = policy(trained_run, scores=Batches(partial(_scored, ByName(check))))
    with serving(served) as url, client_of(url) as client:
        assert client.chat.completions.create(**asked(metadata={"answer": "4"})).choices
        with pytest.raises(openai.BadRequestError, match=r"needs the column answer.* come from metadata") as refused:
            client.chat.completions.create(**asked())
    assert refused.value.param == "metadata"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(ValueError("no reward"), 500, "server_error"), (RequestError("too long"), 400, "invalid_request_error")],
)
def test_a_reward_that_fails_is_said_and_spoils_no_other(
    trained_run: Path, error: Exception, status: int, kind: str
) -> None:
    """The answer whose reward is missing is an error, streamed or not: of the server, or of what it was asked."""

    def picky(rows: list[Any]) -> list[float]:
        if any("bad" in columns for _, _, columns in rows):
            raise error
        return [0.0] * len(rows)

    with serving(policy(trained_run, scores=Batches(picky))) as url:
        requests = [asked(metadata={"kind": "bad" if i % 3 == 0 else "good"}, stream=i % 2 == 0) for i in range(9)]
        for i, answer in enumerate(concurrently(url, requests, max_retries=0)):
            if i % 3 == 0:
                assert isinstance(answer, openai.APIStatusError)
                assert (answer.status_code, answer.type) == (status, kind)
            else:
                assert not isinstance(answer, Exception)
        assert metrics(url)["infalign_answers_in_progress"] == 0
