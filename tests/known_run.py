"""A run whose answer is known: what a finished evaluation leaves, and how it is reported."""

from pathlib import Path

import micro
import numpy as np
import pyarrow as pa
from rich.console import Console

from infalign.core.storage import write_record, write_table
from infalign.data.messages import MESSAGES, prompt_id
from infalign.method.transforms import parse_transform
from infalign.pipeline.records import FORMAT, records
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.page import write
from infalign.report.results import write_results
from infalign.report.scored_samples import ScoredSamples
from infalign.report.tables import print_table
from infalign.theory.law import law_at_kl

PROMPTS, SAMPLES, K = 24, 32, 16
ATTACK = "<script>alert(1)</script>"
SAID = f"{ATTACK} a\0b\x1b[31mc\x7fd\x85e\n\tf"  # what every response holds
QRPO = {"transform": "exp:10", "kl_budget": 0.5, "solver": "qrpo"}
RLOO = {"transform": "identity", "kl_budget": 0.5, "solver": "rloo"}


def make_recipe(root: Path, *, policies: dict, gold: bool = True, **changes: object) -> Recipe:
    """Return a recipe for a run directory whose tables the test writes."""
    function = {"function": "infalign.world:gold"}
    return Recipe.model_validate(
        {
            "run_dir": str(root),
            "data": {"sources": [{"world": 10}]},
            "policy": {"model": "some/model"},
            "reward": {"fit": {}},
            "judge": function,
            "gold": function if gold else None,
            "rollout": {"prompts": PROMPTS, "k": K, "max_new_tokens": 8},
            "policies": policies,
            "evaluate": {"prompts": PROMPTS, "samples": SAMPLES, "max_n": 5, "rewind": "rewind:0.85:8"},
        }
        | changes
    )


def finish_run(root: Path, recipe: Recipe, *, levels: int | None = None, kl: float = 0.5, steps: int = 5) -> None:
    """Write what a finished evaluation leaves: every policy follows the theory's law at KL 0.5, judges hear noise.

    With ``levels`` the reward takes only so many values; ``kl`` is what the first policy is said to have spent, and
    ``steps`` is the last that a training logged.
    """
    layout, rng = Layout(root), np.random.default_rng(0)
    layout.data.mkdir(parents=True)
    prompts = [[{"role": "user", "content": f"Question {i}?"}] for i in range(PROMPTS)]
    ids = [prompt_id(prompt) for prompt in prompts]
    asked = pa.table({"prompt_id": ids, "prompt": pa.array(prompts, MESSAGES)})
    write_table(layout.data / "test_prompts.parquet", asked)
    shift = rng.normal(size=(PROMPTS, 1))

    def rewards(ranks):
        rewards = shift + np.tan(3 * (ranks - 0.5))
        return rewards if levels is None else np.round(ranks * levels)

    references = np.sort(rewards(rng.random((PROMPTS, K))), axis=1)
    write_table(layout.calibrated, pa.table({"reference_rewards": references.tolist()}))
    for name in ("reference", *recipe.policies):
        ranks = rng.random((PROMPTS, SAMPLES))
        if name != "reference":
            law = law_at_kl(parse_transform(recipe.policies[name].transformation), kl=0.5)
            ranks = np.interp(ranks, law.cdf.ravel(), law.u.ravel())
        columns = {"prompt_id": np.repeat(ids, SAMPLES), "index": np.tile(np.arange(SAMPLES, dtype=np.int32), PROMPTS)}
        texts = [f"{name} says {SAID} {i}" for i in range(PROMPTS * SAMPLES)]
        samples = layout.evaluation(name) / "samples"
        samples.mkdir(parents=True)
        finish = ["length"] * len(texts)
        write_table(samples / "part-00000.parquet", pa.table(columns | {"text": texts, "finish": finish}))
        noisy = {source: (ranks + rng.normal(size=ranks.shape)).ravel() for source in recipe.rewards}
        scores = noisy | {"reward": rewards(ranks).ravel(), "length": rng.integers(1, 9, PROMPTS * SAMPLES)}
        if name != "reference":
            spent = kl if name == next(iter(recipe.policies)) else 0.5
            scores["kl"] = spent / 5 * rng.gamma(5, 1.0, PROMPTS * SAMPLES)
        write_table(layout.evaluation(name) / "scores.parquet", pa.table(columns | scores))
    write_results(ScoredSamples(recipe, layout), recipe.policies, on_progress=lambda *_: None)

    logged = [{"step": step, "loss": 1 / step} for step in (1, 2, 3, 4, steps)]
    online = [row | {"win_rate": 0.5 + 0.05 * row["step"], "kl": 0.01, "reward": 0.1} for row in logged]
    record(root, "data", "data", {"examples": 100, "skipped": 3, "train_prompts_too_long": 2})
    accuracy = {"mean": 0.71, "low": 0.65, "high": 0.77}
    fitted = {"pairs": 50, "history": logged, "test_accuracy": accuracy}
    record(root, "reward", "reward-model", fitted)
    record(root, "score-0", "score", {"responses": PROMPTS * K, "cut_off": 0.25})
    record(root, "evaluate-reference", "evaluate", {"samples": PROMPTS * SAMPLES, "cut_off": 0.5})
    record(root, "calibrate", "calibrate", {"prompts": PROMPTS, "k": K, "tied": 0.0, "degenerate_prompts": 0})
    for name, policy in recipe.policies.items():
        held_out = [*logged, {"step": steps, "eval_loss": 0.3}]
        record(root, f"train-{name}", "train", {"history": online if policy.solver == "rloo" else held_out})
        record(root, f"evaluate-{name}", "evaluate", {"samples": PROMPTS * SAMPLES, "cut_off": 0.5})


def record(root: Path, name: str, stage: str, summary: dict) -> None:
    """Write the record of one finished step."""
    kind, _, subject = name.partition("-")
    unit = {"format": FORMAT, "stage": stage, "kind": kind, "subject": subject}
    content = unit | {"seconds": 1.5, "summary": summary, "versions": {}}
    (root / "stages").mkdir(exist_ok=True)
    write_record(root / "stages" / f"{name}.json", content)


LEFT = {  # units that are no more of the recipe
    "train-gone": {"history": [{"step": 1, "loss": 1.0}]},
    **{f"{work}-{model}": {} for work in ("samples", "kl") for model in ("gone", "guest.ab")},
    "reward-gone": {"test_accuracy": {"mean": 0.5, "low": 0.4, "high": 0.6}},
}


def report(recipe: Recipe, root: Path) -> None:
    """Write the report of what the recipe has."""
    write(recipe, Layout(root), [name for name in records(root) if name not in LEFT], on_progress=micro.silent)


def html_of(root: Path) -> str:
    """Return the page."""
    return (root / "report.html").read_text(encoding="utf-8")


def printed(root: Path, width: int) -> str:
    """Return what the terminal shows."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        print_table(root, console)
    return capture.get()


def around(mean: float) -> dict[str, float]:
    """Return an estimate that is sure to two points."""
    return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}
