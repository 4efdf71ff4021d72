"""Keys and passwords in places that are recorded or shown."""

from functools import partial
from unittest.mock import patch

import micro

from faults.data import infalign
from faults.registry import Lab, Seen, fault

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
