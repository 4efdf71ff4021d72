"""Rollouts and trainings go wrong: servers, memory, models without numbers, and trainings that diverge."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq
import retries
import torch
from safetensors.torch import load_file

from faults.lab import Lab, Seen, again, printed, summary, told
from faults.registry import fault
from faults.server import RolloutServer
from infalign.models.pretrained import load_policy
from infalign.sampling.engine import Prompt, Sampling
from infalign.sampling.launch import serving
from infalign.sampling.rollouts import draw, read_rollouts
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine


def drawn(lab: Lab, engine: Any, name: str = "drawn", prompts: int = 3) -> list[dict[str, Any]]:
    """Return six rollouts of each of the first training prompts."""
    table = pq.read_table(lab.finished / "data" / "train_prompts.parquet").slice(0, prompts)
    asked = [Prompt(row["prompt_id"], row["token_ids"]) for row in table.to_pylist()]
    draw(engine, asked, 6, lab.folder / name, on_progress=lambda *_: None)
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


@fault(4)
def dies_halfway(lab: Lab) -> Seen:
    """The inference server dies halfway, and comes back → Start it and rerun; its rollouts are kept."""
    root = lab.copy()
    policy = load_policy(lab.finished / "models" / "reference")
    with retries.attempts(2), RolloutServer(*policy) as server:
        engine = f"rollout.engine={{kind: server, url: '{server.url}', in_flight: 8}}"
        server.broken_after = 1 + 5  # the probe and five prompts
        seen = told(lambda: again(root, engine, until="rollout"))
        before = pq.read_table(root / "rollouts" / "part-0").to_pylist()
        assert len(before) == 5 * 6
        server.broken_after = None
        server.bodies.clear()
        assert "rollout-0" in again(root, engine, until="rollout")
        assert len(server.bodies) == 2 + 7
    after = pq.read_table(root / "rollouts" / "part-0").to_pylist()
    assert (len(after), after[: len(before)]) == (12 * 6, before)
    return seen


def start(command: str) -> None:
    """Start an inference server."""
    with serving(command, "a model", "float32"):
        pass


@fault(2, brief=True)
def no_program(lab: Lab) -> Seen:
    """The command that starts the inference server names no program → The missing program."""
    return told(lambda: start("absent-program {model}"))


@fault(4)
def ends_at_once(lab: Lab) -> Seen:
    """The inference server ends before it answers → At once: its exit code and its last lines."""
    seen = told(lambda: start(f"{sys.executable} -S -c 'import os; print(1); exec(\"raise MemoryError(7)\")'"))
    assert "exit code 1" in seen.said
    assert "MemoryError: 7" in seen.said
    return seen


@fault(0, brief=True)
def little_memory(lab: Lab) -> None:
    """Memory runs out with more than two responses at once → Nothing; fewer are drawn at once."""
    model, tokenizer = load_policy(lab.finished / "models" / "reference")
    expected = drawn(lab, SharedPrefixEngine(model, tokenizer, Sampling(12)))
    engine = SharedPrefixEngine(model, tokenizer, Sampling(12))
    with room_for(model, 2) as given:
        found = drawn(lab, engine, "little")
    assert [rows for rows in given if rows > 2] == [18, 9, 4]  # three prompts, and half as many each time
    for one, other in zip(found, expected, strict=True):
        assert math.isclose(one.pop("logprob"), other.pop("logprob"), rel_tol=1e-5)
        assert one == other


@fault(4)
def no_memory(lab: Lab) -> Seen:
    """Memory does not even suffice for one response → Memory ran out; what was drawn is kept."""
    model, tokenizer = load_policy(lab.finished / "models" / "reference")
    engine = TransformersEngine(model, tokenizer, Sampling(12))
    drawn(lab, engine, prompts=1)
    with room_for(model, 0):
        seen = told(lambda: drawn(lab, engine))
    assert len(list((lab.folder / "drawn").iterdir())) == 1
    drawn(lab, engine)
    return seen


@fault(0)
def cut_off(lab: Lab) -> Seen:
    """No response ends before `max_new_tokens` → A warning below the scores: the share, and what to raise."""
    root = lab.copy()
    (said,) = (line for line in printed(root, "rollout.max_new_tokens=1", until="score") if line.startswith("!"))
    finishes = pq.read_table(root / "rollouts" / "part-0")["finish"].to_pylist()
    assert finishes.count("length") / len(finishes) == summary(root, "score-0")["cut_off"] > 0.9
    assert "are cut off at rollout.max_new_tokens (1)" in said
    return Seen(0, said)


@fault(1)
def diverges(lab: Lab) -> Seen:
    """A training diverges: its loss is no number → Lower the learning rate; no model is saved."""
    root = lab.copy()
    wild = ["policies.aware.fit.learning_rate=1e30", "policies.aware.fit.epochs=4"]
    seen = told(lambda: again(root, *wild, until="train"))
    assert not (root / "models" / "aware").exists()
    for checkpoint in (root / "checkpoints" / "aware").glob("checkpoint-*/model.safetensors"):
        assert all(bool(values.isfinite().all()) for values in load_file(checkpoint).values())
    lab.ends_well(root)
    return seen
