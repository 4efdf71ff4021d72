"""Inference servers that a recipe starts, as real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from infalign.sampling.launch import serving

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


def ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that its new parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("status", [200, 401])
def test_a_server_runs_as_long_as_the_block_and_leaves_no_process(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and port are filled in, other braces stay, children stop too; one that asks for a key is ready."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER.replace("200", str(status)))
    command = f"""{sys.executable} server.py {{port}} --model {{model}} --options '{{"a": {{}}}}'"""
    with serving(command, "some/model", "unused") as url:
        answer = httpx2.get(f"{url}/v1/models")
        assert (answer.status_code, answer.json()) == (status, ["--model", "some/model", "--options", '{"a": {}}'])
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert not any(map(ended, pids))
    while not all(map(ended, pids)):
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's death by Linux alone")
def test_a_server_ends_when_who_started_it_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves nobody to stop it, and the next run needs its memory."""
    (tmp_path / "server.py").write_text(SERVER)
    block = f"""if True:
        import os, signal
        from infalign.sampling.launch import serving
        with serving("{sys.executable} server.py {{port}}", "some/model", "unused"):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    server, child = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    os.kill(child, signal.SIGKILL)  # this one does not look after its own
    while not ended(server):
        time.sleep(0.05)
