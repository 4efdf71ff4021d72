"""Inference servers that a recipe starts, as real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import retries

from infalign.core.errors import PartialError
from infalign.sampling.engine import Sampling, Vocabulary
from infalign.sampling.launch import serving
from infalign.sampling.server import ServerEngine

SERVER = """
import http.server, json, os, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(sys.argv[2:]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

child = subprocess.Popen(["sleep", "600"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

DIES = """
    def do_POST(self):
        print("INFO: a line that says nothing", "ValueError: head size 16 is not supported", sep=chr(10), flush=True)
        print("goodbye", flush=True)
        os.kill(child.pid, 9)
        os._exit(3)

"""


def ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that its new parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("status", [200, 401])
def test_a_server_lives_as_long_as_the_block(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, port and dtype are filled in, other braces stay, children stop too; one that asks for a key is ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not asked for this machine
    (tmp_path / "server.py").write_text(SERVER.replace("200", str(status)))
    command = f"""{sys.executable} server.py {{port}} --model {{model}} --dtype={{dtype}} --options '{{"a": {{}}}}'"""
    with serving(command, "some/model", "float32") as server:
        answer = httpx2.get(f"{server.url}/v1/models", trust_env=False)
        words = ["--model", "some/model", "--dtype=float32", "--options", '{"a": {}}']
        assert (answer.status_code, answer.json()) == (status, words)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert not any(map(ended, pids))
    while not all(map(ended, pids)):
        time.sleep(0.05)


def test_a_server_that_dies_says_why(policy: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code and what it died of, instead of attempts to connect; the whole output stays in a file."""
    monkeypatch.chdir(tmp_path)  # where the server writes its pids
    (tmp_path / "server.py").write_text(SERVER.replace("def log_message", DIES + "    def log_message"))
    engine = partial(ServerEngine, model="m", vocabulary=Vocabulary(policy[1]), sampling=Sampling(4))
    started_at = time.monotonic()
    with (
        pytest.raises(PartialError, match=r"exit code 3: ValueError: head size 16.*/infalign-server-.*\.log") as error,
        retries.attempts(9, wait=0.1),
        serving(f"{sys.executable} {tmp_path}/server.py {{port}}", "some/model", "float32") as server,
    ):
        engine(server.url, watch=server.check).sample([5, 6], "p", range(2))
    assert time.monotonic() - started_at < 10
    log = Path(re.findall(r"\S+\.log", str(error.value))[0])
    assert log.read_text().splitlines()[-1] == "goodbye"
    log.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's death by Linux alone")
def test_a_server_ends_when_who_started_it_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves nobody to stop it, and the next run needs its memory."""
    (tmp_path / "server.py").write_text(SERVER)
    block = f"""if True:
        import os, signal
        from infalign.sampling.launch import serving
        with serving("{sys.executable} server.py {{port}}", "some/model", "float32"):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    server, child = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    os.kill(child, signal.SIGKILL)  # this one does not look after its own
    while not ended(server):
        time.sleep(0.05)
