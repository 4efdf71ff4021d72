"""Print the time of calibration and transformation over that of the reward model's forward pass on the same rows.

    python benchmarks/calibration_cost.py

64 prompts × 64 rollouts of 48 tokens, a classifier of a million parameters (the smallest that anybody would use, so
the ratio is an upper bound), one thread. Exits with 1 if the median ratio is 1 % or more.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from infalign.method.calibration import calibrate
from infalign.method.transforms import Exponential

PROMPTS, ROLLOUTS, TOKENS, VOCABULARY = 64, 64, 48, 512
BATCH = 16384 // TOKENS  # rows in a forward pass, as ClassifierReward has by default
REPEATS, LIMIT = 5, 0.01


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and judge."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_labels=1,
            pad_token_id=0,
        )
    ).eval()
    token_ids = torch.randint(1, VOCABULARY, (PROMPTS * ROLLOUTS, TOKENS))
    transform = Exponential(10.0)

    @torch.inference_mode()
    def forward() -> np.ndarray:
        return torch.cat([model(batch).logits for batch in token_ids.split(BATCH)]).numpy()

    rewards_PK = forward().reshape(PROMPTS, ROLLOUTS)

    def calibration() -> np.ndarray:
        return transform(calibrate(rewards_PK, np.sort(rewards_PK)))

    calibration()
    times = [(seconds(calibration), seconds(forward)) for _ in range(REPEATS)]
    ratios = [small / large for small, large in times]
    print(f"classifier of {model.num_parameters():,} parameters; {PROMPTS} × {ROLLOUTS} rows of {TOKENS} tokens")
    for name, values, unit in (
        ("calibration", [1e3 * small for small, _ in times], "ms"),
        ("forward pass", [large for _, large in times], "s"),
        ("ratio", [100 * ratio for ratio in ratios], "%"),
    ):
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:12} min {low:.4g}, median {middle:.4g}, max {high:.4g} {unit}")
    return int(statistics.median(ratios) >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
