"""What our servers share: who may ask them, where they listen, and their metrics. Needs the ``serve`` extra."""

import faulthandler
import gc
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from infalign.core.errors import ConfigError, DataError, InfalignError, StoppedError
from infalign.core.http import THIS_MACHINE, api_key
from infalign.core.signals import end_after_signal
from infalign.data.lines import reject_duplicate_keys

TOKEN_VARIABLE = "INFALIGN_SERVE_TOKEN"
GRACE_SECONDS = 30  # seconds for the requests under way when a server is stopped
EXIT_SECONDS = 2  # seconds after these until the process ends, whatever hangs


class TooLargeError(InfalignError):
    """The body of a request has more bytes than the server reads."""


def token_for(host: str) -> str | None:
    """Return the token that requests must carry, if the environment has one.

    Raises ConfigError where one is needed, and for one that no request can carry.
    """
    token = api_key(TOKEN_VARIABLE) if os.environ.get(TOKEN_VARIABLE) else None
    if host not in THIS_MACHINE and not token:
        raise ConfigError(f"other machines can reach {host}; set {TOKEN_VARIABLE} to a secret that requests must carry")
    return token


def allowed(request: Request, token: str | None) -> bool:
    """Return whether a request carries the token, if there is one, as ``Authorization: Bearer``."""
    given = request.headers.get("Authorization", "")
    return token is None or secrets.compare_digest(given.encode(), f"Bearer {token}".encode())


def for_this_machine(app: Starlette, token: str | None) -> Starlette:
    """Return an application that, without a token, refuses web pages whose name is rebound to this machine."""
    if token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*THIS_MACHINE, "[::1]"])
    return app


async def body_of(request: Request, *, max_bytes: int) -> bytes:
    """Return the body of a request. Raises TooLargeError once it has more than ``max_bytes``, which are not kept."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise TooLargeError(f"the body has more than {max_bytes:,} bytes; split the request")
    return bytes(body)


def read_json(content: bytes) -> Any:
    """Return the value of a body. Raises DataError for what is no JSON, and for a key that an object has twice."""
    try:
        return json.loads(content.decode(), object_pairs_hook=reject_duplicate_keys, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON that can be read: {error}") from error


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def prometheus(counters: Mapping[str, float], gauges: Mapping[str, float] | None = None) -> PlainTextResponse:
    """Return metrics in Prometheus' format; the names get a prefix, those of counters a suffix too."""
    lines = [f"# TYPE infalign_{n}_total counter\ninfalign_{n}_total {v}\n" for n, v in counters.items()]
    lines += [f"# TYPE infalign_{n} gauge\ninfalign_{n} {v}\n" for n, v in (gauges or {}).items()]
    return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before anything is loaded. Raises InfalignError for an address that is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InfalignError(f"cannot listen: {error.strerror}; choose another --port or --host") from error


def listen(app: Starlette, at: socket.socket, *, grace: int = GRACE_SECONDS) -> None:
    """Serve an application until the process is stopped, which is how a server ends.

    Requests that are under way then are answered if that takes no longer than ``grace`` seconds, and cancelled if not.
    Where a thread hangs, such as in a reward, the process ends soon after, and prints what each thread was doing.
    """
    import uvicorn

    gc.freeze()  # a whole collection would stop all requests for as long as it walks through torch's objects, .2 s
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace))
    stop = server.handle_exit

    def handle_exit(*signal: Any) -> None:
        if not server.should_exit:  # a second signal gives no more time
            faulthandler.dump_traceback_later(grace + EXIT_SECONDS, exit=True)
        stop(*signal)

    server.handle_exit = handle_exit
    end_after_signal(grace + 2 * EXIT_SECONDS)  # where code in C holds the interpreter
    with suppress(KeyboardInterrupt, StoppedError):
        server.run([at])
