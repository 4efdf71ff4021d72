"""An application behind uvicorn in a thread of the test, what it counts, and a free port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Yield the URL of the application."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


def metrics(url: str) -> dict[str, float]:
    """Return what the server counts."""
    lines = httpx2.get(f"{url}/metrics").raise_for_status().text.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}


def free_port() -> int:
    """Return a port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
