"""The stage evaluate: fresh samples of a model, their scores and its KL."""

from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infalign.method.calibration import Array
from infalign.progress import OnProgress
from infalign.runs.layout import Layout, Summary
from infalign.runs.recipe import Recipe
from infalign.runs.stages.models import BATCH_TOKENS, device, model_path, reward_names
from infalign.runs.stages.sampling import Prompts, cut_off, draw, numbered, score, scores_so_far, so_far
from infalign.sampling.rollouts import find_rollouts
from infalign.sequences import Lazy, token_lists_on_disk
from infalign.storage import read_table, write_table


def evaluate_model(recipe: Recipe, root: Path, name: str, split: str = "test", *, on_progress: OnProgress) -> Summary:
    """Draw fresh samples of the reference or a policy on the prompts of a split, score them and measure the KL.

    On training prompts only the reward scores them: it shows how well it was climbed where the policy was trained.
    """
    from infalign.evaluation.kl import rao_blackwell_kl
    from infalign.models.pretrained import load_policy

    layout, samples = Layout(root), recipe.evaluate.samples
    folder = layout.evaluation(name, split)
    prompts = Prompts.read(layout.data / f"{split}_prompts.parquet", _evaluated(recipe, split))
    reference = model_path(recipe.policy, "reference", root)
    path = reference if name == "reference" else str(layout.model(name))
    # A stream of its own for each model: common random numbers would make policy and base samples dependent.
    stream = f"{recipe.seed} {name}" if split == "test" else f"{recipe.seed} {name} {split}"
    seed = int.from_bytes(blake2b(stream.encode(), digest_size=4).digest(), "little")
    draw(recipe, path, prompts, samples, folder / "samples", seed, on_progress)
    rollouts = find_rollouts(folder / "samples", prompts.prompt_ids, samples)
    lengths = [pc.list_value_length(table["token_ids"]).to_numpy() for table in rollouts.tables(["token_ids"])]
    scores = numbered(prompts.prompt_ids, samples).append_column("length", pa.array(np.concatenate(lengths)))
    for source in reward_names(recipe) if split == "test" else ["reward"]:
        rewards = score(recipe, root, source, prompts, rollouts, folder / "scores" / source, on_progress)
        scores = scores.append_column(source, pa.array(rewards))
    if name != "reference":
        policy_model, tokenizer = load_policy(path, device=device(recipe))
        reference_model, _ = load_policy(reference, device=device(recipe))
        kl = rao_blackwell_kl(
            policy_model,
            reference_model,
            Lazy(len(rollouts), lambda i: prompts.token_ids[i // samples]),
            token_lists_on_disk((table["token_ids"] for table in rollouts.tables(["token_ids"])), folder),
            pad_id=tokenizer.pad_token_id,
            batch_tokens=BATCH_TOKENS,
        )
        scores = scores.append_column("kl", pa.array(kl.rao_blackwell))
    write_table(folder / "scores.parquet", scores)
    return {"samples": len(rollouts), "cut_off": cut_off(rollouts)}


def samples_so_far(recipe: Recipe, root: Path, name: str, split: str) -> str:
    """Return how many samples of a model are there for its evaluation, and how many each source has scored."""
    layout = Layout(root)
    prompts = Prompts.read(layout.data / f"{split}_prompts.parquet", _evaluated(recipe, split))
    folder = layout.evaluation(name, split)
    found = {source: scores_so_far(folder / "scores" / source) for source in reward_names(recipe)}
    scored = [f"{responses} by {source}" for source, responses in found.items() if responses]
    return ", ".join(filter(None, [so_far(prompts, recipe.evaluate.samples, folder / "samples"), *scored]))


def _evaluated(recipe: Recipe, split: str) -> int:
    """Return on how many prompts of a split models are evaluated: of the training prompts those that have rollouts."""
    prompts = recipe.evaluate.prompts
    return prompts if split == "test" else min(prompts, recipe.rollout.prompts)


def samples_of(recipe: Recipe, root: Path, name: str, column: str, split: str = "test") -> Array:
    """Return a column of a model's evaluation scores as an array of shape (P, M)."""
    table = read_table(Layout(root).evaluation(name, split) / "scores.parquet", columns=[column])
    values: Array = table[column].to_numpy().astype(float, copy=False).reshape(-1, recipe.evaluate.samples)
    return values
