"""Results that are not worth much: the run ends, and says what speaks against them."""

import numpy as np
import pyarrow.parquet as pq

from faults.lab import Lab, Seen, again, module, printed, told, warning
from faults.registry import fault
from infalign.report.findings import sentences
from infalign.steps.status import recorded_recipe, status


@fault(1)
def wild(lab: Lab) -> Seen:
    """A training keeps the reference, at learning rate 1e5 → Nothing was learned; `allow_worthless` continues."""
    root, rate, strict = lab.copy(), "policies.aware.fit.learning_rate=1e5", "allow_worthless=false"
    seen = told(lambda: again(root, rate, strict, until="evaluate"))
    assert told(lambda: again(root, rate, strict, until="evaluate")) == seen
    assert "results" in again(root, rate, until="evaluate")
    assert not np.any(pq.read_table(root / "evaluation" / "aware" / "scores.parquet")["kl"].to_numpy())
    lab.ends_well(root)
    return seen


@fault(0, brief=True)
def unspent(lab: Lab) -> Seen:
    """Policies spend next to nothing of their KL budgets → A warning for each, with the key to raise."""
    said = [line for line in sentences(status(recorded_recipe(lab.finished)).findings) if "the KL is" in line]
    assert [line.partition(":")[0] for line in said] == ["evaluate-aware", "evaluate-plain", "evaluate-online"]
    return Seen(0, said[0])


@fault(
    0,
    {
        "a training of one step": ("policies.aware.fit.batch_size=1000", "train", "train-aware", "1 optimiser step"),
        "reward model": ("reward.fit.learning_rate=1e-9", "reward-model", "reward", "than a coin"),
        "fine-tuning makes the loss larger": ("policy.fit.learning_rate=10", "sft", "sft", "the loss rose"),
        "judge": ("judge.fit.learning_rate=1e-9", "reward-model", "judge", "than a coin"),
        "fine-tuning has one step": ("policy.fit.batch_size=1000", "sft", "sft", "1 optimiser step"),
        "most prompts are too long": ("data.max_prompt_tokens=36", "data", "data", "too long"),
    },
)
def finds(lab: Lab, change: str, until: str, unit: str, words: str) -> Seen:
    """A step's result is worth little → A warning below the step, with a suggested fix."""
    return warning(printed(lab.copy(), change, until=until), unit, words)


@fault(0, brief=True)
def flat(lab: Lab) -> Seen:
    """Most prompts teach nothing: their responses have one reward → A warning below the calibration."""
    body = "return [len(r) * (len(p[-1]['content']) % 4 == 0) for p, r in zip(prompts, responses)]"
    with module(lab, f"def reward(prompts, responses):\n    {body}\n", "often_constant") as reward:
        return warning(printed(lab.copy(), reward, until="calibrate"), "calibrate", "prompts teach nothing")


@fault(0)
def overspent(lab: Lab) -> Seen:
    """A policy spends many times its KL budget → A warning below its evaluation, with the key to lower."""
    changes = ("policies.aware.fit.learning_rate=0.1", "policies.aware.fit.epochs=20", "policies.aware.kl_budget=0.01")
    seen = warning(printed(lab.copy(), *changes, until="evaluate"), "evaluate-aware", "the KL is")
    assert "lower its fit.learning_rate" in seen.said
    return seen
