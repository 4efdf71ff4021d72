"""Keys and passwords in places that are recorded or shown."""

from functools import partial
from unittest.mock import patch

import micro

from faults.data import infalign
from faults.network import speaking
from faults.registry import Lab, Seen, fault
from faults.rewards import impatient, keep, told
from infalign.models.pretrained import load_tokenizer
from infalign.rewards.server import RemoteReward

SECRET = "hunter2"


def hidden(lab: Lab, setting: str, key: str = "") -> Seen:
    """Give a recipe with a secret to a finished run: it ends at once, and the secret is said and stored nowhere."""
    root = lab.copy()
    path = micro.write(lab.folder / "recipe.yaml", micro.settings(root))
    with patch.dict("os.environ", {"SOME_KEY": key}):
        code, out, said = infalign("run", path, "--set", "compute.processes=1", "--set", setting)
    assert code == 2, said
    assert SECRET not in out + said
    assert not any(SECRET.encode() in file.read_bytes() for file in root.rglob("*") if file.is_file())
    return Seen(code, said)


ENGINES = {
    "the URL of the inference server has a user and a password": f"url: 'http://me:{SECRET}@127.0.0.1:1'",
    "the URL of the inference server has ?api_key=": f"url: 'http://127.0.0.1:1/v1?api_key={SECRET}'",
    "the command of the inference server has --api-key": f"command: 'vllm serve --api-key {SECRET}'",
    "the key itself is given in place of its variable": f"api_key_env: sk-{SECRET}",
}
for what, engine in ENGINES.items():
    fault(what, brief=True)(partial(hidden, setting=f"rollout.engine={{kind: server, {engine}}}"))
fault("the URL of a reward server has ?access_token=", brief=True)(
    partial(hidden, setting=f"reward={{url: 'http://127.0.0.1:1/?access_token={SECRET}'}}")
)
fault("the API key of a reward server ends with a line break", brief=True)(
    partial(hidden, setting="reward={url: 'http://127.0.0.1:1', api_key_env: SOME_KEY}", key=f"{SECRET}\n")
)
for what, url in {
    "a fragment with access_token=": f"http://127.0.0.1:1/#access_token={SECRET}",
    "?pass=": f"http://127.0.0.1:1/?pass={SECRET}",
    "a user without a password": f"http://{SECRET}@127.0.0.1:1/",
    "a percent-encoded name of a key": f"http://127.0.0.1:1/?api%5Fkey={SECRET}",
    "a key after a semicolon": f"http://127.0.0.1:1/?a=1;token={SECRET}",
}.items():
    fault(f"the URL of a reward server has {what}", brief=True)(partial(hidden, setting=f"reward={{url: '{url}'}}"))
fault("the API key of a reward server has a letter that is not ASCII", brief=True)(
    partial(hidden, setting="reward={url: 'http://127.0.0.1:1', api_key_env: SOME_KEY}", key=f"{SECRET}é")
)
fault("the variable of an API key is empty", brief=True)(
    partial(hidden, setting="reward={url: 'http://127.0.0.1:1', api_key_env: SOME_KEY}")
)
fault("the command of the inference server sets a key before its name", brief=True)(
    partial(hidden, setting=f"rollout.engine={{kind: server, command: 'env VLLM_API_KEY={SECRET} vllm serve'}}")
)
fault("the command of the inference server has a header with a key", brief=True)(
    partial(
        hidden, setting=f"rollout.engine={{kind: server, command: 'serve --header \"Authorization: Bearer {SECRET}\"'}}"
    )
)


@fault("a reward server sends the request on to another address", brief=True)
def elsewhere(lab: Lab) -> Seen:
    """Neither texts nor key are sent there."""
    tokenizer = load_tokenizer(lab.finished / "data" / "tokenizer")
    with impatient() as other, patch.dict("os.environ", {"SOME_KEY": SECRET}):
        away = b"HTTP/1.1 307 Elsewhere\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % other.url.encode()
        with speaking(away) as url:
            seen = told(lambda: keep(lab, RemoteReward(url, tokenizer, api_key_env="SOME_KEY", retry_seconds=1.0)))
        assert not other.bodies
    assert SECRET not in seen.said
    return seen
