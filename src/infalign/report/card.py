"""The model card of a trained policy: what it was trained for, what was measured, and by which judge."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from infalign.core.display import Interval, amount, share
from infalign.core.progress import OnProgress
from infalign.core.storage import write_text
from infalign.core.user_code import function_name
from infalign.models.pretrained import TRANSFORMATION
from infalign.models.settings import is_hub_id
from infalign.pipeline.records import records
from infalign.pipeline.units import Summary
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.results import Results, read_results
from infalign.report.tables import shown_ks
from infalign.rewards.settings import RewardSource

ROLES = {
    "reward": "selects the served response; the policy was trained on it",
    "judge": "not used in training",
    "gold": "a second judge, not used in training",
}


def write_card(recipe: Recipe, layout: Layout, name: str, *, on_progress: OnProgress) -> Summary:
    """Write the card of a policy into its folder."""
    prompts = min(recipe.rollout.prompts, records(layout.root)["data"]["summary"]["train_prompts"])
    write_text(layout.card(name), model_card(recipe, read_results(layout.root), name, prompts=prompts))
    return {}


def model_card(recipe: Recipe, results: Results, name: str, *, prompts: int) -> str:
    """Return an evaluated policy's card as Markdown, with the hub's metadata; ``prompts`` are those with rollouts."""
    from huggingface_hub import ModelCardData

    library = "infalign" if getattr(recipe.policies[name], "guide", None) else "transformers"
    policy, procedure, base = results["policies"][name], results["procedure"], _on_hub(recipe.policy.model)
    data = ModelCardData(
        model_name=name,
        base_model=base,
        datasets=[s.hub.id for s in recipe.data.sources if s.hub and not Path(s.hub.id).exists()] or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["infalign", "rlhf", procedure],
    )
    method, shaping = policy["method"], policy["transform"]
    if shaping.endswith(".json"):
        method, shaping = method.replace(shaping, "a table"), f"the table in `{TRANSFORMATION}`"
    tuned = ", fine-tuned on demonstrations" if recipe.policy.fit is not None else ""
    kl, rates, ks = policy["kl_budget"], policy["win_rates"], shown_ks(results)
    strength = f"β {policy['beta']:.4g}" if kl is None else f"KL budget {kl:g} nats"
    won = {way: [rates[judge][way] for judge in rates] for way in dict.fromkeys([procedure, "standard"])}
    measured = _table("win rate, %", *(f"by {judge}" for judge in rates), rows=won)
    if ks:
        right = {one: [results["pass_at_k"][one][k] for k in ks] for one in ("reference", name)}
        measured += "\n\n" + _table("right, %", *(f"pass@{k}" for k in ks), rows=right)
    judges = "\n".join(f"- {judge}: {_source(recipe.rewards[judge])}; {ROLES[judge]}" for judge in results["judges"])
    return f"""\
---
{data.to_yaml()}
---

# {name}

A language model trained from a reward, and measured as it is served: **{procedure}**.

- Reference: {base or "a model made in the run"}{tuned}
- Procedure: {procedure}
- Method: {method}; shaping of the reward: {shaping}; {strength}
- Loaded by: {library}
- Rollouts of the reference: {prompts} prompts × {recipe.rollout.k} responses; seed {recipe.seed}

## What was measured

Against the reference under the same procedure, on {results["samples"]} fresh samples for each of {results["prompts"]}
test prompts, with {results["confidence"]:.0%} intervals over prompts. 50 % is no gain.

{measured}

KL to the reference: {amount(policy["kl"], 3)} nats per response. Mean length: {policy["length"]["mean"]:.1f} tokens.

Who judged:

{judges}

Another training from another seed would add a spread that one run cannot show. What the policy may have lost elsewhere
was not measured.

## How to sample

As it was trained and measured: from the whole distribution at temperature 1, as `generation_config.json` says. Top-k,
top-p or another temperature make another policy, with another KL and other win rates.
"""


def _on_hub(model: str | None) -> str | None:
    return model if model is not None and is_hub_id(model) and not Path(model).exists() else None


def _table(*columns: str, rows: Mapping[str, Iterable[Interval]]) -> str:
    """Return shares in per cent by the names of the rows."""
    cells = [columns, ["---"] * len(columns), *([name, *map(share, row)] for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _source(source: RewardSource) -> str:
    """Return what a reward is, without paths and addresses of a machine."""
    if source.function is not None:
        return f"the Python function `{function_name(source.function)}`"
    if source.url is not None:
        return "a reward model behind a server"
    if source.trained:
        kind = "classifier" if source.head is None else "head on a frozen model"
        return f"a Bradley–Terry {kind}, trained in the run"
    return f"`{model}`" if (model := _on_hub(source.model)) else "a classifier"
