"""Validation rollouts as verl's trainer dumps them, by its own function, and its own metrics of them."""

import json
from pathlib import Path

from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

HERE = Path(__file__).parent
SUMS = {"2+2": "4", "3*3": "9", "10-7": "3"}
RIGHT = {0: {"2+2": 1, "3*3": 0, "10-7": 3}, 20: {"2+2": 4, "3*3": 1, "10-7": 3}}  # of four responses, per step

# Write validation/STEP.jsonl, and numbers.json with verl's metrics of each step.
numbers = {}
for step, right in RIGHT.items():
    rows = [(question, answer, i < right[question]) for question, answer in SUMS.items() for i in range(4)]
    inputs = [f"user\n{question}\nassistant\n" for question, _, _ in rows]
    outputs = [f"It is {answer if good else 7}." for _, answer, good in rows]
    score = [1.0 if good else -1.0 for _, _, good in rows]
    extra = {"reward": score, "acc": [good for _, _, good in rows], "pred": [text[6:-1] for text in outputs]}
    RayPPOTrainer._write_generations(
        inputs, outputs, [answer for _, answer, _ in rows], score, extra, str(HERE / "validation"), step
    )
    metrics = process_validation_metrics(["sums"] * len(rows), inputs, extra)
    numbers[step] = {
        name: {key: float(metrics["sums"][name][key]) for key in ("mean@4", "best@4/mean", "worst@4/mean")}
        for name in ("acc", "reward")
    }
(HERE / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
