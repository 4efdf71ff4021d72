"""Results that are not worth much: the run ends, and says what speaks against them."""

from functools import partial

import numpy as np
import pyarrow.parquet as pq

from faults.registry import Lab, Seen, again, fault, printed, tables
from faults.rewards import module, told
from infalign.report.findings import sentences
from infalign.steps.status import recorded_recipe, status


@fault("a learning rate of 1e5")
def wild(lab: Lab) -> Seen:
    """What is kept is the reference, which is an error, also of the next attempt, until it is allowed or cured."""
    root, rate, strict = lab.copy(), "policies.aware.fit.learning_rate=1e5", "allow_worthless=false"
    seen = told(lambda: again(root, rate, strict, until="evaluate"))
    assert told(lambda: again(root, rate, strict, until="evaluate")) == seen
    assert "results" in again(root, rate, until="evaluate")
    assert not np.any(pq.read_table(root / "evaluation" / "aware" / "scores.parquet")["kl"].to_numpy())
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return seen


@fault("policies spend next to nothing of their KL budgets", brief=True)
def unspent(lab: Lab) -> Seen:
    """Each says how much of it, long after the run too, and what to raise."""
    said = [line for line in sentences(status(recorded_recipe(lab.finished)).findings) if "the KL is" in line]
    assert [line.partition(":")[0] for line in said] == ["evaluate-aware", "evaluate-online", "evaluate-plain"]
    return Seen(0, said[0])


def finds(lab: Lab, change: str, until: str, unit: str, words: str) -> Seen:
    """The run says what speaks against the unit's result, right below it, and ends as always."""
    lines = printed(lab.copy(), change, until=until)
    below = next(i for i, line in enumerate(lines) if line.startswith(f"✓ {unit} ")) + 1
    found = next(line for line in lines[below:] if words in line)
    assert found.startswith(f"! {unit}: ")
    return Seen(0, found)


for what, (change, until, unit, words) in {
    "a training of one step": ("policies.aware.fit.batch_size=1000", "train", "train-aware", "1 optimiser step"),
    "a reward model learns nothing": ("reward.fit.learning_rate=1e-9", "reward-model", "reward", "than a coin"),
    "fine-tuning makes the loss larger": ("policy.fit.learning_rate=10", "sft", "sft", "the loss rose"),
    "the judge learns nothing": ("judge.fit.learning_rate=1e-9", "reward-model", "judge", "than a coin"),
    "fine-tuning has one step": ("policy.fit.batch_size=1000", "sft", "sft", "1 optimiser step"),
    "most prompts are too long": ("data.max_prompt_tokens=36", "data", "data", "too long"),
}.items():
    fault(what)(partial(finds, change=change, until=until, unit=unit, words=words))


def scored_by(lab: Lab, body: str, name: str, words: str) -> Seen:
    """A run whose reward is a function says below the calibration what speaks against its ranks, and goes on."""
    with module(lab, f"def reward(prompts, responses):\n    {body}\n", name):
        lines = printed(lab.copy(), f"reward={{function: '{name}:reward'}}", until="calibrate")
    below = next(i for i, line in enumerate(lines) if line.startswith("✓ calibrate ")) + 1
    found = next(line for line in lines[below:] if words in line)
    assert found.startswith("! calibrate: ")
    return Seen(0, found)


fault("most prompts teach nothing, as their responses have one reward", brief=True)(
    partial(
        scored_by,
        body="return [len(r) * (len(p[-1]['content']) % 4 == 0) for p, r in zip(prompts, responses)]",
        name="often_constant",
        words="prompts teach nothing",
    )
)


@fault("a policy spends many times its KL budget")
def overspent(lab: Lab) -> Seen:
    """It says how much, and what to lower."""
    changes = ("policies.aware.fit.learning_rate=0.1", "policies.aware.fit.epochs=20", "policies.aware.kl_budget=0.01")
    lines = printed(lab.copy(), *changes, until="evaluate")
    found = next(line for line in lines if line.startswith("! evaluate-aware") and "the KL is" in line)
    assert "lower its fit.learning_rate" in found
    return Seen(0, found)
