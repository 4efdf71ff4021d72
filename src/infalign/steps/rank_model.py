"""The rank model: a classifier that predicts the calibrated rewards of responses; a unit of the stage calibrate."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.special import expit

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.data.messages import Message, reply
from infalign.evaluation.diagnostics import rank_correlations
from infalign.evaluation.intervals import Confidence
from infalign.method.calibration import calibrate
from infalign.models.settings import RankModel
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.units import Summary, Unit
from infalign.rewards.base import score
from infalign.rewards.classifier import ClassifierReward
from infalign.steps.costs import TRAINED, Pass
from infalign.steps.run import Provenance, Run
from infalign.steps.samples import StoredRollouts
from infalign.training.output_folder import Target, drop_long_rows


def units(run: Run) -> Iterator[Unit]:
    """Yield the training of the rank model, if the recipe has one."""
    settings, target = run.recipe.rank_model, run.target("rank")
    if settings is not None:
        intervals = Confidence(run.recipe.evaluate.confidence, run.recipe.seed)
        model = settings.model or run.architecture("reward" if run.recipe.reward.has_trunk else "policy")
        start = settings.model_copy(update={"model": rank_model_start(run, settings)})
        yield Unit(
            "calibrate",
            "rank-model",
            inputs=(run.layout.calibrated,),
            settings=run.key("rank_model"),
            output=target.model,
            work=partial(fit_rank_model, start, run.stored, target, run.provenance, intervals),
            workspace=target.checkpoints,
            together=True,
            so_far=target.so_far,
            passes=[Pass.over(TRAINED * settings.fit.epochs, [model], run.rollout_prompts, run.recipe.rollout.k)],
        )


def rank_model_start(run: Run, settings: RankModel) -> str:
    """Return where the rank model starts: its own `model`, else the reward model, else the reference policy."""
    reward = run.scorer("reward")
    return settings.model or (reward.model if reward.source.has_trunk else run.reference)


def fit_rank_model(
    settings: RankModel,
    stored: StoredRollouts,
    target: Target,
    provenance: Provenance,
    intervals: Confidence,
    *,
    on_progress: OnProgress,
) -> Summary:
    """Train a classifier from ``settings.model`` to predict Ĉ of the rollouts.

    Returns its `_rank_quality` on a held-out tenth of the prompts. Raises DataError where `Provenance.check` does, if
    no rollout fits, or if fewer than two held-out prompts have rollouts of different rewards.
    """
    from infalign.training.supervised import fit_rank_model

    start, fit = str(settings.model), settings.fit
    provenance.check(stored.layout)
    of_policy = start == provenance.reference  # whose own folder may lack the recipe's chat template
    tokenizer = load_tokenizer(stored.layout.tokenizer if of_policy else start, date=provenance.reward.date)
    k, rows = stored.k, _ranked_rollouts(stored)
    every = min(10, len(rows) // k // 2)  # at least two prompts are held out
    train, held_out = ([row for i, row in enumerate(rows) if (i // k % every == 0) == out] for out in (False, True))
    ordered = sum(len({row["rank"] for row in held_out[i : i + k]}) > 1 for i in range(0, len(held_out), k))
    if ordered < 2:
        raise DataError(
            f"only {ordered} of the {len(held_out) // k} prompts held out from the rank model have rollouts with "
            "different rewards, but an interval needs 2; raise rollout.prompts or rollout.k"
        )
    short, long = drop_long_rows(train, tokenizer, fit.max_length, _conversation)
    if not short:
        raise DataError(f"all {long} rollouts exceed {fit.max_length} tokens; raise rank_model.fit.max_length")
    with target.job(on_progress) as job:
        ranked = [(row["prompt"], row["response"], row["rank"]) for row in short]
        fit_rank_model(start, tokenizer, ranked, fit, job)
    quality = _rank_quality(target, held_out, k, intervals)
    return {"rollouts": len(short), "rollouts_too_long": long, **quality, "held_out_prompts": len(held_out) // k}


def _conversation(row: dict[str, Any]) -> list[list[Message]]:
    return [[*row["prompt"], reply(row["response"])]]


def _ranked_rollouts(stored: StoredRollouts) -> list[dict[str, Any]]:
    """Return prompt, response and rank of all rollouts that have a reward; the rank is among the prompt's own K."""
    rows: list[dict[str, Any]] = []
    for part, samples in enumerate(stored.parts):
        rewards_PK, (prompts, drawn) = stored.rewards(part), samples.read()
        rewarded = ~np.isnan(rewards_PK).any(axis=1)
        ranks_PK = np.full_like(rewards_PK, np.nan)
        ranks_PK[rewarded] = calibrate(rewards_PK[rewarded], np.sort(rewards_PK[rewarded], axis=1))
        columns = {
            "prompt": samples.conversations(prompts),
            "response": drawn.values("text"),
            "rank": ranks_PK.ravel().tolist(),
        }
        found = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        rows += [row for row in found if not np.isnan(row["rank"])]
    return rows


def _rank_quality(target: Target, rows: list[dict[str, Any]], k: int, intervals: Confidence) -> Summary:
    """Return how well the rank model predicts the ranks of ``rows``, K of each prompt: means over prompts.

    With u = sigmoid(output), ``squared_error`` is (u − Ĉ)² and ``rank_correlation`` is Spearman's correlation, over the
    prompts whose rollouts do not all tie. A constant 1/2 has ``squared_error_of_half`` and a correlation of 0.
    """
    model = ClassifierReward.load(target.model, device=target.compute.torch_device())
    outputs = score(model, [row["prompt"] for row in rows], [row["response"] for row in rows], name="rank")
    predicted_PK = expit(outputs).reshape(-1, k)
    ranks_PK = np.reshape([row["rank"] for row in rows], predicted_PK.shape)
    ordered = np.ptp(ranks_PK, axis=1) > 0
    found = {
        "squared_error": ((predicted_PK - ranks_PK) ** 2).mean(axis=1),
        "squared_error_of_half": ((0.5 - ranks_PK) ** 2).mean(axis=1),
        "rank_correlation": rank_correlations(predicted_PK[ordered], ranks_PK[ordered]),
    }
    return {name: intervals.of(values_P) for name, values_P in found.items()}
