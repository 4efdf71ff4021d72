"""How a server starts, whom it serves, and how it ends: requests under way are not waited for for ever."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import micro
import pytest
from clients import asked
from listening import free_port, listening
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from infalign.core.errors import ConfigError
from infalign.sampling.engine import Prompt, Sampling, Vocabulary
from infalign.sampling.server import ServerEngine
from infalign.serving.draws import RemoteDraws
from infalign.serving.web import TOKEN_VARIABLE, for_this_machine, token_for

SLOW = """
import asyncio, ctypes, signal, sys, time
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from infalign.core.errors import StoppedError
from infalign.core.signals import raise_outside
from infalign.serving.web import bound, listen
signal.signal(signal.SIGTERM, lambda _, frame: raise_outside(StoppedError, frame))  # as the command line does
async def slow(request):
    print("asked", flush=True)
    WORK
    return PlainTextResponse("done")
listen(Starlette(routes=[Route("/", slow)]), bound("127.0.0.1", int(sys.argv[1])), grace=1)
"""


ANSWER = asked(model="reference")
REWARD = {"response": "No.", "label": {"prompt": ANSWER["messages"], "reference_rewards": [0.0, 1.0]}}
SECRET = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    ("command", "options", "path", "body", "said"),
    [
        ("serve", "--policy reference --procedure standard", "v1/chat/completions", ANSWER, "http://0.0.0.0:PORT/v1\n"),
        pytest.param("serve-reward", "--transform exp:10", "get_reward", REWARD, "", marks=pytest.mark.slow),
    ],
    ids=["answers", "rewards"],
)
def test_a_command_serves_others_only_with_a_token(
    trained_run: Path, command: str, options: str, path: str, body: dict[str, Any], said: str
) -> None:
    """Health is for everyone; a client's API key is the token, and a stopped server ends well."""
    port = free_port()
    words = [micro.COMMAND, command, trained_run, *options.split(), "--host", "0.0.0.0", "--port", str(port)]
    paths = os.pathsep.join(filter(None, [str(Path(micro.__file__).parent), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {TOKEN_VARIABLE: "secret", "PYTHONPATH": paths}
    process = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        answered = False
        while not answered:
            assert process.poll() is None
            with suppress(httpx2.TransportError):
                answered = httpx2.get(f"{url}/health").is_success
            time.sleep(0.1)
        for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), (SECRET, 200)):
            assert httpx2.post(f"{url}/{path}", json=body, headers=headers, timeout=60).status_code == status
            assert httpx2.get(f"{url}/metrics", headers=headers).status_code == status
    finally:
        process.terminate()
        printed, _ = process.communicate(timeout=20)
    assert (process.returncode, printed[printed.find("http") :]) == (0, said.replace("PORT", str(port)))


@pytest.mark.parametrize("words", [("serve", "/no/run"), ("serve-reward", "no.module:at_all", "--transform", "log")])
def test_a_taken_port_is_said_before_anything_is_loaded(words: tuple[str, ...]) -> None:
    """In one sentence, by both servers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        err = micro.refusal(*words, "--port", taken.getsockname()[1], code=1)
    assert re.fullmatch(r"infalign: cannot listen: .*in use.*; choose another --port or --host\n", err)


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_page_that_is_rebound_to_this_machine_is_refused_without_a_token(token: str | None) -> None:
    """It sends its own name as the host; a request with a token comes from nobody who has only rebound a name."""
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("done"))])
    with listening(for_this_machine(app, token)) as url:
        port = url.rpartition(":")[2]
        known = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]")]
        hosts = dict.fromkeys([*known, "localhost"], 200)
        hosts |= dict.fromkeys([f"evil.example:{port}", "127.0.0.1.evil.example", ""], 200 if token else 400)
        assert {host: httpx2.get(url, headers={"Host": host}).status_code for host in hosts} == hosts


@pytest.mark.parametrize(("host", "token", "expected"), [("127.0.0.1", "", None), ("0.0.0.0", "s3", "s3")])
def test_an_empty_token_is_none(monkeypatch: pytest.MonkeyPatch, host: str, token: str, expected: str | None) -> None:
    """Others are served only with one; one that no header can carry is refused, and not shown."""
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert token_for(host) == expected
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        token_for("0.0.0.0")
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret\n")
    with pytest.raises(ConfigError, match="contains a line break") as refused:
        token_for(host)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("work", "answered", "code"),
    [
        ("await asyncio.to_thread(time.sleep, 0.5)", True, 0),
        ("await asyncio.sleep(600)", False, 0),
        ("await asyncio.to_thread(time.sleep, 600)", False, 1),
        ("time.sleep(600)", False, 1),
        ("await asyncio.to_thread(ctypes.PyDLL(None).sleep, 600)", False, -9),  # or 1, if SIGTERM comes before
    ],
    ids=["done in time", "waits", "a thread hangs", "the loop hangs", "a thread holds the interpreter"],
)
def test_a_stopped_server_ends_whatever_hangs(work: str, answered: bool, code: int) -> None:
    """Within the grace a request that is under way is answered; then it is cancelled, and the process ends."""
    port = free_port()
    command = [sys.executable, "-c", SLOW.replace("WORK", work), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        while True:
            try:
                client = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert server.poll() is None
        with client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert server.stdout.readline() == "asked\n"
            server.terminate()
            assert server.wait(60) in {code, 1 if code < 0 else code}
            assert client.recv(4096).endswith(b"done") == answered


def test_draws_that_nobody_waits_for_end_their_request() -> None:
    """The engine's connection is closed when the task is cancelled, so that nothing is waited for at the end."""
    tokenizer = micro.tokenizer()

    async def cancelled() -> int:
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            connected.set_result(None)
            while await reader.read(4096):
                pass
            gone.set()
            writer.close()

        gone = asyncio.Event()
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        draws = RemoteDraws(partial(ServerEngine, url, "policy", Vocabulary(tokenizer)), at_once=2)
        asked = asyncio.create_task(draws.draw(Prompt("p", [1, 2]), range(2), Sampling(4)))
        await asyncio.wait_for(connected, 20)
        assert draws.in_progress == 2
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(gone.wait(), 20)
        server.close()
        return draws.counts["abandoned_draws"]

    assert asyncio.run(cancelled()) == 2
