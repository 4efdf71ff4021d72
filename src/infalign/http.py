"""Requests to servers that may fail for a while: engines and rewards. Needs the ``serve`` extra."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2


LONGEST_WAIT = 30.0  # seconds between two requests, whatever the server asks for


def post(client: httpx2.Client, url: str, body: object, *, retry_seconds: float) -> httpx2.Response:
    """Return the answer to a POST of ``body`` as JSON, repeated with back-off while a fault `may_pass`.

    The whole answer must come within the client's read timeout. The wait that a server asks for in Retry-After is
    granted, up to half a minute. Raises httpx2.HTTPError, that of the last attempt.
    """
    import stamina

    def wait(error: Exception) -> bool | float:
        response = getattr(error, "response", None)
        asked = "" if response is None else response.headers.get("Retry-After", "")
        return min(float(asked), LONGEST_WAIT) if may_pass(error) and asked.isdecimal() else may_pass(error)

    for attempt in stamina.retry_context(wait, attempts=None, timeout=retry_seconds, wait_max=LONGEST_WAIT):
        with attempt:
            answer = _whole_answer(client, url, body)
            answer.raise_for_status()
    return answer


def _whole_answer(client: httpx2.Client, url: str, body: object) -> httpx2.Response:
    import httpx2

    assert client.timeout.read is not None
    deadline = time.monotonic() + client.timeout.read  # which httpx grants to each part
    received = bytearray()
    with client.stream("POST", url, json=body) as answer:
        for part in answer.iter_bytes():
            received += part
            if time.monotonic() > deadline:
                raise httpx2.ReadTimeout("the answer began and did not end")
    headers = [(name, value) for name, value in answer.headers.items() if name != "content-encoding"]
    return httpx2.Response(answer.status_code, headers=headers, content=bytes(received), request=answer.request)


def quoted(text: str, key: str | None) -> str:
    """Return the first 300 characters of what a server said on one line, without the API key and control characters."""
    line = " ".join((text.replace(key, "***") if key else text).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line[:300])


def may_pass(error: Exception) -> bool:
    """Return whether the same request can succeed later: a broken connection, no answer in time, 408, 429 or 5xx."""
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)
