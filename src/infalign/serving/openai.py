"""A served policy behind OpenAI's protocol: chat completions, models, health and metrics. Needs the ``serve`` extra.

A model is called ``POLICY`` or ``POLICY:PROCEDURE``, such as ``aware:worst-of-8``; docs/serving.md has the protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infalign.core.display import listed_names
from infalign.core.errors import ConfigError, DataError, InfalignError, PartialError
from infalign.core.settings import shown
from infalign.data.examples import parse_prompt
from infalign.method.procedures import Served, parse_procedure
from infalign.serving.answers import Answer, Asked, RefusedError, ServedPolicy
from infalign.serving.web import TooLargeError, allowed, body_of, prometheus

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Send

LOGGER = logging.getLogger(__name__)
MOST_BYTES = 4_000_000  # of a request: several times the text that the longest context holds
NOBODY = 499  # the status of an answer that nobody reads any more
NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
AS_IT_IS: dict[str, Any] = {  # values of further fields that ask for nothing: the policy is served as it was trained
    "temperature": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "stop": [],
    "tools": [],
}
Found = TypeVar("Found")
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1)]


class _Options(BaseModel):
    include_usage: bool = False


class _Body(BaseModel):
    """The fields of a request that are served; others are in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: list[Any]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: _Options | None = None


class _ApiError(Exception):
    """Why a request has no answer, as OpenAI says it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return JSONResponse(self.body, self.status, headers)


class _Event(NamedTuple):
    """More of a choice: text, and the whole answer with the last of it."""

    choice: int
    text: str
    answer: Answer | None


class _Said:
    """The text of a draw in the pieces in which it becomes known."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._text = tokenizer, ""

    def more(self, token_ids: Sequence[int]) -> str:
        """Return what further tokens add; nothing while a character lacks bytes."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self.rest(text)

    def rest(self, text: str) -> str:
        """Return what the whole text adds."""
        added = text[len(self._text) :]
        self._text = text
        return added


class _Events(StreamingResponse):
    """Server-sent events, whose source ends with the connection."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[str]

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


class Desk:
    """Answers requests to one policy, ``most`` answers at a time; more are refused until some are done."""

    def __init__(self, policy: ServedPolicy, *, most: int) -> None:
        self.policy, self.most = policy, most
        self.in_progress = 0
        self.counts: Counter[str] = Counter(requests=0, answers=0, refused=0)

    def procedure(self, model: str) -> Served:
        """Return the procedure of a model's name. Raises `_ApiError`."""
        name = self.policy.name  # that of a folder may have a colon
        spelled = model.removeprefix(name)
        if spelled == model or spelled[:1] not in ("", ":"):
            others = listed_names(self.policy.others)
            served = f"; `infalign serve RUN --policy NAME` serves the run's other policies: {others}" if others else ""
            raise _ApiError(
                404,
                f"the model {shown(model)} does not exist; this server has {name}, which can be followed by a "
                f"procedure: {name}:{self.policy.procedure.name}{served}",
                param="model",
                code="model_not_found",
            )
        try:
            return parse_procedure(spelled[1:]) if spelled else self.policy.procedure
        except ConfigError as error:
            raise _ApiError(404, str(error), param="model", code="model_not_found") from error

    async def events(self, asked: Sequence[Asked], *, stream: bool) -> AsyncGenerator[_Event]:
        """Yield what becomes known of the answers, pieces of them if they ``stream``; who stops reading stops the work.

        Raises `_ApiError` if there are too many.
        """
        if len(asked) > self.most:
            raise _ApiError(400, f"this server works on {self.most} answers at a time; lower n", param="n")
        if self.in_progress + len(asked) > self.most:
            self.counts["refused"] += len(asked)
            raise _ApiError(503, f"{self.in_progress} answers are in progress; ask again later", code="overloaded")
        self.in_progress += len(asked)
        queue: asyncio.Queue[_Event | Exception] = asyncio.Queue()

        async def answer(choice: int, one: Asked) -> None:
            said = _Said(self.policy.tokenizer)

            def more(token_ids: Sequence[int]) -> None:
                if text := said.more(token_ids):
                    queue.put_nowait(_Event(choice, text, None))

            try:
                found = await self.policy.answer(one, more if stream else None)
                queue.put_nowait(_Event(choice, said.rest(found.text), found))
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(answer(choice, one)) for choice, one in enumerate(asked)]
        try:
            left = len(tasks)
            while left:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event.answer is not None:
                    left -= 1
                    self.counts["answers"] += 1
                yield event
        finally:
            for task in tasks:
                task.cancel()
            self.in_progress -= len(asked)


def app(policy: ServedPolicy, *, token: str | None = None, most: int = 256) -> Starlette:
    """Return the application, which works on ``most`` answers at a time; the others get 503 with Retry-After.

    With a ``token`` every request but /health must carry it as ``Authorization: Bearer``.
    """
    desk, begun = Desk(policy, most=most), int(time.time())

    @asynccontextmanager
    async def working(_: Starlette) -> AsyncIterator[None]:
        async with policy.working():
            yield

    async def chat(request: Request) -> Response:
        desk.counts["requests"] += 1
        body = _body(await body_of(request, most_bytes=MOST_BYTES))
        procedure, seed = desk.procedure(body.model), body.seed
        if seed is None:
            seed = secrets.randbelow(2**32)
        elif not policy.draws.seeded:
            raise _ApiError(400, "draws of an engine at a URL cannot be asked for again; leave seed out", param="seed")
        prompt = _messages(body)
        length = min(filter(None, (body.max_tokens, body.max_completion_tokens)), default=None)
        try:
            asked = [
                policy.asked(prompt, procedure, seed=seed, choice=choice, length=length)
                for choice in range(body.n or 1)
            ]
        except DataError as error:
            raise _ApiError(400, str(error), param="messages") from error
        told = seed if policy.draws.seeded else None
        head = _Head(f"{policy.name}:{procedure.name}", told, len(asked[0].prompt.token_ids))
        events = desk.events(asked, stream=bool(body.stream))
        if not body.stream:
            return JSONResponse(head.completion(await _unless_gone(request, _whole(events))))
        first = await _unless_gone(request, anext(events))  # what fails until then has its own status
        usage = body.stream_options is not None and body.stream_options.include_usage
        return _Events(head.chunks(first, events, usage=usage))

    async def models(request: Request) -> Response:
        names = dict.fromkeys([policy.name, *(f"{policy.name}:{p}" for p in (policy.procedure.name, "standard"))])
        about = {"object": "model", "created": begun, "owned_by": "infalign"}
        return JSONResponse({"object": "list", "data": [{"id": name} | about for name in names]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "policy": policy.name, "procedure": policy.procedure.name})

    async def metrics(request: Request) -> Response:
        draws, scores = policy.draws.counts, policy.scores.counts
        counters = desk.counts | {
            "draws": draws["draws"],
            "draw_tokens": draws["tokens"],
            "abandoned_draws": draws["abandoned"],
            "scores": scores["rows"],
            "score_batches": scores["batches"],
            "score_seconds": scores["microseconds"] / 1e6,
        }
        now = {"answers_in_progress": desk.in_progress, "draws_in_progress": policy.draws.in_progress}
        return prometheus(counters, now)

    def checked(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handled(request: Request) -> Response:
            try:
                if not allowed(request, token):
                    raise _ApiError(401, "the token is missing or wrong", code="invalid_api_key")
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=NOBODY)
            except Exception as error:
                return _as_error(error).response()

        return handled

    routes = [
        Route("/v1/chat/completions", checked(chat), methods=["POST"]),
        Route("/v1/models", checked(models)),
        Route("/health", health),
        Route("/metrics", checked(metrics)),
    ]
    return Starlette(routes=routes, exception_handlers={404: _unknown}, lifespan=working)


async def _unknown(request: Request, _: Exception) -> Response:
    """Return the answer at a path that there is not."""
    said = f"there is no {shown(request.url.path)}; this server has /v1/chat/completions and /v1/models"
    return _ApiError(404, said, code="unknown_url").response()


def _body(content: bytes) -> _Body:
    """Return what was asked. Raises `_ApiError` for what is not served, naming the field."""
    try:
        body = _Body.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _ApiError(400, f"{place or 'the body'}: {first['msg']}", param=place or None) from error
    for name, value in (body.model_extra or {}).items():
        if value is not None and name not in NO_EFFECT and not (name in AS_IT_IS and value == AS_IT_IS[name]):
            other = f" or set it to {json.dumps(AS_IT_IS[name])}" if name in AS_IT_IS else ""
            raise _ApiError(
                400,
                f"{name} = {shown(value)} is not served: the policy answers as it was trained and measured; leave it "
                f"out{other}",
                param=name,
                code="unsupported_parameter",
            )
    return body


def _messages(body: _Body) -> list[dict[str, str]]:
    """Return the conversation; parts of text are joined. Raises `_ApiError` for one that does not end with the user."""
    if not body.messages:
        raise _ApiError(400, "messages is empty; give at least a message of the user", param="messages")
    turns = [dict(turn) if isinstance(turn, dict) else turn for turn in body.messages]
    for place, turn in enumerate(turns):
        if isinstance(turn, dict) and isinstance(parts := turn.get("content"), list):
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if len(texts) < len(parts):
                raise _ApiError(400, "only parts with a text are read", param=f"messages.{place}.content")
            turn["content"] = "".join(texts)
        for key in ("role", "content"):
            if isinstance(turn, dict) and not isinstance(turn.get(key), str):
                raise _ApiError(400, f"the {key} of a message is not text", param=f"messages.{place}.{key}")
    try:
        return list(parse_prompt({"prompt": turns}, "messages"))
    except DataError as error:
        raise _ApiError(400, str(error), param="messages") from error


def _as_error(error: Exception) -> _ApiError:
    """Return what an exception says to the client."""
    if isinstance(error, _ApiError):
        return error
    if isinstance(error, TooLargeError):
        return _ApiError(413, str(error))
    if isinstance(error, RefusedError):
        return _ApiError(400, str(error), param="model")
    if isinstance(error, PartialError):
        return _ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, InfalignError):
        return _ApiError(500, str(error))
    LOGGER.error("a request failed", exc_info=error)
    return _ApiError(500, f"unexpected {type(error).__name__}; the server's log says where")


async def _whole(events: AsyncGenerator[_Event]) -> list[Answer]:
    """Return the answers, in the order of the choices."""
    async with aclosing(events):
        found = {event.choice: event.answer async for event in events if event.answer is not None}
    return [found[choice] for choice in sorted(found)]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Return what ``work`` returns. Raises ClientDisconnect if the client goes before, and cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()


@dataclass(frozen=True, slots=True)
class _Head:
    """What all parts of the answer to one request share."""

    model: str
    seed: int | None  # with which the same request gives the same answer
    prompt_tokens: int
    identity: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            self._choice(place, answer) | {"message": {"role": "assistant", "content": answer.text}}
            for place, answer in enumerate(answers)
        ]
        return self._part("chat.completion", choices) | {"usage": self._usage(answers)}

    async def chunks(self, first: _Event, events: AsyncGenerator[_Event], *, usage: bool) -> AsyncGenerator[str]:
        """Yield server-sent events; what fails meanwhile is one of them."""
        begun, answers, event = set[int](), list[Answer](), first
        async with aclosing(events):
            try:
                while True:
                    delta = {"content": event.text} | ({} if event.choice in begun else {"role": "assistant"})
                    begun.add(event.choice)
                    choice = self._choice(event.choice, event.answer) | {"delta": delta}
                    yield _sent(self._part("chat.completion.chunk", [choice]))
                    answers += [] if event.answer is None else [event.answer]
                    event = await anext(events)
            except StopAsyncIteration:
                pass
            except Exception as error:
                yield _sent(_as_error(error).body)
                return
        if usage:
            yield _sent(self._part("chat.completion.chunk", []) | {"usage": self._usage(answers)})
        yield "data: [DONE]\n\n"

    def _part(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.identity, "object": kind, "created": self.created, "model": self.model}
        seed = {} if self.seed is None else {"infalign": {"seed": self.seed}}
        return about | {"choices": choices} | seed

    def _choice(self, place: int, answer: Answer | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place, "logprobs": None}
        if answer is None:
            return choice | {"finish_reason": None}
        about = {
            "draws": len(answer.draws),
            "served": answer.served,
            "rewards": answer.rewards,
            "base_draws": len(answer.base_draws),
        }
        return choice | {"finish_reason": answer.draws[answer.served].finish, "infalign": about}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Return the tokens of the prompt, once, and of all draws, served or not."""
        drawn = sum(answer.tokens for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
        }


def _sent(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
