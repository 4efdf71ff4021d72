"""Rewards go wrong: a server that fails in every way, a function that raises or changes, a model that was exchanged."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import retries

from faults.lab import Lab, Seen, again, module, summary, tables, told
from faults.registry import fault
from faults.server import RewardServer
from infalign.data.messages import prompt_id
from infalign.method.calibration import calibrate
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_to
from infalign.rewards.server import RemoteReward
from infalign.rewards.sources import function_reward
from infalign.world import gold

GOLD = "reward={function: 'infalign.world:gold'}"


def calibrated(lab: Lab, reward: str = GOLD) -> dict[str, Any]:
    """Return the tables of an undisturbed run with another reward, up to its calibration."""
    root = lab.copy("undisturbed")
    again(root, reward, until="calibrate")
    return tables(root)


def remote(lab: Lab, url: str, **options: Any) -> RemoteReward:
    """Return the reward of a server."""
    return RemoteReward(url, load_tokenizer(lab.finished / "data" / "tokenizer"), **options)


def rows(root: Path) -> tuple[list[Any], list[str]]:
    """Return the prompts and the texts of one part of the rollouts."""
    prompts = pq.read_table(root / "data" / "train_prompts.parquet", columns=["prompt_id", "prompt"]).to_pylist()
    conversations = {row["prompt_id"]: row["prompt"] for row in prompts}
    rollouts = pq.read_table(root / "rollouts" / "part-0").to_pylist()
    return [conversations[row["prompt_id"]] for row in rollouts], [row["text"] for row in rollouts]


def keep(lab: Lab, reward: Any) -> list[float]:
    """Score one part of the finished run's rollouts, a prompt a shard, and return the rewards."""
    named, options = NamedReward(reward, "reward", "a"), {"shard_responses": 6, "on_progress": lambda *_: None}
    return score_to(lab.folder / "scores", named, Batch(*rows(lab.finished)), **options).tolist()


@contextmanager
def impatient(attempts: int = 2) -> Iterator[RewardServer]:
    """Yield a reward server; requests are repeated at once, and so many times only."""
    with retries.attempts(attempts), RewardServer() as server:
        yield server


@fault(4, brief=True)
def dies_halfway(lab: Lab) -> Seen:
    """The reward server dies halfway, and comes back → Start it and rerun; its scores are kept."""
    expected, root = calibrated(lab), lab.copy()
    with impatient() as server:
        reward = f"reward={json.dumps({'url': server.url})}"
        server.broken_after = 2 + 1  # part 0, the golden rows before part 1, part 1
        seen = told(lambda: again(root, reward, until="calibrate"))
        asked = {query for body in server.bodies[:3] for query in body["query"]}
        server.broken_after = None
        server.bodies.clear()
        again(root, reward, until="calibrate")
        golden = 4  # rows asked again, to see that it is the same server
        assert not asked & {q for body in server.bodies if len(body["query"]) > golden for q in body["query"]}
    assert tables(root) == expected
    return seen


@fault(0, brief=True)
def passing(lab: Lab) -> None:
    """The reward server answers 500, 408, 429, or resets the connection → Nothing; requests are repeated."""
    begun = time.monotonic()
    with RewardServer() as server:
        server.script = [500, 408, 429, "reset"]
        assert keep(lab, remote(lab, server.url)) == gold(*rows(lab.finished))
        assert len(server.bodies) == 3 + 4
    assert time.monotonic() - begun >= 1.0  # the wait that 429 asks for


@fault(4, {"never": "hang", "bytes": "trickle"}, brief=True)
def stays_away(lab: Lab, how: str) -> Seen:
    """The reward server never answers, or a byte at a time → Within bounded time: start it and rerun."""
    with impatient() as server:
        server.script = [None, how, how]
        hasty = remote(lab, server.url, read_seconds=0.3, retry_seconds=1.0, in_flight=1)
        seen = told(lambda: keep(lab, hasty))
        completed(lab, server)
        assert len(server.bodies) == 3 + 2
    return seen


def completed(lab: Lab, server: RewardServer) -> None:
    """Check that scores of one prompt are kept, and that the server completes them."""
    assert len(list((lab.folder / "scores").iterdir())) == 1
    assert keep(lab, remote(lab, server.url)) == gold(*rows(lab.finished))


NUMBERS = ("NaN", "-Infinity", "1e999", "9" * 400, '"0.5"', "true", "null", "[0.5]")
SHAPES = (
    b'{"rewards": [1, 2, 3, 4, 5]}',
    b'{"rewards": [1, 2, 3, 4, 5, 6, 7]}',
    b'{"rewards": [1, 2, 3, 4, 5, 6], "rewards": [6, 5, 4, 3, 2, 1]}',
    b'{"rewards": [1, 2, 3, 4, 9007199254740992, 9007199254740993]}',  # one float
    b"[1, 2, 3, 4, 5, 6]",
    b'{"rewards": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"Bad Gateway",
    b"",
)


@fault(
    3,
    {f"number {i}": f'{{"rewards": [0, 1, 2, 3, 4, {value}]}}'.encode() for i, value in enumerate(NUMBERS)}
    | {f"shape {i}": answer for i, answer in enumerate(SHAPES)},
    brief=True,
)
def bad_answer(lab: Lab, answer: bytes) -> Seen:
    """The reward server gives no finite number for a response → Row, prompt and value; earlier scores are kept."""
    with impatient() as server:
        server.script = [None, answer]
        seen = told(lambda: keep(lab, remote(lab, server.url, in_flight=1)))
        completed(lab, server)
    return seen


FLAKY = """\
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


@fault(1)
def raises(lab: Lab) -> Seen:
    """A reward function raises for some texts → Rows, prompt and line; a rerun scores what is missing."""
    expected, root = calibrated(lab), lab.copy()
    down = lab.folder / "down"
    down.write_text("0")
    with module(lab, FLAKY, "flaky") as reward:
        seen = told(lambda: again(root, reward, until="calibrate"))
        assert (root / "scores" / "part-0.parquet").exists()
        down.unlink()
        again(root, reward, until="calibrate")
    assert tables(root) == expected
    return seen


@fault(3, brief=True)
def restless(lab: Lab) -> Seen:
    """A reward function gives the same text another number every time → Two rewards of one row that differ."""
    root = lab.copy()
    source = "from itertools import count\n\nnumbers = count()\n\ndef reward(prompts, responses):\n"
    with module(lab, source + "    return [next(numbers) for _ in responses]\n", "restless") as reward:
        return told(lambda: again(root, reward, until="calibrate"))


@fault(1)
def constant(lab: Lab) -> Seen:
    """A reward function gives all responses one reward → There is nothing to learn; `allow_worthless` continues."""
    root = lab.copy()
    with module(lab, "def reward(prompts, responses):\n    return [7.0] * len(responses)\n", "constant") as flat:
        seen = told(lambda: again(root, flat, "allow_worthless=false", until="train"))
        assert told(lambda: again(root, flat, "allow_worthless=false", until="train")) == seen
        assert sorted(again(root, flat, until="train")) == ["train-aware", "train-online", "train-plain"]
    references = pq.read_table(root / "calibrated.parquet")["reference_rewards"].to_pylist()
    assert all(calibrate(7.0, np.array(row)) == 0.5 for row in references)
    found = summary(root, "calibrate")
    assert found["degenerate_prompts"] == found["prompts"] == len(references)
    assert found["tied"] == 1
    return seen


RESULTS = {
    "a dict by response": "{r: float(i) for i, r in enumerate(responses)}",
    "one too few": "[0.0] * (n - 1)",
    "one number for all": "1.0",
    "nothing": "None",
    "NaN": "[float('nan')] * n",
    "infinite half precision": "numpy.array([numpy.inf] * n, 'float16')",
    "whole numbers that no float tells apart": "[2**53 + i for i in range(n)]",
    "strings": "['1.5'] * n",
    "None for some": "[None] + [0.0] * (n - 1)",
    "a masked number": "numpy.ma.masked_array([0.0] * n, mask=[True] + [False] * (n - 1))",
}
ENDS = {
    "StopIteration": "next(iter([]))",
    "GeneratorExit": "raise GeneratorExit",
    "calls itself for ever": "reward(prompts, responses)",
    "sys.exit(0)": "sys.exit(0)",
}


def reward_of(lab: Lab, line: str) -> Seen:
    """Score with a reward function whose last line is given; the error names the first prompt."""
    source = f"import numpy, sys\n\ndef reward(prompts, responses):\n    n = len(responses)\n    {line}\n"
    with module(lab, source, "odd"):
        seen = told(lambda: keep(lab, function_reward("odd:reward")))
    assert prompt_id(rows(lab.finished)[0][0]) in seen.said
    return seen


@fault(3, RESULTS, brief=True)
def wrong_result(lab: Lab, result: str) -> Seen:
    """A reward function returns no finite number for a response → Rows and value; nothing is converted."""
    return reward_of(lab, f"return {result}")


@fault(1, ENDS, brief=True)
def odd_end(lab: Lab, line: str) -> Seen:
    """A reward function ends in an odd exception → The exception and the rows."""
    return reward_of(lab, line)


@fault(2, {"exit": "sys.exit(0)", "syntax": "def x(:", "error": "1 / 0"}, brief=True)
def ends_on_import(lab: Lab, line: str) -> Seen:
    """The module of a reward function fails or exits → The exception."""
    here = Path.cwd()
    with module(lab, f"import os, sys\nos.chdir('/')\n{line}\n", "fails"):
        seen = told(lambda: function_reward("fails:reward"))
    assert Path.cwd() == here
    return seen
