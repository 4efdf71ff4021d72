"""Policies to serve, and clients that ask for their answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import listening
from openai import AsyncOpenAI, OpenAI

from infalign.serving.answers import ServedPolicy
from infalign.serving.app import app
from infalign.serving.policy import open_policy


@contextmanager
def serving(policy: ServedPolicy, **options: Any) -> Iterator[str]:
    """Serve a policy with uvicorn in a thread and give the URL."""
    with listening.listening(app(policy, **options)) as url:
        yield f"{url}/v1"


def policy(run: Path, **changes: Any) -> ServedPolicy:
    """Return a freshly loaded policy, as it can be served once."""
    return replace(open_policy(run), **changes)


def client_of(url: str, **options: Any) -> OpenAI:
    """Return OpenAI's client, which repeats nothing."""
    return OpenAI(**{"base_url": url, "api_key": "none", "max_retries": 0} | options)


PROMPT = "How do I bake bread?"


def asked(text: Any = PROMPT, model: str = "aware", **more: Any) -> dict[str, Any]:
    """Return a request."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def metrics(url: str) -> dict[str, float]:
    """Return what the server counts."""
    return listening.metrics(url.removesuffix("/v1"))


def until(url: str, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Wait until the server's metrics fulfil a condition, and return them."""
    while not holds(found := metrics(url)):
        time.sleep(0.01)
    return found


def concurrently(url: str, requests: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Return the answers to requests of as many clients at once, or the errors."""

    async def all_of_them() -> list[Any]:
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=600, **options) as client:
            calls: list[Awaitable[Any]] = [client.chat.completions.create(**request) for request in requests]
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())
