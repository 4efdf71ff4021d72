"""Rewards go wrong: a server that fails in every way, a function that raises or changes, a model that was exchanged."""

import importlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import stamina
from safetensors.torch import load_file, save_file

from faults.registry import Lab, Seen, again, fault, tables
from faults.server import RewardServer
from infalign.core.errors import InfalignError
from infalign.method.calibration import calibrate
from infalign.method.reward import CalibratedReward
from infalign.method.transforms import Identity
from infalign.models.pretrained import load_tokenizer
from infalign.rewards.classifier import ClassifierReward
from infalign.rewards.scores import score_to
from infalign.rewards.server import RemoteReward
from infalign.world import gold

GOLD = "{function: 'infalign.world:gold'}"
TO_GOLD = "from infalign.world import gold\n\ndef reward(prompts, responses):\n"


# The means: errors as a user sees them, the rows of a run, servers and modules


def told(work: Callable[[], object]) -> Seen:
    """Return what is said when ``work`` ends with an error of ours."""
    try:
        work()
    except InfalignError as error:
        return Seen(error.exit_code, re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", str(error)))
    raise AssertionError("it went on as if nothing had happened")


def calibrated(lab: Lab, reward: str = GOLD) -> dict[str, Any]:
    """Return the tables of an undisturbed run with another reward, up to its calibration."""
    root = lab.copy("undisturbed")
    calibrate_with(root, reward)
    return tables(root)


def calibrate_with(root: Path, reward: str) -> None:
    """Score and calibrate the rollouts of a run with another reward."""
    again(root, f"reward={reward}", until="calibrate")


def url_of(server: RewardServer, **more: str) -> str:
    """Return the server as a recipe names it."""
    return json.dumps({"url": server.url} | more)


def rows(root: Path) -> tuple[list[Any], list[str]]:
    """Return the prompts and the texts of one part of the rollouts."""
    prompts = pq.read_table(root / "data" / "train_prompts.parquet", columns=["prompt_id", "prompt"]).to_pylist()
    conversations = {row["prompt_id"]: row["prompt"] for row in prompts}
    rollouts = pq.read_table(root / "rollouts" / "part-0").to_pylist()
    return [conversations[row["prompt_id"]] for row in rollouts], [row["text"] for row in rollouts]


def keep(lab: Lab, reward: Any) -> list[float]:
    """Score one part of the finished run's rollouts, a prompt a shard, and return the rewards."""
    options = {"name": "reward", "made_by": "a", "shard_responses": 6, "on_progress": lambda done, total: None}
    return score_to(lab.folder / "scores", reward, *rows(lab.finished), **options).tolist()


@contextmanager
def impatient(attempts: int = 2) -> Iterator[RewardServer]:
    """Yield a reward server; requests are repeated at once, and so many times only."""
    with stamina.set_testing(True, attempts=attempts), RewardServer() as server:
        yield server


@contextmanager
def module(lab: Lab, source: str, name: str) -> Iterator[Path]:
    """Yield the file of a module that can be imported until the end."""
    file = lab.folder / f"{name}.py"
    file.write_text(source)
    sys.path.insert(0, str(lab.folder))
    importlib.invalidate_caches()
    try:
        yield file
    finally:
        sys.path.remove(str(lab.folder))
        sys.modules.pop(name, None)


# Servers


@fault("the reward server dies halfway and comes back")
def dies_halfway(lab: Lab) -> Seen:
    """Scores before its death are kept and not asked for again; the rewards are those of a healthy server."""
    expected, root = calibrated(lab), lab.copy()
    with impatient() as server:
        server.broken_after = 2 + 1  # part 0, the golden rows before part 1, part 1
        seen = told(lambda: calibrate_with(root, url_of(server)))
        asked = {query for body in server.bodies[:3] for query in body["query"]}
        server.broken_after = None
        server.bodies.clear()
        calibrate_with(root, url_of(server))
        golden = 4  # rows asked again, to see that it is the same server
        assert not asked & {q for body in server.bodies if len(body["query"]) > golden for q in body["query"]}
    assert tables(root) == expected
    return seen


@fault("the reward server answers 500, then 429 with Retry-After, then resets the connection")
def passing(lab: Lab) -> Seen:
    """The request is repeated, the wait granted, and nobody notices."""
    with RewardServer() as server:
        server.script = [500, 429, "reset"]
        rewards = keep(lab, RemoteReward(server.url, load_tokenizer(lab.finished / "data" / "tokenizer")))
        assert len(server.bodies) == 3 + 3
    assert rewards == gold(*rows(lab.finished))
    return Seen(0, "")


def stays_away(lab: Lab, how: str) -> Seen:
    """The run ends in bounded time with the first prompt's scores kept, and goes on when the server is back."""
    with impatient() as server:
        server.script = [None, how, how]
        tokenizer = load_tokenizer(lab.finished / "data" / "tokenizer")
        seen = told(
            lambda: keep(lab, RemoteReward(server.url, tokenizer, read_seconds=0.3, retry_seconds=1.0, in_flight=1))
        )
        assert len(list((lab.folder / "scores").iterdir())) == 1
        server.bodies.clear()
        assert keep(lab, RemoteReward(server.url, tokenizer)) == gold(*rows(lab.finished))
        assert len(server.bodies) == 2
    return seen


fault("the reward server takes the request and never answers")(partial(stays_away, how="hang"))
fault("the reward server answers a byte at a time, each within the time to wait")(partial(stays_away, how="trickle"))


@fault("nobody listens at the reward server's address")
def refused_connection(lab: Lab) -> Seen:
    """The run ends as one that continues when the server is started."""
    root = lab.copy()
    with socket.socket() as free, stamina.set_testing(True, attempts=2):
        free.bind(("127.0.0.1", 0))
        return told(lambda: calibrate_with(root, f"{{url: 'http://127.0.0.1:{free.getsockname()[1]}'}}"))


@fault("the reward server refuses the API key, and its answer repeats the key and colours the terminal", brief=True)
def bad_key(lab: Lab) -> Seen:
    """One request, no more; the body is quoted without the key and without control characters."""
    root = lab.copy()
    with impatient() as server:
        server.script = [(401, b"\x1b[31mno such key: secret\x1b]0;mine\x07")]
        os.environ["REWARD_KEY"] = "secret"
        try:
            seen = told(lambda: calibrate_with(root, url_of(server, api_key_env="REWARD_KEY")))
        finally:
            del os.environ["REWARD_KEY"]
        assert len(server.bodies) == 1
    assert "secret" not in seen.said
    assert seen.said.isprintable()
    return seen


def bad_answer(lab: Lab, answer: bytes) -> Seen:
    """The answer is refused with its place, scores before it are kept, and a good answer completes them."""
    with impatient() as server:
        server.script = [None, answer]
        reward = RemoteReward(server.url, load_tokenizer(lab.finished / "data" / "tokenizer"), in_flight=1)
        seen = told(lambda: keep(lab, reward))
        assert seen.code == 3
        assert len(list((lab.folder / "scores").iterdir())) == 1
        assert keep(lab, reward) == gold(*rows(lab.finished))
    return seen


for what, value in {
    "NaN": "NaN",
    "an infinite number": "1e999",
    "an integer of 400 digits": "9" * 400,
    "a string for a number": '"0.5"',
    "true for a number": "true",
    "null for a number": "null",
}.items():
    sixth = f'{{"rewards": [0, 1, 2, 3, 4, {value}]}}'.encode()
    fault(f"the reward server gives {what}", brief=what == "NaN")(partial(bad_answer, answer=sixth))
fault("the reward server gives five rewards for six responses")(partial(bad_answer, answer=b'{"rewards": [1,2,3,4,5]}'))
fault("a gateway answers in place of the reward server")(partial(bad_answer, answer=b"Bad Gateway"))


@fault("another model answers at the reward server's address")
def another_server(lab: Lab) -> Seen:
    """It is found before anything more is scored; with the old one back the run ends as if nothing had been."""
    expected, root = calibrated(lab), lab.copy()
    with impatient() as server:
        server.broken_after = 3
        assert told(lambda: calibrate_with(root, url_of(server))).code == 4
        server.broken_after, server.scale = None, 3.0
        seen = told(lambda: calibrate_with(root, url_of(server)))
        server.scale = 1.0
        calibrate_with(root, url_of(server))
    assert tables(root) == expected
    return seen


# Functions


@fault("a reward function raises for some texts, because what it calls is down")
def raises(lab: Lab) -> Seen:
    """The error names rows, prompt and line; when it works again only what is missing is scored."""
    expected, root = calibrated(lab), lab.copy()
    down = lab.folder / "down"
    down.write_text("0")
    source = """\
from pathlib import Path

from infalign.world import gold

DOWN = Path(__file__).with_name("down")

def reward(prompts, responses):
    if DOWN.exists():
        calls = int(DOWN.read_text())
        DOWN.write_text(str(calls + 1))
        if calls >= 2:
            raise ConnectionError("quota of tokens exceeded")
    return gold(prompts, responses)
"""
    with module(lab, source, "flaky"):
        seen = told(lambda: calibrate_with(root, "{function: 'flaky:reward'}"))
        assert (root / "scores" / "part-0.parquet").exists()
        down.unlink()
        calibrate_with(root, "{function: 'flaky:reward'}")
    assert tables(root) == expected
    return seen


@fault("a reward function returns one reward too few")
def too_few(lab: Lab) -> Seen:
    """It is refused with the rows that it was asked for."""
    root = lab.copy()
    with module(lab, TO_GOLD + "    return gold(prompts, responses)[1:]\n", "forgetful"):
        return told(lambda: calibrate_with(root, "{function: 'forgetful:reward'}"))


@fault("a reward function gives the same text another number every time", brief=True)
def restless(lab: Lab) -> Seen:
    """Four of its rewards are asked for again before the next part, and the run stops where they differ."""
    root = lab.copy()
    source = "from itertools import count\n\nnumbers = count()\n\ndef reward(prompts, responses):\n"
    source += "    return [next(numbers) for _ in responses]\n"
    with module(lab, source, "restless"):
        return told(lambda: calibrate_with(root, "{function: 'restless:reward'}"))


@fault("a reward function reads a file that changes between calibration and training")
def changes(lab: Lab) -> Seen:
    """Training asks for four stored rewards first and refuses others; with the file as it was it goes on."""
    root, scale = lab.copy(), lab.folder / "scale"
    source = TO_GOLD + "    scale = float(Path(__file__).with_name('scale').read_text())\n"
    source = f"from pathlib import Path\n\n{source}    return [scale * value for value in gold(prompts, responses)]\n"
    scale.write_text("1")
    with module(lab, source, "scaled"):
        calibrate_with(root, "{function: 'scaled:reward'}")
        scale.write_text("2")
        changed = ["reward={function: 'scaled:reward'}"]
        seen = told(lambda: again(root, *changed, until="train"))
        scale.write_text("1")
        assert "train-online" in again(root, *changed, until="train")
    return seen


@fault("a reward function gives every response the same reward")
def constant(lab: Lab) -> Seen:
    """Every rank is one half and policies have nothing to learn: they are trained only if that is allowed."""
    root, flat = lab.copy(), "reward={function: 'constant:reward'}"
    with module(lab, "def reward(prompts, responses):\n    return [7.0] * len(responses)\n", "constant"):
        seen = told(lambda: again(root, flat, "allow_worthless=false", until="train"))
        assert told(lambda: again(root, flat, "allow_worthless=false", until="train")) == seen
        trained = again(root, flat, until="train")
        assert sorted(trained) == ["train-aware", "train-online", "train-plain"]
    references = pq.read_table(root / "calibrated.parquet")["reference_rewards"].to_pylist()
    assert all(calibrate(7.0, np.array(row)) == 0.5 for row in references)
    summary = json.loads((root / "stages" / "calibrate.json").read_text())["summary"]
    assert summary["degenerate_prompts"] == summary["prompts"] == len(references)
    return seen


def wrong_function(lab: Lab, body: str, name: str) -> Seen:
    """The scoring is refused, and with a function that gives numbers the run ends as one that never had another."""
    root = lab.copy()
    with module(lab, f"import os, sys\n\ndef reward(prompts, responses):\n    {body}\n", name):
        return told(lambda: calibrate_with(root, f"{{function: '{name}:reward'}}"))


for what, body in {
    "a dict of rewards by response": "return {r: float(i) for i, r in enumerate(responses)}",
    "a dict whose keys are numbers": "return {float(i): r for i, r in enumerate(responses)}",
    "a set": "return {float(i) for i in range(len(responses))}",
    "whole numbers that no float tells apart": "return [2**53 + i for i in range(len(responses))]",
    "a generator": "return (float(len(r)) for r in responses)",
    "complex numbers": "return [complex(len(r), 0) for r in responses]",
    "fractions": "from fractions import Fraction; return [Fraction(len(r), 3) for r in responses]",
    "truth values of NumPy": "import numpy; return numpy.array([len(r) > 9 for r in responses])",
    "a column of numbers for a row of them": "import numpy; return numpy.zeros((len(responses), 1))",
    "an array in which a number is masked": "import numpy; "
    "return numpy.ma.masked_array([0.0] * len(responses), mask=[True] + [False] * (len(responses) - 1))",
    "numbers of half precision, one of them infinite": "import numpy; "
    "return numpy.array([7e4] + [1.0] * (len(responses) - 1)).astype('float16')",
    "one number for all": "return 1.0",
    "nothing": "return None",
    "text of the right length": "return '1' * len(responses)",
}.items():
    fault(f"a reward function returns {what}", brief=True)(
        partial(wrong_function, body=body, name="returns_" + re.sub(r"\W", "_", what))
    )
for what, body in {
    "raises StopIteration": "next(iter([]))",
    "raises GeneratorExit": "raise GeneratorExit",
    "calls itself for ever": "return reward(prompts, responses)",
    "raises an exception that cannot be printed": "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
}.items():
    fault(f"a reward function {what}", brief=True)(partial(wrong_function, body=body, name=what.replace(" ", "_")))
fault("a reward function calls sys.exit(0)", brief=True)(partial(wrong_function, body="sys.exit(0)", name="leaves"))


@fault("the module of a reward function calls sys.exit(0)", brief=True)
def leaves_on_import(lab: Lab) -> Seen:
    """It is no success, for a run and a dry run alike."""
    root = lab.copy()
    with module(lab, "import sys\n\nsys.exit(0)\n", "leaves_early"):
        return told(lambda: calibrate_with(root, "{function: 'leaves_early:reward'}"))


@fault("a reward function rewrites its prompts and responses and changes the directory", brief=True)
def rewrites(lab: Lab) -> Seen:
    """It gets copies: what is stored, and what other rewards see, is as if it had not."""
    expected, root = calibrated(lab), lab.copy()
    source = "    rewards = gold(prompts, responses)\n    for prompt in prompts:\n        prompt.clear()\n"
    source += "    responses.clear()\n    os.chdir('/')\n    return rewards\n"
    here = Path.cwd()
    os.chdir(lab.folder)
    try:
        with module(lab, f"import os\n{TO_GOLD}{source}", "rude"):
            calibrate_with(root.relative_to(lab.folder), "{function: 'rude:reward'}")
    finally:
        os.chdir(here)
    assert tables(root) == expected
    return Seen(0, "")


@fault("a trainer's data has no calibrated rewards of the prompt", brief=True)
def no_references(lab: Lab) -> Seen:
    """The reward that TRL calls refuses to make up a rank."""
    prompts, texts = rows(lab.finished)
    return told(lambda: CalibratedReward(gold, Identity())(prompts, texts))


@fault("a reward function gives a trainer strings for numbers", brief=True)
def strings(lab: Lab) -> Seen:
    """The reward that TRL calls converts nothing."""
    prompts, texts = rows(lab.finished)
    reward = CalibratedReward(lambda prompts, responses: ["0.5"] * len(responses), Identity())
    return told(lambda: reward(prompts, texts, [[0.0, 1.0]] * len(texts)))


# Models


def exchanged(lab: Lab, name: str, file: str, change: Callable[[Path], None]) -> Seen:
    """Training refuses rewards that another model was asked for; with the old file back the run ends as it would."""
    root = lab.copy()
    path = root / "models" / name / file
    shutil.copy(path, lab.folder / file)
    change(path)
    shutil.rmtree(root / "models" / "aware")
    seen = told(lambda: again(root, until="train"))
    assert not (root / "models" / "aware").exists()
    shutil.copy(lab.folder / file, path)
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return seen


def double(weights: Path) -> None:
    """Multiply all weights of a model by 2."""
    save_file({name: 2 * values for name, values in load_file(weights).items()}, weights, {"format": "pt"})


def shout(template: Path) -> None:
    """Let the chat template turn the messages of users into capitals."""
    template.write_text(template.read_text().replace("message['content']", "message['content'] | upper"))


fault("the reward model is exchanged for another after calibration")(
    partial(exchanged, name="reward", file="model.safetensors", change=double)
)
fault("the chat template is changed after calibration")(
    partial(exchanged, name="reference", file="chat_template.jinja", change=shout)
)


@fault("a reward model scores rows in batches of other sizes", brief=True)
def other_batches(lab: Lab) -> Seen:
    """Padding and neighbours do not change a reward."""
    whole = ClassifierReward.load(lab.finished / "models" / "reward")
    small = ClassifierReward.load(lab.finished / "models" / "reward", batch_tokens=100)
    found, expected = (reward(*rows(lab.finished)) for reward in (small, whole))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    return Seen(0, "")
