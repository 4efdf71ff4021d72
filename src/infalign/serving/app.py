"""A served policy behind OpenAI's protocol: chat completions, models, health and metrics. Needs the ``serve`` extra.

A model is called ``POLICY`` or ``POLICY:PROCEDURE``, such as ``aware:worst-of-8``; docs/serving.md has the protocol.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infalign.core.errors import ConfigError, DataError
from infalign.core.settings import shortened
from infalign.core.spelling import listed_names
from infalign.data.examples import parse_prompt
from infalign.sampling.engine import Sampling
from infalign.serving.answers import Answer, AnyServed, Asked, ServedPolicy, parse_served
from infalign.serving.protocol import ApiError, as_error, chunks, completion, parse_body
from infalign.serving.web import allowed, body_of, prometheus

MAX_BYTES = 4_000_000  # of a request
MISSING_MODEL = "model_not_found"
CLIENT_CLOSED_REQUEST = 499  # the status of an answer that nobody reads any more


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
            raise ApiError(
                404, f"the model {shortened(model)} does not exist; {said}", param="model", code=MISSING_MODEL
            )
        try:
            own = spelled[1:] in ("", self.policy.procedure.name)
            return self.policy.procedure if own else parse_served(spelled[1:], loads=False)
        except ConfigError as error:
            raise ApiError(404, str(error), param="model", code=MISSING_MODEL) from error

    async def answers(self, asked: Sequence[Asked]) -> list[Answer]:
        """Return the answers; who stops waiting stops the work. Raises `ApiError` if there are too many."""
        if len(asked) > self.most:
            raise ApiError(400, f"this server handles {self.most} answers at once; lower n", param="n")
        if self.in_progress + len(asked) > self.most:
            self.counts["refused"] += len(asked)
            raise ApiError(503, f"{self.in_progress} answers are in progress; retry later", code="overloaded")
        self.in_progress += len(asked)
        tasks = [asyncio.create_task(self.policy.answer(one)) for one in asked]
        try:
            answers = await asyncio.gather(*tasks)
            self.counts["answers"] += len(answers)
            return answers
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
        content = await body_of(request, max_bytes=MAX_BYTES)
        async with reading:  # thousands of turns take a while
            body = await asyncio.to_thread(parse_body, content)
        seeded = policy.draws.seeded
        if body.seed is not None and not seeded:
            raise ApiError(400, "samples of an engine at a URL cannot be reproduced; leave seed out", param="seed")
        seed = secrets.randbelow(2**32) if body.seed is None else body.seed
        length = min(filter(None, (body.max_tokens, body.max_completion_tokens)), default=policy.max_new_tokens)
        sampling = Sampling(length, seed, greedy=body.temperature == 0.0, stop=body.stop)

        def read() -> list[Asked]:
            procedure = desk.procedure(body.model)
            prompt = [*parse_prompt({"prompt": [turn.model_dump() for turn in body.messages]}, "messages").prompt]
            columns, choices = json.dumps(body.metadata or {}), range(body.n or 1)
            return policy.asked(prompt, procedure, sampling, choices=choices, columns=columns)

        try:
            async with reading:
                asked = await asyncio.to_thread(read)
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        model, tokens = f"{policy.name}:{asked[0].procedure.name}", len(asked[0].prompt.token_ids)
        answers = await _unless_gone(request, desk.answers(asked))
        whole = completion(model, seed if seeded else None, tokens, answers)
        if not body.stream:
            return JSONResponse(whole)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return Response("".join(chunks(whole, usage=usage)), media_type="text/event-stream")

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


async def _unknown(request: Request, _: Exception) -> Response:
    said = f"{shortened(request.url.path)} does not exist; this server has /v1/chat/completions and /v1/models"
    return ApiError(404, said, code="unknown_url").response()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, list[Answer]]) -> list[Answer]:
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
