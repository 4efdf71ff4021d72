"""Servers that answer by the byte: never to an end, larger than they look, in words that no server may choose."""

import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import micro
import stamina

from faults.data import infalign
from faults.registry import Lab, Seen, fault
from faults.rewards import keep, told
from infalign.core.errors import ConfigError, DataError, PartialError
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


def json_answer(body: bytes, *, head: bytes = OK) -> bytes:
    """Return an answer with a body."""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


BROKEN = {
    "ends its answer before the length that it gave": OK + b'Content-Length: 999\r\n\r\n{"rewards": [',
    "gives a negative length": OK + b"Content-Length: -1\r\n\r\n{}",
    "gives two lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "gives a chunk no size": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "speaks no HTTP": b"220 mail ESMTP\r\n",
    "switches protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "says nothing and hangs up": b"",
}
for how, begin in BROKEN.items():
    fault(f"a server {how}", brief=how.startswith("ends"))(partial(asked, begin=begin, code=PartialError.exit_code))


def refused_answer(lab: Lab, body: bytes) -> Seen:
    """An answer that holds no rewards is refused, and none of it is stored."""
    tokenizer = load_tokenizer(lab.finished / "data" / "tokenizer")
    with speaking(json_answer(body)) as url, stamina.set_testing(True, attempts=2):
        seen = told(lambda: keep(lab, RemoteReward(url, tokenizer, retry_seconds=1.0)))
    assert seen.code == DataError.exit_code
    assert not list((lab.folder / "scores").glob("part-[0-9]*.parquet"))
    return seen


REFUSED = {
    "with lists in lists, a hundred thousand deep": b'{"rewards": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "in an encoding that is no UTF-8": b'{"rewards": ["\xff"]}',
    "with rewards in rewards": b'{"rewards": {"rewards": [1, 2, 3, 4, 5, 6]}}',
    "with every reward in a list of its own": b'{"rewards": [[1], [2], [3], [4], [5], [6]]}',
    "with rewards that no float tells apart": b'{"rewards": [1, 2, 3, 4, 9007199254740992, 9007199254740993]}',
    "that gives the rewards twice": b'{"rewards": [1, 2, 3, 4, 5, 6], "rewards": [6, 5, 4, 3, 2, 1]}',
}
for what, body in REFUSED.items():
    fault(f"the reward server sends an answer {what}", brief=True)(partial(refused_answer, body=body))


@fault("the name of a server resolves for ever")
def never_resolves(lab: Lab) -> Seen:
    """A request ends with its deadline, and a plan too says that nobody is reached."""
    tokenizer, end = load_tokenizer(lab.finished / "data" / "tokenizer"), threading.Event()
    resolve = socket.getaddrinfo

    def hang(host: Any, *rest: Any, **options: Any) -> Any:
        return end.wait() if host in ("far.example", b"far.example") else resolve(host, *rest, **options)

    url = "http://far.example:1/get_reward"
    try:
        with patch("socket.getaddrinfo", hang), stamina.set_testing(True, attempts=2):
            seen = told(lambda: keep(lab, RemoteReward(url, tokenizer, read_seconds=0.2, retry_seconds=1.0)))
            recipe = micro.write(lab.folder / "recipe.yaml", micro.settings(lab.folder / "run"))
            with patch("infalign.steps.dry_run.CONNECT_SECONDS", 0.2):
                code, out, _ = infalign("run", recipe, "--dry-run", "--set", f"reward={{url: '{url}'}}")
    finally:
        end.set()
    assert (seen.code, code, f"{url} cannot be reached now" in out) == (PartialError.exit_code, 0, True)
    return seen


@fault("a proxy that is set for all programs does not answer", brief=True)
def dead_proxy(lab: Lab) -> Seen:
    """The sentence is that of a server that does not answer; the URL in it is the server's."""
    tokenizer = load_tokenizer(lab.finished / "data" / "tokenizer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{free.getsockname()[1]}"
        with patch.dict("os.environ", {"HTTP_PROXY": proxy}), stamina.set_testing(True, attempts=2):
            reward = RemoteReward("http://far.example:1/get_reward", tokenizer, read_seconds=1.0, retry_seconds=1.0)
            seen = told(lambda: keep(lab, reward))
    assert seen.code == PartialError.exit_code
    return seen
