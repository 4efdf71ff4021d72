"""A served policy behind OpenAI's protocol: chat completions, models, health and metrics. Needs the ``serve`` extra.

A model is called ``POLICY`` or ``POLICY:PROCEDURE``, such as ``aware:worst-of-8``; docs/serving.md has the protocol.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infalign.core.errors import ConfigError, DataError
from infalign.core.settings import shown
from infalign.core.spelling import listed_names
from infalign.data.examples import parse_prompt
from infalign.models.conversations import decode
from infalign.sampling.engine import Sampling
from infalign.serving.answers import Answer, AnyServed, Asked, ServedPolicy, before_stop, parse_served
from infalign.serving.protocol import ApiError, Completion, Piece, as_error, parse_body
from infalign.serving.web import allowed, body_of, prometheus

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Send

MAX_BYTES = 4_000_000  # of a request
MISSING_MODEL = "model_not_found"
CLIENT_CLOSED_REQUEST = 499  # the status of an answer that nobody reads any more
Found = TypeVar("Found")


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

    def procedure(self, model: str) -> AnyServed:
        """Return the procedure of a model's name; only the server's own may be the user's code. Raises `ApiError`."""
        name = self.policy.name  # that of a folder may have a colon
        spelled = model.removeprefix(name)
        if spelled == model or spelled[:1] not in ("", ":"):
            others = listed_names(self.policy.others)
            more = f"; `infalign serve RUN --policy NAME` serves other policies of the run: {others}" if others else ""
            example = f"{name}:{self.policy.procedure.name}"
            said = f"this server has {name}; a procedure can follow it: {example}{more}"
            raise ApiError(404, f"the model {shown(model)} does not exist; {said}", param="model", code=MISSING_MODEL)
        try:
            own = spelled[1:] in ("", self.policy.procedure.name)
            return self.policy.procedure if own else parse_served(spelled[1:], loads=False)
        except ConfigError as error:
            raise ApiError(404, str(error), param="model", code=MISSING_MODEL) from error

    async def events(self, asked: Sequence[Asked], *, stream: bool) -> AsyncGenerator[Piece]:
        """Yield what becomes known of the answers, pieces of them if they ``stream``; who stops reading stops the work.

        Raises `ApiError` if there are too many.
        """
        if len(asked) > self.most:
            raise ApiError(400, f"this server handles {self.most} answers at once; lower n", param="n")
        if self.in_progress + len(asked) > self.most:
            self.counts["refused"] += len(asked)
            raise ApiError(503, f"{self.in_progress} answers are in progress; retry later", code="overloaded")
        self.in_progress += len(asked)
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        async def answer(choice: int, one: Asked) -> None:
            said = ""

            def say(text: str, found: Answer | None = None) -> None:
                nonlocal said
                queue.put_nowait(Piece(choice, text[len(said) :], found))
                said = text

            def more(token_ids: Sequence[int]) -> None:
                text = decode(self.policy.tokenizer, [token_ids])[0]
                new = held_back(text[len(said) :], one.sampling.stop)  # a stop cannot begin in what was said
                if new and not new.endswith("\N{REPLACEMENT CHARACTER}"):  # of a character that lacks bytes
                    say(said + new)

            try:
                found = await self.policy.answer(one, more if stream else None)
                say(found.text, found)
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
    reading = asyncio.Semaphore(1)  # prompt at a time: threads are left to draws and rewards

    async def chat(request: Request) -> Response:
        desk.counts["requests"] += 1
        found = await body_of(request, max_bytes=MAX_BYTES)
        async with reading:  # thousands of turns take a while
            body = await asyncio.to_thread(parse_body, found)
        seeded = policy.draws.seeded
        if body.seed is not None and not seeded:
            raise ApiError(400, "samples of an engine at a URL cannot be reproduced; leave seed out", param="seed")
        seed = secrets.randbelow(2**32) if body.seed is None else body.seed
        length = min(filter(None, (body.max_tokens, body.max_completion_tokens)), default=policy.max_new_tokens)
        sampling = Sampling(length, seed, greedy=body.temperature == 0.0, stop=body.stop)

        def read() -> list[Asked]:
            procedure = desk.procedure(body.model)
            prompt = [*parse_prompt({"prompt": [turn.model_dump() for turn in body.messages]}, "messages")]
            columns, choices = json.dumps(body.metadata or {}), range(body.n or 1)
            return policy.asked(prompt, procedure, sampling, choices=choices, columns=columns)

        try:
            async with reading:
                asked = await asyncio.to_thread(read)
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        model, tokens = f"{policy.name}:{asked[0].procedure.name}", len(asked[0].prompt.token_ids)
        head = Completion(model, seed if seeded else None, tokens)
        events = desk.events(asked, stream=bool(body.stream))
        if not body.stream:
            return JSONResponse(head.completion(await _unless_gone(request, _whole(events))))
        first = await _unless_gone(request, anext(events))  # what fails until then has its own status
        usage = body.stream_options is not None and body.stream_options.include_usage
        return _Events(head.chunks(first, events, usage=usage))

    async def models(request: Request) -> Response:
        names = dict.fromkeys([policy.name, *(f"{policy.name}:{p}" for p in (policy.procedure.name, "standard"))])
        about = {"object": "model", "created": begun, "owned_by": "infalign"}
        if asked := request.path_params.get("name"):
            desk.procedure(asked)  # raises for one that is not served
            return JSONResponse({"id": asked} | about)
        return JSONResponse({"object": "list", "data": [{"id": name} | about for name in names]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "policy": policy.name, "procedure": policy.procedure.name})

    async def metrics(request: Request) -> Response:
        scores = policy.scores.counts
        scored = {"scores": scores["rows"], "score_batches": scores["batches"]}
        counters = {**desk.counts, **policy.draws.counts, **scored, "score_seconds": scores["microseconds"] / 1e6}
        now = {"answers_in_progress": desk.in_progress, "draws_in_progress": policy.draws.in_progress}
        return prometheus(counters, now)

    def checked(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handled(request: Request) -> Response:
            try:
                if not allowed(request, token):
                    raise ApiError(401, "the token is missing or wrong", code="invalid_api_key")
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:
                return as_error(error).response()

        return handled

    routes = [
        Route("/v1/chat/completions", checked(chat), methods=["POST"]),
        Route("/v1/models", checked(models)),
        Route("/v1/models/{name:path}", checked(models)),
        Route("/health", health),
        Route("/metrics", checked(metrics)),
    ]
    return Starlette(routes=routes, exception_handlers={404: _unknown}, lifespan=lambda _: policy.working())


def held_back(text: str, stop: Sequence[str]) -> str:
    """Return the part of an unfinished text before a stop and before what may be the beginning of one."""
    text = before_stop(text, stop)
    return text[: min((_begun(text, one) for one in stop), default=len(text))]


def _begun(text: str, stop: str) -> int:
    """Return where a stop begins at the end of a text, which lacks the rest of it; the text's length if nowhere."""
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return place if place >= 0 else len(text)


async def _unknown(request: Request, _: Exception) -> Response:
    said = f"{shown(request.url.path)} does not exist; this server has /v1/chat/completions and /v1/models"
    return ApiError(404, said, code="unknown_url").response()


async def _whole(events: AsyncGenerator[Piece]) -> list[Answer]:
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
