"""The stage reward-model: the reward model and, on other rows, the judge."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from infalign.data.examples import Message
from infalign.errors import DataError
from infalign.method.calibration import win
from infalign.models.pretrained import load_tokenizer
from infalign.models.settings import Fit
from infalign.progress import OnProgress
from infalign.rewards.base import score
from infalign.rewards.classifier import ClassifierReward
from infalign.rewards.settings import RewardSource
from infalign.runs.layout import Layout, Summary
from infalign.runs.run import Confidence, Run, confidence
from infalign.runs.units import Unit
from infalign.storage import read_table
from infalign.training.target import Target, fitting


def units(run: Run) -> Iterator[Unit]:
    """Yield a training for each reward source that has to be trained; units are named after the sources."""
    intervals = confidence(run.recipe.evaluate, run.recipe.seed)
    for name, source in run.recipe.rewards.items():
        target = run.target(name)
        if source.fit is not None:
            from_policy = not (source.model or source.scratch)
            yield Unit(
                "reward-model",
                name,
                inputs=run.reference_inputs if from_policy else (run.layout.data,),
                settings=run.key(name),
                output=target.model,
                work=partial(fit_reward, name, source, run.reference, run.layout, target, intervals),
                workspace=target.checkpoints,
                so_far=target.so_far,
            )


def fit_reward(
    name: str,
    source: RewardSource,
    reference: str,
    layout: Layout,
    target: Target,
    intervals: Confidence,
    *,
    on_progress: OnProgress,
) -> Summary:
    """Fit the reward model or the judge (``name``) on its own share of the preference pairs."""
    from infalign.training.reward_model import fit_reward_model

    assert source.fit is not None
    start, tokenizer = reward_start(source, reference, layout, target)
    train, long = _pairs(layout, "reward" if name == "reward" else "judge", tokenizer, source.fit)
    test, _ = _pairs(layout, "test", tokenizer, source.fit)
    with target.job(on_progress) as (job, folder):
        history = fit_reward_model(start, tokenizer, train, test, source.fit, job, folder)
    # Evaluate again pair by pair: TRL's eval_accuracy is a mean over batches, and the last one may be smaller.
    prompts, chosen, rejected = map(list, zip(*test, strict=True))
    reward = ClassifierReward.load(str(target.model), device=target.compute.torch_device())
    right = win(score(reward, prompts, chosen, name=name), score(reward, prompts, rejected, name=name))
    return {
        "pairs": len(train),
        "pairs_too_long": long,
        "history": history,
        "test_accuracy": intervals.of(right),
    }


def reward_start(source: RewardSource, reference: str, layout: Layout, target: Target) -> tuple[str, Any]:
    """Return the initial model of a reward model, created here if it is trained from scratch, and its tokenizer."""
    from infalign.models.scratch import new_policy
    from infalign.training.common import save_model

    tokenizer = load_tokenizer(source.model or layout.tokenizer)
    if source.scratch is None:
        return source.model or reference, tokenizer
    start = target.checkpoints / "start"
    save_model(new_policy(source.scratch, tokenizer, seed=target.seed + 1), tokenizer, Path(start))
    return str(start), tokenizer


def _pairs(layout: Layout, part: str, tokenizer: Any, fit: Fit) -> tuple[list[tuple[list[Message], str, str]], int]:
    """Return (prompt, chosen, rejected) of the pairs that fit, and how many were too long."""
    table = read_table(layout.data / f"{part}_pairs.parquet").to_pylist()
    rows, long = fitting(table, tokenizer, fit.max_length, lambda row: [row["chosen"], row["rejected"]])
    if not rows:
        raise DataError(
            f"a reward model learns from pairs, and none of the {len(table)} {part} pairs has at most "
            f"{fit.max_length} tokens; use more data or raise fit.max_length"
        )
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in rows], long
