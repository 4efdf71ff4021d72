"""Results that are not worth much: the run ends, and says what speaks against them."""

from typing import Any

import numpy as np
import pyarrow.parquet as pq

from faults.lab import Lab, Seen, again, printed
from faults.registry import fault
from infalign.report.findings import sentences
from infalign.steps.status import recorded_recipe, status


@fault(0)
def wild(lab: Lab) -> Seen:
    """A training keeps the reference, at learning rate 1e5 → A warning that it does, with the key to change."""
    root, rate = lab.copy(), "policies.aware.fit.learning_rate=1e5"
    assert "results" in again(root, rate, until="evaluate")
    said = [line for line in sentences(status(recorded_recipe(root)).findings) if "so the reference is kept" in line]
    assert "train-aware" in said[0]
    kl = pq.read_table(root / "evaluation" / "aware" / "scores.parquet")["kl"].drop_null().to_numpy()
    assert np.abs(kl).max() < 1e-9
    lab.ends_well(root)
    return Seen(0, said[0])


@fault(0, brief=True)
def unspent(lab: Lab) -> Seen:
    """Policies spend next to nothing of their KL budgets → A warning for each, with the key to raise."""
    said = [line for line in sentences(status(recorded_recipe(lab.finished)).findings) if "the KL is" in line]
    assert [line.partition(":")[0] for line in said] == ["evaluate-online"]  # the others keep the reference
    return Seen(0, said[0])


def often_constant(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return a reward that is 0 for most prompts, whatever the response is."""
    return [len(r) * (len(p[-1]["content"]) % 4 == 0) for p, r in zip(prompts, responses, strict=True)]


OFTEN_CONSTANT = (
    f"reward={{function: '{__name__}:often_constant'}}",
    *(f"policies.{name}.kl_budget=0.1" for name in ("aware", "plain", "online")),
)
OVERSPENDS = tuple(f"policies.aware.{key}" for key in ("fit.learning_rate=0.1", "fit.epochs=20", "kl_budget=0.01"))


@fault(
    0,
    {
        "a training of one step": ("train", "train-aware", "at learning rate 0", "policies.aware.fit.batch_size=1000"),
        "reward model": ("reward-model", "reward", "than chance", "reward.fit.learning_rate=1e-9"),
        "fine-tuning makes the loss larger": ("sft", "sft", "the loss rose", "policy.fit.learning_rate=10"),
        "judge": ("reward-model", "judge", "than chance", "judge.fit.learning_rate=1e-9"),
        "fine-tuning has one step": ("sft", "sft", "at learning rate 0", "policy.fit.batch_size=1000"),
        "most prompts are too long": ("data", "data", "too long", "data.max_prompt_tokens=36"),
        "most prompts teach little": ("calibrate", "calibrate", "prompts teach little", *OFTEN_CONSTANT),
        "many times the budget": ("evaluate", "evaluate-aware", "lower its fit.learning_rate", *OVERSPENDS),
    },
    brief=("most prompts teach little",),
)
def finds(lab: Lab, until: str, unit: str, words: str, *changes: str) -> Seen:
    """A step's result is worth little → A warning below the step, with a suggested fix."""
    lines = printed(lab.copy(), *changes, until=until)
    below = next(i for i, line in enumerate(lines) if line.startswith(f"✓ {unit} ")) + 1
    found = next(line for line in lines[below:] if words in line)
    assert found.startswith(f"! {unit}: ")
    return Seen(0, found)
