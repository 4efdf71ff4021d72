"""Requests to servers that may fail for a while: engines and rewards. Needs the ``serve`` extra."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, islice
from queue import SimpleQueue
from random import random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from infalign.core.display import printable
from infalign.core.errors import ConfigError, PartialError, RequestError

if TYPE_CHECKING:
    import ssl

    import httpx2

Item = TypeVar("Item")
Answer = TypeVar("Answer")

READ_AHEAD = 4  # times the requests under way: so far beyond the oldest unanswered request others begin
CONNECT_SECONDS = 10.0
THIS_MACHINE = "127.0.0.1", "::1", "localhost"
RETRY_SECONDS = 60.0  # for which a failed request is repeated, unless its caller says otherwise
BUSY_STATUSES = 429, 503  # too many requests at once
REQUEST_STATUSES = 400, 413, 422  # what this request holds, while another may be answered
FIRST_SECONDS = 5.0  # for which a server may be down that has not answered yet: its address may be wrong
MAX_WAIT_BETWEEN_ATTEMPTS = 30.0  # seconds between two attempts, whatever the server asks for
SECRET_NAME = re.compile("(?i)key|token|secret|pass|pwd|^pw$|auth|credential|signature|^sig$|jwt|bearer|session|cookie")
LOGGER = logging.getLogger(__name__)


def checked_url(url: str) -> str:
    """Return the URL of a server. Raises ValueError, which does not quote it, for one that is none or holds a secret.

    A URL is recorded and shown; so a user name, a password and parameters such as ``api_key`` are refused.
    """
    parts = urlsplit(url)  # raises ValueError for an invalid host
    if "@" in url:
        raise ValueError("a URL must not contain a user or password, since it is stored; use api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL must start with http:// or https:// and a host")
    given = "&".join((parts.query, parts.fragment)).replace(";", "&")
    if secret := next((name for name, _ in parse_qsl(given, keep_blank_values=True) if SECRET_NAME.search(name)), None):
        raise ValueError(f"a URL must not contain {secret}=…, since it is stored; use api_key_env")
    return url


def checked_variable(name: str) -> str:
    """Return the name of an environment variable. Raises ValueError, which does not quote it: it may be a key."""
    if not (name.isascii() and name.isidentifier()):
        raise ValueError("api_key_env must be the name of a variable (letters, digits and _), not the key itself")
    return name


def api_key(variable: str | None) -> str | None:
    """Return the key that an environment variable holds, None without a variable.

    Raises ConfigError, which does not quote it, for one that is not set or cannot be in a header.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"the environment variable {variable} for the API key is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the environment variable {variable} contains a line break, a space or another character that API keys "
            "do not have; set it to the key alone"
        )
    return key


class Post(Protocol):
    """Asks the server."""

    async def __call__(self, body: object, *, max_bytes: int) -> httpx2.Response:
        """Return the answer to a POST of ``body`` as JSON, repeated with back-off while a fault `may_pass`.

        The answer may have ``max_bytes``, decompressed. Raises PartialError if there is none in time, ConfigError if
        the server refuses, a RequestError for what the request holds.
        """


@dataclass(slots=True)
class Server:
    """A server at ``url``, asked ``in_flight`` requests at once.

    One attempt may take ``read_seconds``, from its connection to the end of the answer; attempts are repeated for up to
    ``retry_seconds`` after the first failure (`FIRST_SECONDS` where it has not answered yet), each after the wait that
    the server asks for in Retry-After, up to half a minute, and logged. While a server that is too busy for a request
    works on others of ours, that request waits for its turn. ``watch`` is called after each failure and may raise a
    better error.
    """

    url: str
    in_flight: int
    read_seconds: float
    retry_seconds: float
    key: str | None = field(default=None, repr=False)  # sent as `Authorization: Bearer`
    watch: Callable[[], None] = lambda: None
    there: bool = field(default=False, init=False)  # whether it has answered
    under_way: int = field(default=0, init=False)  # attempts without an answer so far
    is_full: bool = field(default=False, init=False)  # whether it was too busy for as many as are under way

    def answers(
        self, ask: Callable[[Post, Item], Coroutine[Any, Any, Answer]], asked: Iterable[Item]
    ) -> Generator[tuple[Item, Answer]]:
        """Yield each of ``asked`` with what ``ask`` makes of it, as answers come.

        ``asked`` is read in order, as answers are taken, and nothing begins that is more than `READ_AHEAD` × the number
        of requests under way after the oldest without an answer. When one fails, no more begin, those under way are
        awaited and yielded, and then the failure that is first in ``asked`` is raised. When the caller stops, those
        under way are cancelled. Requests run in a thread of their own, so that it may be called inside an event loop,
        and what the caller does with an answer holds none up.
        """
        from anyio import Semaphore
        from anyio.from_thread import start_blocking_portal

        numbered = enumerate(asked)
        under_way: dict[Future[Answer], tuple[int, Item]] = {}  # or waiting for a turn
        finished: SimpleQueue[Future[Answer]] = SimpleQueue()
        failures: dict[int, Exception] = {}
        begun = 0
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self._client()) as client:
            turns = portal.call(Semaphore, self.in_flight)

            async def in_turn(number: int, item: Item) -> Answer:
                async with turns:
                    if failures:
                        raise CancelledError
                    try:
                        return await ask(partial(self._post, client), item)
                    except Exception as error:
                        failures[number] = error
                        raise

            def begin() -> None:
                nonlocal begun
                oldest = min((number for number, _ in under_way.values()), default=begun)
                room = min(2 * self.in_flight - len(under_way), oldest + READ_AHEAD * self.in_flight - begun)
                for following in islice(numbered, 0 if failures else room):
                    future = portal.start_task_soon(in_turn, *following)
                    under_way[future] = following
                    future.add_done_callback(finished.put)
                    begun += 1

            begin()
            while under_way:
                future = finished.get()
                _, item = under_way.pop(future)
                begin()
                if not future.cancelled() and future.exception() is None:
                    yield item, future.result()
        if failures:
            raise failures[min(failures)]

    @asynccontextmanager
    async def posting(self) -> AsyncIterator[Post]:
        """Yield what asks the server in the caller's own event loop, whose requests end with the caller's task."""
        async with self._client() as client:
            yield partial(self._post, client)

    @property
    def _where(self) -> str:
        """The URL, and the variable of the proxy that requests go through, which may be what fails."""
        scheme, host = self.url.split(":")[0], urlsplit(self.url).hostname or ""
        proxies = {} if host in THIS_MACHINE or proxy_bypass(host) else getproxies_environment()
        through = next((name for name in (scheme, "all") if name in proxies), None)
        return self.url if through is None else f"{self.url}, asked through the proxy of {through.upper()}_PROXY,"

    def _client(self) -> httpx2.AsyncClient:
        import httpx2

        authorization = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            return httpx2.AsyncClient(
                headers={"Content-Type": "application/json"} | authorization,
                timeout=httpx2.Timeout(self.read_seconds, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self.in_flight),
                verify=_tls(),
                trust_env=urlsplit(self.url).hostname not in THIS_MACHINE,  # which no proxy reaches
            )
        except Exception as error:  # whatever httpx raises of a proxy, ImportError for SOCKS
            raise ConfigError(f"the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: {error}") from error

    async def _post(self, client: httpx2.AsyncClient, body: object, *, max_bytes: int) -> httpx2.Response:
        import httpx2
        from anyio import sleep

        failed, waits, first = 0.0, backoff(), ""
        while True:
            try:
                answer = await self._attempt(client, body, max_bytes)
                self.there = True
                return answer.raise_for_status()
            except httpx2.HTTPError as error:
                self.watch()
                why, said, wait, wanted = type(error).__name__, str(error), next(waits, math.inf), ""
                status = 0
                if isinstance(error, httpx2.HTTPStatusError):
                    status = error.response.status_code
                    why, said = f"status {status}", error.response.text
                    wanted = error.response.headers.get("Retry-After", "")
                is_busy = status in BUSY_STATUSES
                if wanted.isdecimal():
                    wait = min(float(wanted), MAX_WAIT_BETWEEN_ATTEMPTS)
                down = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and not self.there
                seconds = min(self.retry_seconds, FIRST_SECONDS) if down else self.retry_seconds
                waits_its_turn = is_busy and self.under_way > 0
                failed = time.monotonic() if waits_its_turn else failed or time.monotonic()
                why = f"{why}: {quote_answer(said, self.key)}"
                left, first = failed + seconds - time.monotonic(), first or why
                if not may_pass(error):
                    refusal = RequestError if status in REQUEST_STATUSES else ConfigError
                    raise refusal(f"{self._where} refused the request: {why}") from error
                if wait > left:
                    before = "" if first == why else f"the first attempt failed with {first}, "
                    cure = (
                        "Lower in_flight or raise its limit" if is_busy else "Start the server or correct its address"
                    )
                    raise PartialError(
                        f"{self._where} did not answer for {seconds:.0f} s; {before}the last attempt failed with "
                        f"{why}. {cure}, then rerun the same command"
                    ) from error
                if not waits_its_turn:
                    LOGGER.warning("%s: %s; retrying in %.0f s, for another %.0f s", self.url, why, wait, left)
                elif not self.is_full:
                    self.is_full = True
                    LOGGER.warning("%s: %s; requests wait for their turn; a lower in_flight avoids this", self.url, why)
            await sleep(wait)

    async def _attempt(self, client: httpx2.AsyncClient, body: object, max_bytes: int) -> httpx2.Response:
        """Return the answer, whole, to one attempt, which is cut off after ``read_seconds``.

        httpx grants its time-outs to each part that it receives; neither dripped headers nor endless `100 Continue`
        outlive this one.
        """
        import httpx2
        from anyio import fail_after

        request = client.build_request("POST", self.url, json=body)
        received, said = bytearray(), "no answer"
        self.under_way += 1
        try:
            with fail_after(self.read_seconds):
                async with aclosing(await client.send(request, stream=True)) as answer:
                    said = "the answer was incomplete"
                    async for part in answer.aiter_bytes():
                        received += part
                        if len(received) > max_bytes:
                            raise httpx2.DecodingError(f"more than {max_bytes:,} bytes", request=request)
        except TimeoutError as error:
            raise httpx2.ReadTimeout(f"{said} within {self.read_seconds:g} s", request=request) from error
        finally:
            self.under_way -= 1
        # No other header: charset and encoding would let the server choose a codec.
        asked = answer.headers.get("Retry-After", "")
        headers = {"Retry-After": asked} if asked.isascii() else {}
        return httpx2.Response(answer.status_code, headers=headers, content=bytes(received), request=request)


@cache
def _tls() -> ssl.SSLContext:
    """Return the default TLS context; to read the certificates takes longer than a request."""
    import httpx2

    return httpx2.create_ssl_context()


def quote_answer(text: str, key: str | None) -> str:
    """Return the first 300 characters of what a server said on one line, without the API key and control characters."""
    return printable(" ".join((text.replace(key, "***") if key else text).split())[:300])


def backoff() -> Iterator[float]:
    """Yield the seconds to wait between attempts: each time twice as many, and up to one more."""
    for number in count():
        yield min(MAX_WAIT_BETWEEN_ATTEMPTS, 0.1 * 2 ** min(number, 10) + random())


def may_pass(error: Exception) -> bool:
    """Return whether the same request can succeed later: a broken connection, no answer in time, 408, 429 or 5xx."""
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    never = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)
    return isinstance(error, httpx2.TransportError) and not isinstance(error, never)
