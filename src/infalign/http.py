"""Requests to servers that may fail for a while: engines and rewards. Needs the ``serve`` extra."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from infalign.errors import ConfigError

if TYPE_CHECKING:
    import httpx2
    from stamina.instrumentation import RetryDetails


LONGEST_WAIT = 30.0  # seconds between two requests, whatever the server asks for
SECRET = re.compile(r"key|token|secret|passw|pwd|auth|credential|signature|^sig$", re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LOGGER = logging.getLogger(__name__)


def checked_url(url: str) -> str:
    """Return the URL of a server. Raises ValueError, which does not quote it, for one that is none or holds a secret.

    A URL is recorded and shown; so a user name, a password and parameters such as ``api_key`` are refused.
    """
    parts = urlsplit(url)  # raises ValueError for an invalid host
    if "@" in url:
        raise ValueError("a URL with a user or a password would be written into the run directory; use api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL starts with http:// or https:// and a host")
    if secret := next(
        (name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if SECRET.search(name)), None
    ):
        raise ValueError(f"a URL with {secret}=… would be written into the run directory; use api_key_env")
    return url


def checked_variable(name: str) -> str:
    """Return the name of an environment variable. Raises ValueError, which does not quote it: it may be a key."""
    if VARIABLE.fullmatch(name) is None:
        raise ValueError("api_key_env is the name of a variable (letters, digits and _), not the key itself")
    return name


def api_key(variable: str | None) -> str | None:
    """Return the key that an environment variable holds, None without a variable.

    Raises ConfigError, which does not quote it, for one that is not set or cannot be in a header.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"the environment variable {variable}, which should hold the API key, is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the environment variable {variable} holds a line break, a space or another character that no API key "
            "has; set it to the key alone"
        )
    return key


def post(client: httpx2.Client, url: str, body: object, *, retry_seconds: float, most_bytes: int) -> httpx2.Response:
    """Return the answer to a POST of ``body`` as JSON, repeated with back-off while a fault `may_pass`.

    Connection, headers and the whole answer must come within the client's read timeout, and the answer may have
    ``most_bytes``, decompressed. The wait that a server asks for in Retry-After is granted, up to half a minute. Each
    repetition is logged. Raises httpx2.HTTPError, that of the last attempt.
    """
    import stamina

    def wait(error: Exception) -> bool | float:
        response = getattr(error, "response", None)
        asked = "" if response is None else response.headers.get("Retry-After", "")
        return min(float(asked), LONGEST_WAIT) if may_pass(error) and asked.isdecimal() else may_pass(error)

    with _said(url, client, retry_seconds):
        for attempt in stamina.retry_context(wait, attempts=None, timeout=retry_seconds, wait_max=LONGEST_WAIT):
            with attempt:
                answer = _whole_answer(client, url, body, most_bytes)
                answer.raise_for_status()
    return answer


@contextmanager
def _said(url: str, client: httpx2.Client, retry_seconds: float) -> Iterator[None]:
    """Log each repetition with URL, reason and wait, in place of stamina's own line."""
    from stamina.instrumentation import get_on_retry_hooks, set_on_retry_hooks

    key = client.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def say(details: RetryDetails) -> None:
        left = max(0.0, retry_seconds - details.waited_so_far)
        error, response = details.caused_by, getattr(details.caused_by, "response", None)
        why = quoted(f"{type(error).__name__}: {error}", key) if response is None else f"status {response.status_code}"
        LOGGER.warning("%s: %s; again in %.0f s, for %.0f s more", url, why, details.wait_for, left)

    before = get_on_retry_hooks()
    set_on_retry_hooks([say])
    try:
        yield
    finally:
        set_on_retry_hooks(before)


def _whole_answer(client: httpx2.Client, url: str, body: object, most_bytes: int) -> httpx2.Response:
    """Return the answer, whole, to one attempt; after the client's read timeout its connection is cut."""
    import httpx2

    seconds = client.timeout.read  # which httpx grants to each part that it receives
    assert seconds is not None
    received, said = bytearray(), "no answer"
    with _cut_after(seconds) as (connected, was_cut):
        try:
            with client.stream("POST", url, json=body, extensions={"trace": connected}) as answer:
                said = "the answer began and did not end"
                for part in answer.iter_bytes():
                    received += part
                    if len(received) > most_bytes:
                        raise httpx2.DecodingError(f"the answer has more than {most_bytes:,} bytes")
        except httpx2.TransportError as error:
            if was_cut():
                raise httpx2.ReadTimeout(f"{said} within {seconds:g} s") from error
            raise
    # No other header: charset and encoding would let the server choose a codec.
    asked = answer.headers.get("Retry-After", "")
    headers = {"Retry-After": asked} if asked.isascii() else {}
    return httpx2.Response(answer.status_code, headers=headers, content=bytes(received), request=answer.request)


@contextmanager
def _cut_after(seconds: float) -> Iterator[Any]:
    """Yield a trace for httpx, and whether the connections that it has seen were cut, ``seconds`` from now.

    Neither dripped headers nor endless `100 Continue` let a request outlive that, as they do the time-outs of httpx.
    """
    sockets: list[socket.socket] = []
    late = threading.Event()

    def connected(event: str, info: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            sockets.append(info["return_value"].get_extra_info("socket"))
            if late.is_set():
                cut()

    def cut() -> None:
        late.set()
        for connection in sockets:
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield connected, late.is_set
    finally:
        timer.cancel()


def quoted(text: str, key: str | None) -> str:
    """Return the first 300 characters of what a server said on one line, without the API key and control characters."""
    line = " ".join((text.replace(key, "***") if key else text).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line[:300])


def may_pass(error: Exception) -> bool:
    """Return whether the same request can succeed later: a broken connection, no answer in time, 408, 429 or 5xx."""
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    never = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)
    return isinstance(error, httpx2.TransportError) and not isinstance(error, never)
