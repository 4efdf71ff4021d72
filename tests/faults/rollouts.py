"""Rollouts and trainings go wrong: servers, memory, models without numbers, and trainings that diverge."""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import stamina
import torch
from safetensors.torch import load_file, save_file

from faults.registry import Lab, Seen, again, fault, printed, tables
from faults.rewards import told
from faults.server import RolloutServer
from infalign.models.pretrained import load_policy
from infalign.sampling.engine import Prompt, Sampling
from infalign.sampling.launch import serving
from infalign.sampling.rollouts import draw, read_rollouts
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine

# The means: a server of the reference policy, prompts, and an engine that has room for a few responses


@contextmanager
def served(lab: Lab) -> Iterator[RolloutServer]:
    """Yield a server of the finished run's reference policy; requests are repeated once, and at once."""
    policy = load_policy(lab.finished / "models" / "reference")
    with stamina.set_testing(True, attempts=2), RolloutServer(*policy) as server:
        yield server


def draw_from(root: Path, server: RolloutServer, in_flight: int = 8) -> list[str]:
    """Draw the rollouts of a run from the server, as far as they do not come from there already."""
    engine = f"{{kind: server, url: '{server.url}', in_flight: {in_flight}}}"
    return again(root, f"rollout.engine={engine}", until="rollout")


def prompts(lab: Lab) -> list[Prompt]:
    """Return the first training prompts of the finished run."""
    table = pq.read_table(lab.finished / "data" / "train_prompts.parquet").slice(0, 3)
    return [Prompt(row["prompt_id"], row["token_ids"]) for row in table.to_pylist()]


def drawn(lab: Lab, policy: tuple[Any, Any], name: str = "drawn") -> list[dict[str, Any]]:
    """Return six rollouts of each of these prompts."""
    asked = prompts(lab)
    engine = SharedPrefixEngine(*policy, Sampling(12))
    draw(engine, asked, 6, lab.folder / name, on_progress=lambda done, total: None)
    return read_rollouts(lab.folder / name, [prompt.prompt_id for prompt in asked], 6).to_pylist()


@contextmanager
def room_for(model: Any, rows: int) -> Iterator[list[int]]:
    """Let memory run out whenever the model is given more rows; yield the numbers of rows that it was given."""
    given: list[int] = []

    def check(module: Any, arguments: Any, options: Any) -> None:
        given.append(len(options["input_ids"]))
        if given[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    hook = model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield given
    finally:
        hook.remove()


# Servers


@fault("the inference server dies halfway and comes back")
def dies_halfway(lab: Lab) -> Seen:
    """The prompts before its death are kept and not asked for again."""
    root = lab.copy()
    with served(lab) as server:
        server.broken_after = 2 + 5  # the probe and five prompts
        seen = told(lambda: draw_from(root, server))
        before = pq.read_table(root / "rollouts" / "part-0").to_pylist()
        assert len(before) == 5 * 6
        server.broken_after = None
        server.bodies.clear()
        assert "rollout-0" in draw_from(root, server)
        assert len(server.bodies) == 2 + 7
    after = pq.read_table(root / "rollouts" / "part-0").to_pylist()
    assert (len(after), after[: len(before)]) == (12 * 6, before)
    return seen


@fault("the inference server gives fewer responses than asked for")
def fewer(lab: Lab) -> Seen:
    """The missing ones are asked for."""
    root = lab.copy()
    with served(lab) as server:
        server.script = [None, None, "short"]
        draw_from(root, server, in_flight=1)
        assert [body["n"] for body in server.bodies[2:5]] == [6, 3, 6]
    assert pq.read_table(root / "rollouts" / "part-0").num_rows == 12 * 6
    return Seen(0, "")


def cannot_be_used(lab: Lab, fault: Any) -> Seen:
    """Nothing is drawn from it; from the engine of before the run has what it had."""
    root = lab.copy()
    with served(lab) as server:
        if isinstance(fault, float):
            server.truncate_to = fault
        else:
            server.script = [None, fault]
        seen = told(lambda: draw_from(root, server))
        assert seen.code == 2
        assert not list(root.glob("rollouts/part-0/*"))
    again(root, until="calibrate")
    assert tables(root) == tables(lab.finished)
    return seen


for what, script in {
    "returns one response eight times": "equal",
    "answers another prompt than it was asked": '{"prompt_token_ids": [9]}',
    "returns text without token ids": "no ids",
    "ends responses with another token than the policy's": '{"finish_reason": "stop", "token_ids": [9, 9]}',
    "draws from the 30 % likeliest tokens only": 0.3,
    "refuses the request": (400, {"error": "no model of this name"}),
    "is no inference server": (200, {"result": 1}),
}.items():
    fault(f"the inference server {what}")(partial(cannot_be_used, fault=script))


@fault("the recipe's command that starts the inference server cannot be started", brief=True)
def no_command(lab: Lab) -> Seen:
    """The missing program is named."""

    def start() -> None:
        with serving("absent-program {model}", "a model", "unused"):
            pass

    return told(start)


@fault("the inference server ends before it answers")
def ends_at_once(lab: Lab) -> Seen:
    """The run does not wait for it."""

    def start() -> None:
        with serving(f"{sys.executable} -S -c 'import os; os._exit(7)'", "a model", "unused"):
            pass

    return told(start)


# Engines


@fault("memory runs out with more than two responses at once", brief=True)
def little_memory(lab: Lab) -> Seen:
    """Half as many are drawn at once, from then on, and the responses are the same."""
    policy = load_policy(lab.finished / "models" / "reference")
    expected = drawn(lab, policy)
    engine = SharedPrefixEngine(*policy, Sampling(12))
    asked = prompts(lab)
    with room_for(policy[0], 2) as given:
        draw(engine, asked, 6, lab.folder / "little", on_progress=lambda done, total: None)
    assert [rows for rows in given if rows > 2] == [18, 6, 3]  # three prompts, one, half of one
    found = read_rollouts(lab.folder / "little", [prompt.prompt_id for prompt in asked], 6).to_pylist()
    for one, other in zip(found, expected, strict=True):
        assert math.isclose(one.pop("logprob"), other.pop("logprob"), rel_tol=1e-5)
        assert one == other
    return Seen(0, "")


@fault("memory does not even suffice for one response")
def no_memory(lab: Lab) -> Seen:
    """The run ends as one that can go on, what was drawn is kept, and with enough memory it goes on."""
    model, tokenizer = load_policy(lab.finished / "models" / "reference")
    engine, asked = TransformersEngine(model, tokenizer, Sampling(12)), prompts(lab)
    go_on = partial(draw, engine, asked, 6, lab.folder / "drawn", on_progress=lambda done, total: None)
    draw(engine, asked[:1], 6, lab.folder / "drawn", on_progress=lambda done, total: None)
    with room_for(model, 0):
        seen = told(go_on)
    assert len(list((lab.folder / "drawn").iterdir())) == 1
    go_on()
    read_rollouts(lab.folder / "drawn", [prompt.prompt_id for prompt in asked], 6)
    return seen


@fault("the model folder's generation_config.json asks for greedy, truncated sampling", brief=True)
def sampling_of_the_folder(lab: Lab) -> Seen:
    """It has no say: the rollouts are those of the policy itself."""
    folder = Path(shutil.copytree(lab.finished / "models" / "reference", lab.folder / "policy"))
    wishes = {"do_sample": True, "top_k": 1, "temperature": 0.1, "repetition_penalty": 9.0, "suppress_tokens": [4]}
    expected = drawn(lab, load_policy(folder))
    (folder / "generation_config.json").write_text(json.dumps(wishes))
    assert drawn(lab, load_policy(folder), "again") == expected
    return Seen(0, "")


@fault("no response ends: all are cut off at max_new_tokens")
def cut_off(lab: Lab) -> Seen:
    """They are kept as cut off, scored as they are, their share is in every report, and the run says the cure."""
    root = lab.copy()
    said = [line for line in printed(root, "rollout.max_new_tokens=1", until="score") if line.startswith("!")]
    summary = json.loads((root / "stages" / "score-0.json").read_text())["summary"]
    finishes = pq.read_table(root / "rollouts" / "part-0")["finish"].to_pylist()
    assert finishes.count("length") / len(finishes) == summary["cut_off"] > 0.9
    assert len(said) == 1
    assert "reach rollout.max_new_tokens (1)" in said[0]
    return Seen(0, said[0])


@fault("the weights of a policy hold NaN", brief=True)
def nan_weights(lab: Lab) -> Seen:
    """Nothing is drawn from it."""
    folder = Path(shutil.copytree(lab.finished / "models" / "reference", lab.folder / "policy"))
    weights = load_file(folder / "model.safetensors")
    save_file({name: values * math.nan for name, values in weights.items()}, folder / "model.safetensors")
    return told(lambda: drawn(lab, load_policy(folder)))


@fault("a shard of rollouts was deleted")
def lost_shard(lab: Lab) -> Seen:
    """It is drawn again, and it is the same."""
    root = lab.copy()
    next((root / "rollouts" / "part-0").glob("part-*.parquet")).unlink()
    assert "rollout-0" in again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return Seen(0, "")


# Training


@fault("a training diverges: its loss is no number")
def diverges(lab: Lab) -> Seen:
    """No model is saved, and with the learning rate of before the run ends as it would."""
    root = lab.copy()
    wild = ["policies.aware.fit.learning_rate=1e30", "policies.aware.fit.epochs=4"]
    seen = told(lambda: again(root, *wild, until="train"))
    assert not (root / "models" / "aware").exists()
    for checkpoint in (root / "checkpoints" / "aware").glob("checkpoint-*/model.safetensors"):
        assert all(bool(values.isfinite().all()) for values in load_file(checkpoint).values())
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return seen


@fault("β is so small that e^(Φ/β) exceeds every float")
def overflow(lab: Lab) -> Seen:
    """Targets are computed on the log scale, and the policy has finite weights."""
    root = lab.copy()
    policies = "{aware: {transform: 'exp:10', beta: 0.01, fit: {batch_size: 32, max_length: 192}}}"
    again(root, f"policies={policies}", until="train")
    weights = load_file(root / "models" / "aware" / "model.safetensors")
    assert all(bool(values.isfinite().all()) for values in weights.values())
    return Seen(0, "")
