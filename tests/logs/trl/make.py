"""Completions that TRL's GRPO trainer logs: a random model of a few thousand parameters, two reward functions."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))
import micro  # noqa: E402

PROMPTS = ["How do I write a loop?", "Please explain rain."]


def vowels(completions, **_):
    """Return 1 for a completion with more than three vowels."""
    return [float(sum(letter in "aeiou" for letter in text) > 3) for text in completions]


def short(prompts, completions, **_):
    """Return 1 for a short completion, and no reward for the first prompt."""
    return [
        None if prompt == PROMPTS[0] else float(len(text) < 14)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


# Write two steps of completions, and numbers.json with the mean rewards that the trainer logged for them.
with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    config = GRPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        report_to="none",
        use_cpu=True,
        seed=3,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        micro.write_policy(Path(folder) / "policy"),
        [vowels, short],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
    )
    trainer.train()
    shutil.rmtree(HERE / "run", ignore_errors=True)
    shutil.copytree(run / "completions", HERE / "run" / "completions")
logged = [entry for entry in trainer.state.log_history if "rewards/vowels/mean" in entry]
numbers = {entry["step"]: {name: entry[f"rewards/{name}/mean"] for name in ("vowels", "short")} for entry in logged}
(HERE / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
