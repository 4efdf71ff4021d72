"""Trainings without what `fit` and `fit_online` add: a job, and what an on-policy training starts from."""

from collections.abc import Callable
from pathlib import Path

import enumerable
from enumerable import Enumerable
from micro import silent as quiet
from online_solvers import COPIES, K, references, rewarded
from rows import user

from infalign.models.tokenizers import load_tokenizer
from infalign.training.on_policy_trainer import Problem
from infalign.training.output_folder import Job


def job_in(folder: Path, on_progress: Callable[[int, int, str], None] = quiet, seed: int = 0) -> Job:
    """Return a training on the CPU with its checkpoints and its policy in ``folder``."""
    return Job(folder / "checkpoints", folder / "policy", seed, "cpu", [], on_progress)


def problem(case: Enumerable) -> Problem:
    """Return the problem that `fit_online` makes of the prompts."""
    pairs = zip(enumerable.PROMPTS, references(case, K), strict=True)
    rows = [{"prompt": [user(prompt)], "reference_rewards": rewards} for prompt, rewards in pairs]
    tokenizer = load_tokenizer(str(case.folder), padding_side="left")
    return Problem(str(case.folder), tokenizer, rows * COPIES, rewarded(case), max_new_tokens=2)
