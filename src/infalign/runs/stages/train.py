"""The stage train: a policy by its solver, from the stored rollouts or on-policy."""

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infalign.method.procedures import BestOfN, WorstOfN, parse_procedure
from infalign.method.shapings import parse_shaping
from infalign.models.pretrained import load_tokenizer
from infalign.progress import OnProgress
from infalign.runs.layout import Layout, Summary, parts
from infalign.runs.recipe import ON_POLICY, Policy, Recipe
from infalign.runs.stages.calibrate import check_calibrated
from infalign.runs.stages.laws import policy_betas
from infalign.runs.stages.models import BATCH_TOKENS, device, load_reward, model_path, training_to
from infalign.runs.stages.sampling import train_prompts
from infalign.sampling.rollouts import find_rollouts
from infalign.sequences import Lazy, chained, token_lists_on_disk
from infalign.storage import read_table


def train_policy(recipe: Recipe, root: Path, name: str, *, on_progress: OnProgress) -> Summary:
    """Train one policy by its solver, with the β that its KL budget, or its n, asks for.

    Raises DataError for calibrated rewards of another reward or reference policy than the recipe's.
    """
    check_calibrated(recipe, root)
    layout, policy = Layout(root), recipe.policies[name]
    beta, trainer_beta = policy_betas(recipe, root, name)
    reference = model_path(recipe.policy, "reference", root)
    with training_to(recipe, layout, name, on_progress) as (job, folder):
        if policy.solver in ON_POLICY:
            history = _train_online(recipe, root, policy, trainer_beta, job, folder)
        else:
            from infalign.models.pretrained import load_policy
            from infalign.training.offline import fit_offline, offline_solver

            model, tokenizer = load_policy(reference, device=device(recipe))
            rows = _rewarded_rollouts(recipe, root, policy, model, tokenizer)
            history = fit_offline(model, tokenizer, offline_solver(policy, beta), rows, policy.fit, job, folder)
        if policy.transform.endswith(".json") and not int(os.environ.get("RANK", "0")):
            shutil.copyfile(policy.transform, folder / "transformation.json")  # a policy keeps what it was trained on
    held_out = [row["eval_loss"] for row in history if "eval_loss" in row]
    watched = {"held_out_loss_start": held_out[0], "held_out_loss_best": min(held_out[1:])} if held_out else {}
    watched |= {key: history[-1][key] for key in ("overfitted", "resumed") if key in history[-1]}
    return {"beta": beta, "trainer_beta": trainer_beta, **watched, "history": history}


def _train_online(
    recipe: Recipe, root: Path, policy: Policy, beta: float, job: Any, folder: Path
) -> list[dict[str, Any]]:
    """Train a policy on-policy, with ``beta`` for the normalised values, and return the log.

    With ranks from the rank model the prompts are all training prompts, also those without rollouts.
    """
    from infalign.rewards.classifier import ClassifierReward
    from infalign.training.online import Objective, StoredRollouts, fit_online

    layout, procedure = Layout(root), parse_procedure(recipe.procedure)
    predicted = policy.ranks == "model"
    if predicted:
        reward: Any = ClassifierReward.load(layout.model("rank"), device=device(recipe))
        prompts = read_table(layout.data / "train_prompts.parquet", columns=["prompt"])
    else:
        reward = load_reward(recipe, root, "reward")
        prompts = read_table(layout.calibrated, columns=["prompt", "reference_rewards"])
    by_prompt: dict[str, Any] = {}
    if policy.stored:
        rows, k = _stored_rollouts(recipe, root), recipe.rollout.k
        by_prompt = {rows[i]["prompt_id"]: Lazy(k, partial(_after, rows, i)) for i in range(0, len(rows), k)}
    return fit_online(
        model_path(recipe.policy, "reference", root),
        load_tokenizer(layout.tokenizer, padding_side="left"),
        prompts.to_pylist(),
        Objective(
            reward,
            parse_shaping(policy.transform),
            beta,
            predicted=predicted,
            procedure=procedure if isinstance(procedure, (BestOfN, WorstOfN)) else None,
            kl_budget=policy.kl_budget,
        ),
        policy,
        job,
        folder,
        max_new_tokens=recipe.rollout.max_new_tokens,
        stored=StoredRollouts(by_prompt) if policy.stored else None,
    )


def _after(rows: Sequence[dict[str, Any]], first: int, i: int) -> dict[str, Any]:
    return rows[first + i]


def _rewarded_rollouts(
    recipe: Recipe, root: Path, policy: Policy, model: Any, tokenizer: Any
) -> Sequence[dict[str, Any]]:
    """Return all rollouts, prompt by prompt, with their rewards and the reference's log-probabilities."""
    import torch

    from infalign.models.logprobs import token_logprobs

    rows = _stored_rollouts(recipe, root)
    if recipe.rollout.engine.kind == "server" or policy.fit.bf16:  # else they round as in training already
        texts = (Lazy(len(rows), lambda i: rows[i]["prompt_ids"]), Lazy(len(rows), lambda i: rows[i]["completion_ids"]))
        with torch.autocast(device(recipe), torch.bfloat16, enabled=policy.fit.bf16):
            found = token_logprobs(model, *texts, pad_id=tokenizer.pad_token_id, batch_tokens=BATCH_TOKENS)
        return Lazy(len(rows), lambda i: rows[i] | {"reference_logprob": float(found[i])})
    return rows


def _stored_rollouts(recipe: Recipe, root: Path) -> Sequence[dict[str, Any]]:
    """Return all rollouts, prompt by prompt, with their rewards and the log-probabilities that the engine gave.

    A row is made when it is asked for; its token ids are not held in memory (`lazy.token_lists_on_disk`).
    """
    layout, k = Layout(root), recipe.rollout.k
    prompts = [train_prompts(recipe, root, part) for part in range(parts(recipe))]
    drawn = [find_rollouts(layout.rollouts(part), of_part.prompt_ids, k) for part, of_part in enumerate(prompts)]
    prompt_ids, asked_ids = chained([p.prompt_ids for p in prompts]), chained([p.token_ids for p in prompts])
    completion_ids = token_lists_on_disk((t["token_ids"] for d in drawn for t in d.tables(["token_ids"])), layout.root)
    logprobs = np.concatenate([t["logprob"].to_numpy() for d in drawn for t in d.tables(["logprob"])])
    rewards = np.concatenate([read_table(layout.scores(part))["reward"].to_numpy() for part in range(len(drawn))])

    def row(i: int) -> dict[str, Any]:
        return {
            "prompt_id": prompt_ids[i // k],
            "prompt_ids": asked_ids[i // k],
            "completion_ids": completion_ids[i],
            "reference_logprob": float(logprobs[i]),
            "reward": float(rewards[i]),
        }

    return Lazy(len(rewards), row)
