"""Keys and passwords in places that are recorded or shown."""

from unittest.mock import patch

from faults.lab import Lab, Seen, infalign, told
from faults.network import speaking
from faults.registry import fault
from faults.rewards import impatient, keep, remote

SECRET = "hunter2"


def engine(setting: str) -> str:
    """Return the setting of an inference server."""
    return f"rollout.engine={{kind: server, {setting}}}"


@fault(
    2,
    {
        "URL": f"reward={{url: 'http://127.0.0.1:1/v1?api_key={SECRET}'}}",
        "command": engine(f"command: 'vllm serve --api-key {SECRET}'"),
        "for the variable's name": engine(f"api_key_env: sk-{SECRET}"),
        "two lines": ("reward={url: 'http://127.0.0.1:1', api_key_env: SOME_KEY}", f"{SECRET}\r\nX-Other: 1"),
        "not ASCII": ("reward={url: 'http://127.0.0.1:1', api_key_env: SOME_KEY}", f"{SECRET}é"),
        "empty": ("reward={url: 'http://127.0.0.1:1', api_key_env: SOME_KEY}", ""),
    },
    brief=True,
)
def hidden(lab: Lab, setting: str, key: str = "") -> Seen:
    """A key is in a URL or a command, or HTTP cannot send it → Where it belongs; it is shown and stored nowhere."""
    root = lab.copy()
    with patch.dict("os.environ", {"SOME_KEY": key}):
        code, out, said = infalign("run", lab.recipe(), "--set", "compute.processes=1", "--set", setting)
    assert SECRET not in out + said
    assert not any(SECRET.encode() in file.read_bytes() for file in root.rglob("*") if file.is_file())
    return Seen(code, said)


@fault(2, brief=True)
def elsewhere(lab: Lab) -> Seen:
    """A reward server sends the request on to another address → The answer; nothing is sent there."""
    with impatient() as other, patch.dict("os.environ", {"SOME_KEY": SECRET}):
        away = b"HTTP/1.1 307 Elsewhere\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % other.url.encode()
        with speaking(away) as url:
            seen = told(lambda: keep(lab, remote(lab, url, api_key_env="SOME_KEY", retry_seconds=1.0)))
        assert not other.bodies
    assert SECRET not in seen.said
    return seen
