"""Servers that answer by the byte: never to an end, larger than they look, in words that no server may choose."""

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import retries
from listening import free_port

from faults.lab import Lab, Seen, told
from faults.registry import fault
from faults.rewards import keep, remote
from infalign.core.errors import PartialError
from infalign.models.tokenizers import load_tokenizer
from infalign.sampling.engine import Sampling, Vocabulary
from infalign.sampling.server import ServerEngine

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def speaking(begin: bytes, forever: bytes = b"") -> Iterator[str]:
    """Yield the URL of a server that answers every request with ``begin`` and then ``forever``, again and again."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def speak(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            read_request(connection)
            connection.sendall(begin)
            while forever and not over.wait(0.02):
                connection.sendall(forever)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=speak, args=listening.accept()[:1], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def read_request(connection: socket.socket) -> None:
    """Read the whole of a request: what is unread when a connection is closed can take the answer with it."""
    with connection.makefile("rb") as request:
        length = 0
        while line := request.readline().strip().lower():
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        request.read(length)


def asked(lab: Lab, begin: bytes, forever: bytes = b"") -> Seen:
    """Ask such a server for rewards, and one for responses: both end, with the same exit code."""
    tokenizer = load_tokenizer(lab.finished / "data" / "tokenizer")
    with speaking(begin, forever) as url, retries.attempts(2):
        seen = told(lambda: keep(lab, remote(lab, url, read_seconds=0.3, retry_seconds=1.0)))
        engine = ServerEngine(url, "m", Vocabulary(tokenizer), Sampling(4), retry_seconds=1.0, read_seconds=0.3)
        assert told(lambda: engine.sample([1, 2], "p", range(2))).code == seen.code
    assert seen.said.isprintable()
    return seen


def body_of(content: bytes, *header: bytes, head: bytes = OK) -> bytes:
    """Return an answer with a body."""
    lines = [head.strip(), *header, b"Content-Length: %d" % len(content)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


@fault(
    PartialError.exit_code,
    {
        "header after header": (OK, b"X-More: 1\r\n"),
        "empty chunks of compressed data": (
            OK + b"Content-Encoding: deflate\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n\x78\x9c\r\n",
            b"5\r\n\x00\x00\x00\xff\xff\r\n",
        ),
        "too short": OK + b'Content-Length: 999\r\n\r\n{"rewards": [',
        "mail": b"220 mail ESMTP\r\n",
        "nothing": b"",
        "Retry-After is no number": b"HTTP/1.1 503 Busy\r\nRetry-After: \xe9\xb2\xd9\xa3\r\nContent-Length: 0\r\n\r\n",
    },
    brief=("header after header", "too short", "Retry-After is no number"),
)
def broken(lab: Lab, begin: bytes, forever: bytes = b"") -> Seen:
    """A server's answer is no HTTP, broken off, or without end → Soon: what broke; start the server and rerun."""
    return asked(lab, begin, forever)


@fault(
    2,
    {
        "0.4 MB that are 400": body_of(gzip.compress(b" " * 400_000_000), b"Content-Encoding: gzip"),
        "no charset": body_of(b"\xffno\x1b", b"Content-Type: text/plain; charset=zlib_codec", head=b"HTTP/1.1 400 No"),
    },
    brief=True,
)
def unusable(lab: Lab, begin: bytes) -> Seen:
    """A server's answer expands a thousandfold, or has no character set → Size or answer, printable."""
    return asked(lab, begin)


@fault(PartialError.exit_code, {"server": False, "proxy": True}, brief=True)
def nobody_listens(lab: Lab, by_proxy: bool) -> Seen:
    """Nobody listens at a server's address, or at that of a proxy for all programs → Start it and rerun."""
    dead = f"http://127.0.0.1:{free_port()}"
    with retries.attempts(2), patch.dict("os.environ", {"HTTP_PROXY": dead} if by_proxy else {}):
        url = "http://far.example:1/get_reward" if by_proxy else dead
        return told(lambda: keep(lab, remote(lab, url, read_seconds=1.0, retry_seconds=1.0)))
