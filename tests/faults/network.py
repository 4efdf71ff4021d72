"""Servers that answer by the byte: never to an end, larger than they look, in words that no server may choose."""

import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import stamina

from faults.registry import Lab, Seen, fault
from faults.rewards import keep, told
from infalign.errors import ConfigError, PartialError
from infalign.models.pretrained import load_tokenizer
from infalign.rewards.server import RemoteReward
from infalign.sampling.engine import Sampling
from infalign.sampling.server import ServerEngine

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def speaking(begin: bytes, forever: bytes = b"") -> Iterator[str]:
    """Yield the URL of a server that answers every request with ``begin`` and then ``forever``, again and again."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def speak(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
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


def asked(lab: Lab, begin: bytes, forever: bytes = b"", *, code: int) -> Seen:
    """Ask such a server for rewards, and one for responses: both end, with the same exit code."""
    tokenizer = load_tokenizer(lab.finished / "data" / "tokenizer")
    with speaking(begin, forever) as url, stamina.set_testing(True, attempts=2):
        seen = told(lambda: keep(lab, RemoteReward(url, tokenizer, read_seconds=0.3, retry_seconds=1.0)))
        engine = ServerEngine(url, "m", tokenizer, Sampling(4), retry_seconds=1.0, read_seconds=0.3)
        assert told(lambda: engine.sample([1, 2], "p", range(2))).code == code
    assert seen.code == code, seen
    assert seen.said.isprintable()
    return seen


def deflated(size: int) -> bytes:
    """Return an answer in gzip that has ``size`` bytes of blanks."""
    packer = zlib.compressobj(9, wbits=31)
    body = packer.compress(b" " * size) + packer.flush()
    return OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body


NEVER = {
    "sends one header after another, without end": (OK, b"X-More: 1\r\n"),
    "sends a header by the byte, without end": (OK + b"X-More: ", b"1"),
    "says 100 Continue again and again": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "sends empty chunks of compressed data again and again": (
        OK + b"Content-Encoding: deflate\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n\x78\x9c\r\n",
        b"5\r\n\x00\x00\x00\xff\xff\r\n",
    ),
}
for how, (begin, forever) in NEVER.items():
    fault(f"a server {how}", brief=True)(partial(asked, begin=begin, forever=forever, code=PartialError.exit_code))
fault("a server's answer of 0.4 MB expands to 400 MB", brief=True)(
    partial(asked, begin=deflated(400_000_000), code=ConfigError.exit_code)
)
fault("a server refuses in a character set that is none", brief=True)(
    partial(
        asked,
        begin=b"HTTP/1.1 400 No\r\nContent-Type: text/plain; charset=zlib_codec\r\nContent-Length: 4\r\n\r\n\xffno\x1b",
        code=ConfigError.exit_code,
    )
)
fault("a server asks to be left alone for a time that is no number", brief=True)(
    partial(
        asked,
        begin=b"HTTP/1.1 503 Busy\r\nRetry-After: \xe9\xb2\xd9\xa3\r\nContent-Length: 0\r\n\r\n",
        code=PartialError.exit_code,
    )
)
