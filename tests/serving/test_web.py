"""How a server ends: requests under way are waited for, and not for ever."""

import asyncio
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from infalign.models.scratch import train_tokenizer
from infalign.models.settings import Scratch
from infalign.sampling.engine import Prompt, Sampling
from infalign.sampling.server import ServerEngine
from infalign.serving.draws import RemoteDraws

SLOW = """
import asyncio, sys
from starlette.applications import Starlette
from starlette.routing import Route
from infalign.serving.web import listen
async def slow(request):
    print("asked", flush=True)
    await asyncio.sleep(600)
listen(Starlette(routes=[Route("/", slow)]), "127.0.0.1", int(sys.argv[1]), grace=1)
"""


def test_a_stopped_server_does_not_wait_for_ever() -> None:
    """After the grace a request that is under way is cancelled, and the process ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", SLOW, str(port)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
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
            assert server.wait(60) is not None


def test_draws_that_nobody_waits_for_end_their_request() -> None:
    """The engine's connection is closed when the task is cancelled, so that nothing is waited for at the end."""
    tokenizer = train_tokenizer(["a text"], Scratch())

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
        draws = RemoteDraws(partial(ServerEngine, url, "policy", tokenizer), at_once=2)
        asked = asyncio.create_task(draws.draw(Prompt("p", [1, 2]), range(2), Sampling(4)))
        await connected
        assert draws.in_progress == 2
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(gone.wait(), 20)
        server.close()
        return draws.counts["abandoned"]

    assert asyncio.run(cancelled()) == 2
