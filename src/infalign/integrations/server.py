"""The calibrated and transformed reward over HTTP, for trainers that ask a server. Needs the ``serve`` extra.

POST /get_reward takes OpenRLHF's body, ``{query: […], prompts: […], labels: […]}``, and slime's, ``{prompt, response,
label}``. A label is the JSON object that `integrations.openrlhf` describes, as text or as it is. Rows that wait at the
same time are scored together. GET /health says what is served, GET /metrics counts in Prometheus' format.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from infalign.data.examples import Message
from infalign.errors import DataError, InfalignError
from infalign.integrations.configured import conversation
from infalign.integrations.openrlhf import labelled, response
from infalign.method.reward import CalibratedReward, Score

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_AT_ONCE = 1024  # rows in one call of the reward


class Row(NamedTuple):
    """What is scored."""

    prompt: list[Message]
    response: str
    reference_rewards: Any


@dataclass
class Batches:
    """Scores rows of all requests in one thread: what waits while a batch is scored is the next batch."""

    reward: CalibratedReward
    counts: Counter[str] = field(default_factory=Counter)
    _waiting: asyncio.Queue[tuple[Row, asyncio.Future[Score]]] = field(default_factory=asyncio.Queue)

    async def score(self, rows: list[Row]) -> list[Score]:
        """Return the scores of one request; raises as `CalibratedReward.scores`, for these rows only."""
        futures: list[asyncio.Future[Score]] = [asyncio.get_running_loop().create_future() for _ in rows]
        for pair in zip(rows, futures, strict=True):
            self._waiting.put_nowait(pair)
        return await asyncio.gather(*futures)

    async def work(self) -> None:
        """Score what comes, for ever."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < MOST_AT_ONCE and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            begun = time.perf_counter()
            found = await asyncio.to_thread(self._scored, [row for row, _ in batch])
            self.counts["batches"] += 1
            self.counts["rows"] += len(batch)
            self.counts["microseconds"] += round(1e6 * (time.perf_counter() - begun))
            for (_, future), one in zip(batch, found, strict=True):
                if future.cancelled():
                    continue
                if isinstance(one, Exception):
                    self.counts["failed"] += 1
                    future.set_exception(one)
                else:
                    future.set_result(one)

    def _scored(self, rows: list[Row]) -> list[Score | Exception]:
        """Return the score of each row, or why it has none; a bad row does not spoil the others."""
        try:
            return [*self.reward.scores(*map(list, zip(*rows, strict=True)))]
        except Exception as error:
            half = len(rows) // 2
            return [*self._scored(rows[:half]), *self._scored(rows[half:])] if half else [error]


def app(reward: CalibratedReward, words: Any | None, *, token: str | None = None) -> Starlette:
    """Return the application; ``words`` is the policy's tokenizer, without which OpenRLHF's body is refused.

    With a ``token`` every request but /health must carry it as ``Authorization: Bearer``.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    batches = Batches(reward)

    @asynccontextmanager
    async def working(_: Starlette) -> AsyncGenerator[None]:
        task = asyncio.create_task(batches.work())
        yield
        task.cancel()

    def allowed(request: Request) -> bool:
        given = request.headers.get("Authorization", "")
        return token is None or secrets.compare_digest(given.encode(), f"Bearer {token}".encode())

    async def get_reward(request: Request) -> Response:
        if not allowed(request):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        try:
            body = json.loads(await request.body())
            if isinstance(body, dict) and "query" in body:
                if words is None:
                    raise DataError("start the server with INFALIGN_TOKENIZER to read queries of the policy")
                rows = [_labelled(response(q, p, words), label) for q, p, label in _columns(body)]
                scores = await batches.score(rows)
                logs = {"win_rate": [s.win_rate for s in scores], "reward": [s.reward for s in scores]}
                answer = {"rewards": [s.score for s in scores], "scores": logs["reward"], "extra_logs": logs}
            elif isinstance(body, dict) and "response" in body and "label" in body:
                (one,) = await batches.score([_labelled(str(body["response"]), body["label"])])
                answer = one._asdict()
            else:
                raise DataError("the body has neither query, prompts and labels nor prompt, response and label")
        except ValueError as error:
            return JSONResponse({"error": f"the body is no JSON: {error}"}, 422)
        except InfalignError as error:
            return JSONResponse({"error": str(error)}, 422 if isinstance(error, DataError) else 500)
        return JSONResponse(answer)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "transform": reward.shaping.name})

    async def metrics(request: Request) -> Response:
        if not allowed(request):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        counted = {name: batches.counts[name] for name in ("rows", "failed", "batches")}
        values = {**counted, "seconds": batches.counts["microseconds"] / 1e6}
        lines = (f"# TYPE infalign_{n}_total counter\ninfalign_{n}_total {v}\n" for n, v in values.items())
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/get_reward", get_reward, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, lifespan=working)


def _columns(body: dict[str, Any]) -> list[tuple[str, str, Any]]:
    columns = [body.get(name) for name in ("query", "prompts", "labels")]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < 3 or len({*map(len, lists)}) > 1:
        raise DataError("query, prompts and labels must be lists of one length")
    if not all(isinstance(text, str) for text in (*lists[0], *lists[1])):
        raise DataError("query and prompts must be texts")
    return [*zip(*lists, strict=True)]


def _labelled(said: str, label: Any) -> Row:
    row = labelled(label)
    return Row(conversation(row["prompt"], row.get("prompt_id")), said, row["reference_rewards"])
