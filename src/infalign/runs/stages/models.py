"""The models of a run: where they are, how they are loaded and trained, and the rewards that they give."""

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infalign.data.examples import Message
from infalign.errors import DataError
from infalign.evaluation.intervals import estimate
from infalign.method.calibration import win
from infalign.models.pretrained import conversation_ids, load_tokenizer, model_digest
from infalign.models.settings import Model
from infalign.progress import OnProgress
from infalign.rewards.settings import RewardSource
from infalign.runs.layout import Layout, Summary
from infalign.runs.recipe import Recipe
from infalign.storage import fsync, hash_file, read_table, writing
from infalign.training.settings import Fit

BATCH_TOKENS = 16384  # tokens a forward pass


def device(recipe: Recipe) -> str:
    """Return the torch device."""
    if recipe.compute.device != "auto":
        return recipe.compute.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model_path(model: Model, name: str, root: Path) -> str:
    """Return the folder or hub id of a model: what the run trained, or the ready model that the recipe names."""
    return str(Layout(root).model(name)) if model.fit is not None else str(model.model)


def reward_source(recipe: Recipe, name: str) -> RewardSource:
    """Return the recipe's reward source ``reward``, ``judge`` or ``gold``."""
    source = {"reward": recipe.reward, "judge": recipe.judge, "gold": recipe.gold}[name]
    assert source is not None
    return source


def reward_names(recipe: Recipe) -> list[str]:
    """Return the names of the reward sources that evaluation uses."""
    return ["reward", "judge", *(["gold"] if recipe.gold is not None else [])]


def load_reward(recipe: Recipe, root: Path, name: str) -> Any:
    """Return the reward function ``name``: text in, numbers out, a batch at a time.

    Raises DataError if a server or a function does not give the rewards any more that the run has of it already.
    """
    from infalign.rewards.classifier import ClassifierReward
    from infalign.rewards.function import function_reward
    from infalign.rewards.scores import check_unchanged
    from infalign.rewards.server import RemoteReward

    source, layout = reward_source(recipe, name), Layout(root)
    if source.is_classifier:
        return ClassifierReward.load(model_path(source, name, root), device=device(recipe))
    if source.function is not None:
        reward: Any = function_reward(source.function)
    else:
        reward = RemoteReward(str(source.url), load_tokenizer(layout.tokenizer), api_key_env=source.api_key_env)
    check_unchanged(reward, layout.scored(name), name=name, made_by=score_maker(recipe, root, name))
    return reward


def score_maker(recipe: Recipe, root: Path, name: str) -> str:
    """Return what scores are kept under: `reward_identity`, with the source of a function, which may be changed."""
    identity, function = reward_identity(recipe, root, name), reward_source(recipe, name).function
    if function is None:
        return identity
    file = importlib.import_module(function.partition(":")[0]).__file__
    return f"{identity} (source {hash_file(Path(file))[:8]})" if file else identity


def reward_identity(recipe: Recipe, root: Path, name: str) -> str:
    """Return what tells a reward from others: its url, its function's name or the digest of its model."""
    source = reward_source(recipe, name)
    return source.url or source.function or model_digest(model_path(source, name, root))


@contextmanager
def training_to(recipe: Recipe, layout: Layout, name: str, on_progress: OnProgress) -> Iterator[tuple[Any, Path]]:
    """Yield the training job and a folder to save to, which gets its final name only when all went well."""
    from transformers import set_seed

    from infalign.training.common import Job

    checkpoints, saved = layout.checkpoints(name), layout.model(name).with_name(f"{name}.unfinished")
    shutil.rmtree(saved, ignore_errors=True)
    checkpoints.mkdir(parents=True, exist_ok=True)
    set_seed(recipe.seed)  # reward heads and adapters are drawn before the trainer sets it
    yield Job(checkpoints, recipe.seed, device(recipe), list(recipe.report_to), on_progress), saved
    if not int(os.environ.get("RANK", "0")):
        with writing(layout.model(name)):
            shutil.rmtree(layout.model(name), ignore_errors=True)
            saved.replace(layout.model(name))
            fsync(saved.parent)  # before the checkpoints go
        for left in (*checkpoints.glob("checkpoint-*"), checkpoints / "start"):
            shutil.rmtree(left, ignore_errors=True)


def training_so_far(checkpoints: Path) -> str:
    """Return the last step that a training saved: ``checkpoint at step 30 of 120``, "" for none."""
    saved = dict[int, int]()
    for path in checkpoints.glob("checkpoint-*/trainer_state.json"):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # a training that is under way writes or removes it at this moment
            continue
        saved[state["global_step"]] = state["max_steps"]
    return f"checkpoint at step {max(saved):,} of {saved[max(saved)]:,}" if saved else ""


def fitting(
    rows: list[dict[str, Any]], tokenizer: Any, fit: Fit, responses: Callable[[dict[str, Any]], list[str]]
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows that have at most ``fit.max_length`` tokens with each response, and how many are longer."""

    def tokens(row: dict[str, Any], response: str) -> int:
        conversation = [*row["prompt"], {"role": "assistant", "content": response}]
        return len(conversation_ids(tokenizer, conversation, add_generation_prompt=False))

    short = [row for row in rows if max(tokens(row, response) for response in responses(row)) <= fit.max_length]
    return short, len(rows) - len(short)


def fine_tune_policy(recipe: Recipe, root: Path, *, on_progress: OnProgress) -> Summary:
    """Supervised fine-tuning: the result is the reference policy."""
    from infalign.models.pretrained import load_policy
    from infalign.models.scratch import new_policy
    from infalign.training.sft import fine_tune

    assert recipe.policy.fit is not None
    layout, fit = Layout(root), recipe.policy.fit
    tokenizer = load_tokenizer(layout.tokenizer)
    if recipe.policy.scratch is not None:
        model = new_policy(recipe.policy.scratch, tokenizer, seed=recipe.seed)
    else:
        model, _ = load_policy(str(recipe.policy.model), device=device(recipe))
    table = read_table(layout.data / "demonstrations.parquet").to_pylist()
    rows, long = fitting(table, tokenizer, fit, lambda row: [row["chosen"]])
    if not rows:
        raise DataError(f"all {long} demonstrations exceed {fit.max_length} tokens; raise policy.fit.max_length")
    with training_to(recipe, layout, "reference", on_progress) as (job, folder):
        history = fine_tune(
            model,
            tokenizer,
            [(row["prompt"], row["chosen"]) for row in rows],
            fit,
            job,
            folder,
        )
    return {"rows": len(rows), "rows_too_long": long, "history": history, "loss": _last(history, "loss")}


def _last(history: list[dict[str, Any]], name: str) -> float:
    return float([row[name] for row in history if name in row][-1])


def fit_reward(recipe: Recipe, root: Path, name: str, *, on_progress: OnProgress) -> Summary:
    """Fit the reward model or the judge (``name``) on its own share of the preference pairs."""
    from infalign.models.scratch import new_policy
    from infalign.rewards.base import score
    from infalign.rewards.classifier import ClassifierReward
    from infalign.training.common import save_model
    from infalign.training.reward_model import fit_reward_model

    layout, source = Layout(root), reward_source(recipe, name)
    assert source.fit is not None
    tokenizer = load_tokenizer(source.model or layout.tokenizer)
    if source.scratch is not None:
        start = str(layout.checkpoints(name) / "start")
        save_model(new_policy(source.scratch, tokenizer, seed=recipe.seed + 1), tokenizer, Path(start))
    else:
        start = source.model or model_path(recipe.policy, "reference", root)
    train, long = _pairs(layout, "reward" if name == "reward" else "judge", tokenizer, source.fit)
    test, _ = _pairs(layout, "test", tokenizer, source.fit)
    with training_to(recipe, layout, name, on_progress) as (job, folder):
        history = fit_reward_model(start, tokenizer, train, test, source.fit, job, folder)
    # Once more and pair by pair: TRL's eval_accuracy is a mean over batches, also where the last one is a single pair.
    prompts, chosen, rejected = map(list, zip(*test, strict=True))
    reward = ClassifierReward.load(str(layout.model(name)), device=device(recipe))
    right = win(score(reward, prompts, chosen, name=name), score(reward, prompts, rejected, name=name))
    return {
        "pairs": len(train),
        "pairs_too_long": long,
        "history": history,
        "test_accuracy": estimate(right, confidence=recipe.evaluate.confidence, seed=recipe.seed).as_dict(),
    }


def _pairs(layout: Layout, part: str, tokenizer: Any, fit: Fit) -> tuple[list[tuple[list[Message], str, str]], int]:
    """Return (prompt, chosen, rejected) of the pairs that fit, and how many were too long."""
    table = read_table(layout.data / f"{part}_pairs.parquet").to_pylist()
    rows, long = fitting(table, tokenizer, fit, lambda row: [row["chosen"], row["rejected"]])
    if not rows:
        raise DataError(
            f"a reward model learns from pairs, and none of the {len(table)} {part} pairs has at most "
            f"{fit.max_length} tokens; use more data or raise fit.max_length"
        )
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in rows], long
