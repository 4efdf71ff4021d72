"""The rank model: a classifier that predicts the calibrated rewards of responses."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from infalign.errors import DataError
from infalign.evaluation.intervals import estimate
from infalign.method.calibration import Array, calibrate
from infalign.models.pretrained import load_tokenizer
from infalign.progress import OnProgress
from infalign.runs.layout import Layout, Summary, parts
from infalign.runs.recipe import Recipe
from infalign.runs.stages.calibrate import check_calibrated
from infalign.runs.stages.models import device, fitting, model_path, training_to
from infalign.runs.stages.sampling import repeated, train_prompts
from infalign.sampling.rollouts import find_rollouts
from infalign.storage import read_table


def fit_rank_model(recipe: Recipe, root: Path, *, on_progress: OnProgress) -> Summary:
    """Train a classifier to predict Ĉ of the rollouts; return its `_rank_quality` on a tenth of the prompts, held out.

    Raises DataError where `check_calibrated` does, if no rollout fits, or if fewer than two held-out prompts have
    rollouts of different rewards.
    """
    from infalign.training.rank_model import fit_calibrated

    assert recipe.rank_model is not None
    check_calibrated(recipe, root)
    fit, k, start = recipe.rank_model.fit, recipe.rollout.k, rank_model_start(recipe, root)
    tokenizer = load_tokenizer(start)
    rows = _ranked_rollouts(recipe, root)
    every = min(10, len(rows) // k // 2)  # so that two or more are held out
    train, held_out = ([row for i, row in enumerate(rows) if (i // k % every == 0) == out] for out in (False, True))
    ordered = sum(len({row["rank"] for row in held_out[i : i + k]}) > 1 for i in range(0, len(held_out), k))
    if ordered < 2:
        raise DataError(
            f"{ordered} of the {len(held_out) // k} prompts held out from the rank model have rollouts of different "
            "rewards, and an interval needs 2; raise rollout.prompts or rollout.k"
        )
    short, long = fitting(train, tokenizer, fit, lambda row: [row["response"]])
    if not short:
        raise DataError(f"all {long} rollouts exceed {fit.max_length} tokens; raise rank_model.fit.max_length")
    with training_to(recipe, Layout(root), "rank", on_progress) as (job, folder):
        fit_calibrated(
            start, tokenizer, [(row["prompt"], row["response"], row["rank"]) for row in short], fit, job, folder
        )
    quality = _rank_quality(recipe, root, held_out)
    return {"rollouts": len(short), "rollouts_too_long": long, **quality, "held_out_prompts": len(held_out) // k}


def rank_model_start(recipe: Recipe, root: Path) -> str:
    """Return where the rank model starts: its own `model`, else the reward model, else the reference policy."""
    assert recipe.rank_model is not None
    if recipe.rank_model.model is not None:
        return recipe.rank_model.model
    if recipe.reward.is_classifier:
        return model_path(recipe.reward, "reward", root)
    return model_path(recipe.policy, "reference", root)


def _ranked_rollouts(recipe: Recipe, root: Path) -> list[dict[str, Any]]:
    """Return prompt, response and rank of all rollouts, prompt by prompt; the rank is among the prompt's own K."""
    layout, k = Layout(root), recipe.rollout.k
    rows: list[dict[str, Any]] = []
    for part in range(parts(recipe)):
        prompts = train_prompts(recipe, root, part)
        rewards_PK = read_table(layout.scores(part))["reward"].to_numpy().reshape(-1, k)
        columns = {
            "prompt": repeated(prompts.conversations, k),
            "response": find_rollouts(layout.rollouts(part), prompts.prompt_ids, k).values("text"),
            "rank": calibrate(rewards_PK, np.sort(rewards_PK, axis=1)).ravel().tolist(),
        }
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


def _rank_quality(recipe: Recipe, root: Path, rows: list[dict[str, Any]]) -> Summary:
    """Return how well the rank model predicts the ranks of ``rows``, K of each prompt: means over prompts.

    Of u = sigmoid(output), ``squared_error`` is that of (u − Ĉ)² and ``rank_correlation`` that of Spearman's, over
    prompts whose rollouts do not all tie. A constant 1/2 has ``squared_error_of_half`` and a correlation of 0.
    """
    from infalign.rewards.base import score
    from infalign.rewards.classifier import ClassifierReward

    model = ClassifierReward.load(Layout(root).model("rank"), device=device(recipe))
    outputs = score(model, [row["prompt"] for row in rows], [row["response"] for row in rows], name="rank")
    predicted_PK = expit(outputs).reshape(-1, recipe.rollout.k)
    ranks_PK = np.reshape([row["rank"] for row in rows], predicted_PK.shape)
    ordered = np.ptp(ranks_PK, axis=1) > 0
    found = {
        "squared_error": ((predicted_PK - ranks_PK) ** 2).mean(axis=1),
        "squared_error_of_half": ((0.5 - ranks_PK) ** 2).mean(axis=1),
        "rank_correlation": rank_correlations(predicted_PK[ordered], ranks_PK[ordered]),
    }
    mean = partial(estimate, confidence=recipe.evaluate.confidence, seed=recipe.seed)
    return {name: mean(values_P).as_dict() for name, values_P in found.items()}


def rank_correlations(predicted_PK: Array, ranks_PK: Array) -> Array:
    """Return Spearman's correlation within each prompt, shape (P,); 0 where its predictions all tie.

    Ties have mid-ranks. ``ranks_PK`` are calibrated rewards, so mid-ranks already; those of a prompt must not all tie.
    """
    found_PK = calibrate(predicted_PK, np.sort(predicted_PK, axis=1)) - 0.5
    true_PK = ranks_PK - 0.5  # the mean of mid-ranks
    together_P = np.sqrt((found_PK**2).sum(axis=1) * (true_PK**2).sum(axis=1))
    products_P = (found_PK * true_PK).sum(axis=1)
    return np.asarray(np.divide(products_P, together_P, out=np.zeros_like(products_P), where=together_P > 0))
