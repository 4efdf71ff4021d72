"""The calibrated and transformed reward over HTTP, for trainers that ask a server. Needs the ``serve`` extra.

POST /get_reward takes OpenRLHF's body, ``{query: […], prompts: […], labels: […]}``, and slime's, ``{prompt, response,
label}``. A label is the JSON object that `integrations.openrlhf` describes, as text or as it is. Rows that wait at the
same time are scored together. GET /health says what is served, GET /metrics counts in Prometheus' format.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infalign.core.errors import DataError, InfalignError, RequestError
from infalign.data.messages import Message, read_text
from infalign.integrations.environment import calibrated_row
from infalign.integrations.openrlhf import response
from infalign.method.by_name import columns_of
from infalign.method.reward import CalibratedReward, Score
from infalign.serving.batches import Batches
from infalign.serving.web import TooLargeError, allowed, body_of, prometheus, read_json

Row = tuple[list[Message], str, Any, dict[str, Any]]  # prompt, response, reference rewards, columns
MAX_CHARACTERS = 1_000_000  # of a response with its prompt, which tokenizers take seconds for
MAX_BYTES = 64_000_000  # of a request: thousands of rows with prompts and rollouts of the reference


def app(reward: CalibratedReward, words: Any | None, *, token: str | None = None) -> Starlette:
    """Return the application; ``words`` is the policy's tokenizer, without which OpenRLHF's body is refused.

    With a ``token`` every request but /health must carry it as ``Authorization: Bearer``.
    """

    def scores(rows: list[Row]) -> list[Score]:
        prompts, responses, references, columns = map(list, zip(*rows, strict=True))
        return reward.scores(prompts, responses, references, columns_of(columns))

    batches = Batches[Row, Score](scores)
    reading = asyncio.Semaphore(1)  # request at a time: threads are left to rewards

    @asynccontextmanager
    async def working(_: Starlette) -> AsyncGenerator[None]:
        task = asyncio.create_task(batches.work())
        yield
        task.cancel()

    async def get_reward(request: Request) -> Response:
        if not allowed(request, token):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        try:
            content = await body_of(request, max_bytes=MAX_BYTES)
            async with reading:
                single, rows = await asyncio.to_thread(_rows, content, words)
            scores = await batches.done(rows)
            if single:
                answer = scores[0]._asdict()
            else:
                logs = {"win_rate": [s.win_rate for s in scores], "reward": [s.reward for s in scores]}
                answer = {"rewards": [s.score for s in scores], "scores": logs["reward"], "extra_logs": logs}
        except (InfalignError, RecursionError) as error:  # a label may be nested deeper than can be written again
            refused = isinstance(error, DataError | RequestError | RecursionError)
            status = 413 if isinstance(error, TooLargeError) else 422 if refused else 500
            return JSONResponse({"error": str(error)}, status)
        return JSONResponse(answer)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "transform": reward.__name__})

    async def metrics(request: Request) -> Response:
        if not allowed(request, token):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        counted = {name: batches.counts[name] for name in ("rows", "failed", "batches")}
        return prometheus({**counted, "seconds": batches.counts["microseconds"] / 1e6})

    routes = [Route("/get_reward", get_reward, methods=["POST"]), Route("/health", health), Route("/metrics", metrics)]
    return Starlette(routes=routes, lifespan=working)


def _rows(content: bytes, words: Any | None) -> tuple[bool, list[Row]]:
    """Return what a body asks to score, and whether it is slime's, with a single row."""
    match read_json(content):
        case {"query": _} as body:
            if words is None:
                raise DataError("to read the policy's queries, start the server with INFALIGN_TOKENIZER")
            columns = [body.get(name) for name in ("query", "prompts", "labels")]
            if not all(isinstance(column, list) for column in columns) or len({*map(len, columns)}) > 1:
                raise DataError("query, prompts and labels must be lists of the same length")
            asked = list(zip(*columns, strict=True))
            for query, prompt, _ in asked:
                _check_text(query, "query")
                _check_text(prompt, "prompts")
            return False, [calibrated_row(label, response(query, prompt, words)) for query, prompt, label in asked]
        case {"response": said, "label": label}:
            _check_text(said, "response")
            return True, [calibrated_row(label, said)]
    raise DataError("the body must have query, prompts and labels, or prompt, response and label")


def _check_text(text: Any, column: str) -> None:
    if len(read_text(text, column)) > MAX_CHARACTERS:
        raise DataError(f"a response has {len(text):,} characters, and no context holds {MAX_CHARACTERS:,}; shorten it")
