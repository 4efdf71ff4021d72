"""The stage reward-model: the reward model and, on other rows, the judge."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import read_table
from infalign.data.examples import from_table
from infalign.data.messages import Pair
from infalign.evaluation.intervals import Confidence
from infalign.method.calibration import win
from infalign.models.pretrained import load_without_head
from infalign.models.settings import Fit
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.layout import Layout
from infalign.rewards.base import RewardFunction, score
from infalign.rewards.classifier import ClassifierReward
from infalign.rewards.settings import Head
from infalign.rewards.sources import Scorer
from infalign.steps.run import READ, TRAINED, Pass, Run
from infalign.training.output_folder import Target, drop_long_pairs

PAIRS = {"reward": "reward", "judge": "judge", "gold": "judge", "test": "test"}  # whose pairs a source learns from


def units(run: Run) -> Iterator[Unit]:
    """Yield a training for each reward source that has to be trained; units are named after the sources."""
    for name, source in run.recipe.rewards.items():
        target = run.target(name)
        if source.trained:
            from_policy = not (source.model or source.scratch)
            flops = 2 * (READ if source.fit is None else TRAINED * source.fit.passes)  # both responses of each pair
            rows = math.inf if source.head is None else source.head.pairs
            yield Unit(
                "reward-model",
                name,
                inputs=run.reference_inputs if from_policy else (run.layout.data,),
                settings=run.key(name) | run.precision,
                output=target.model,
                work=partial(fit_reward, run.scorer(name), run.reference, run.layout, target),
                workspace=target.checkpoints,
                together=source.fit is not None,
                so_far=target.so_far,
                passes=[Pass(flops, [run.architecture(name)], f"{PAIRS[name]}_pairs", rows)],
            )


def fit_reward(scorer: Scorer, reference: str, layout: Layout, target: Target, *, on_progress: OnProgress) -> Summary:
    """Fit a reward's model or head on its own share of the preference pairs, and return how good it is."""
    name, settings = scorer.name, scorer.source.fit or scorer.source.head
    assert settings is not None
    start, tokenizer = reward_start(scorer, reference, layout, target)
    train, long = _pairs(layout, name, tokenizer, settings)
    fitting, intervals = len(train), Confidence(seed=target.seed)
    test, _ = _pairs(layout, "test", tokenizer, settings)
    with target.job(on_progress) as job:
        if isinstance(settings, Fit):
            from infalign.training.supervised import fit_reward_model

            fit_summary: Summary = {"history": fit_reward_model(start, tokenizer, train, test, settings, job)}
        else:
            from infalign.training.common import save_model
            from infalign.training.frozen_head import fit_head

            order = np.random.default_rng(target.seed).permutation(len(train))
            train = [train[row] for row in order[: settings.pairs]]
            base = load_without_head(start, device=target.compute.torch_device(), dtype=target.compute.dtype)
            model, head = fit_head(base, tokenizer, train, seed=target.seed, on_progress=on_progress)
            save_model(model, tokenizer, job.model_dir)
            right = intervals.of_shares(head.margins > 0)
            fit_summary = {"layers": head.layers, "penalty": head.penalty, "validated_accuracy": right}
    reward = ClassifierReward.load(str(target.model), device=target.compute.torch_device(), dtype=target.compute.dtype)
    # Pair by pair: TRL's eval_accuracy is a mean over batches, and the last one may be smaller.
    accuracy = _accuracy(name, reward, test, intervals)
    counts = {"pairs": len(train), "pairs_that_fit": fitting, "pairs_too_long": long}
    return counts | fit_summary | {"test_accuracy": accuracy}


def _accuracy(name: str, reward: RewardFunction, pairs: list[Pair], intervals: Confidence) -> dict[str, float]:
    """Return how often a reward model prefers the chosen response; a tie counts one half."""
    rewards = []
    for side in (1, 2):
        prompts = [[*pair[0], *pair[side][:-1]] for pair in pairs]  # with the turns before the last, as of tools
        rewards.append(score(reward, prompts, [pair[side][-1]["content"] for pair in pairs], name=name))
    return intervals.of_shares(win(*rewards))


def reward_start(scorer: Scorer, reference: str, layout: Layout, target: Target) -> tuple[str, Any]:
    """Return the initial model of a reward model, created here if it is trained from scratch, and its tokenizer."""
    from infalign.models.scratch import new_policy
    from infalign.training.common import save_model

    source = scorer.source
    tokenizer = load_tokenizer(source.model or layout.tokenizer, date=scorer.date)
    if source.scratch is None:
        return source.model or reference, tokenizer
    start = target.checkpoints / "start"
    save_model(new_policy(source.scratch, tokenizer, seed=target.seed + 1), tokenizer, start)
    return str(start), tokenizer


def _pairs(layout: Layout, name: str, tokenizer: Any, settings: Fit | Head) -> tuple[list[Pair], int]:
    """Return the pairs for a reward source (gold has the judge's), or for ``test``, and how many were too long."""
    part = PAIRS[name]
    examples = from_table(read_table(layout.data / f"{part}_pairs.parquet"))
    pairs: list[Pair] = [(e.prompt, e.chosen, e.rejected or ()) for e in examples]
    rows, long = drop_long_pairs(pairs, tokenizer, settings.max_length)
    if not rows:
        raise DataError(
            f"none of the {len(pairs)} {part} pairs has at most {settings.max_length} tokens, so there is nothing "
            f"to train on; use more data or raise {type(settings).__name__.lower()}.max_length"
        )
    return rows, long
