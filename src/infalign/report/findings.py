"""Warnings about the result of a finished unit, each with a suggested fix, from its record and the recipe.

They are not stored: the terminal, ``infalign status`` and the report read the same records.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from infalign.core.display import counted, number
from infalign.core.errors import InfalignError
from infalign.core.spelling import listed_names
from infalign.method.by_name import why_left_out
from infalign.method.procedures import seen_in
from infalign.pipeline.records import Record
from infalign.pipeline.units import Summary
from infalign.recipe.settings import Recipe
from infalign.report.verdict_text import ROUNDING
from infalign.training.solvers.base import KL_TOLERANCE

MOST = 0.5  # what holds for more than half of the rows, responses or prompts is what a result is made of
FEW_STEPS = 10  # the first optimizer step has learning rate 0 (warm-up): with fewer it is more than a tenth of all
CHANCE = 0.5  # the accuracy of a coin


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with the result of a unit, and a fix. A worthless result stops the run."""

    unit: str
    said: str
    worthless: bool = False


def findings(recipe: Recipe, record: Record) -> list[Finding]:
    """Return the warnings about a finished unit.

    A number is judged wherever it is, so that a stage that reports one is judged like the others; those of the results
    are by the names of policies, and were judged before.
    """
    unit, summary = "-".join(filter(None, (record["kind"], record["subject"]))), record["summary"]
    if record["kind"] == "results":
        said = (
            "the only judge is the reward used in training, so a gain may come from errors of the reward; add a "
            "judge, or set evaluate.truth to reward if the reward is the truth, such as a checker's"
        )
        return [Finding(unit, said)] if list(recipe.rewards) == ["reward"] and recipe.evaluate.truth is None else []
    worthless = [Finding(unit, said, worthless=True) for said in _worthless(recipe, record)]
    others = (
        *_of_data(recipe, summary),
        *_of_training(summary),
        *_of_rewards(recipe, record),
        *_of_strength(recipe, summary),
        *_of_kl(recipe, record),
    )
    return worthless + [Finding(unit, said) for said in others]


def sentences(found: Iterable[Finding]) -> list[str]:
    """Return findings as lines, those of several units in one: ``score-0, score-1: …``; worthless results come first.

    >>> sentences([Finding("a", "is short"), Finding("b", "is short"), Finding("c", "is nothing", worthless=True)])
    ['c: is nothing', 'a, b: is short']
    """
    units: dict[str, list[str]] = {}
    for finding in sorted(found, key=lambda finding: not finding.worthless):
        units.setdefault(finding.said, []).append(finding.unit)
    return [f"{listed_names(names)}: {said}" for said, names in units.items()]


def fewer_prompts(recipe: Recipe, rows: Mapping[str, int]) -> str:
    """Return how many of the prompts that a recipe asks for there are, by the rows of its data; nothing if all are."""
    asked = {"train": ("rollout", recipe.rollout.prompts), "test": ("evaluate", recipe.evaluate.prompts)}
    if recipe.rollout.minutes is not None:  # prompts: auto
        del asked["train"]
    short = [name for name, (_, wanted) in asked.items() if rows.get(f"{name}_prompts", wanted) < wanted]
    if not short:
        return ""
    there = (
        f"{rows[f'{name}_prompts']:,} of the {asked[name][1]:,} prompts of {asked[name][0]}.prompts" for name in short
    )
    kept = recipe.judge_learns and "train" in short
    too_long = any(rows[f"{name}_prompts_too_long"] for name in short)
    why = ["reserved for the judge (data.judge_fraction)"] * kept + ["too long (data.max_prompt_tokens)"] * too_long
    beside = f"; the others are {' or '.join(why)}" if why else ""
    return f"only {', '.join(there)}: the data has no more{beside}"


def check_worth(recipe: Recipe, found: Iterable[Finding]) -> None:
    """Raise InfalignError for a worthless result, unless the recipe allows them."""
    for finding in found:
        if finding.worthless and not recipe.allow_worthless:
            raise InfalignError(f"{finding.unit}: {finding.said}; to continue anyway, --set allow_worthless=true")


def _worthless(recipe: Recipe, record: Record) -> Iterator[str]:
    summary, policy = record["summary"], recipe.policies.get(record["subject"])
    if summary.get("degenerate_prompts", 0) == summary.get("prompts"):
        yield (
            "all rollouts of each prompt have the same reward, so there is nothing to learn; use a reward that "
            "distinguishes responses"
        )
    finds_strength = policy is not None and policy.has_objective  # and said that it kept the reference
    if summary.get("kl") == 0 and not finds_strength:
        yield "the KL is exactly 0, so the policy equals the reference; raise its fit.epochs or fit.learning_rate"


def _of_data(recipe: Recipe, summary: Summary) -> Iterator[str]:
    if fewer := fewer_prompts(recipe, summary):
        yield fewer
    if spelled := summary.get("control_tokens", 0):
        yield (
            f"{counted(spelled, 'row')} with control tokens of the chat template in the prompt; they are read as "
            "plain text: if they mark turns, give the prompts as messages"
        )
    if (tools := summary.get("with_tools", 0)) and any(source.is_classifier for source in recipe.rewards.values()):
        yield (
            f"{counted(tools, 'row')} with tools; the policy's chat template renders them, a reward model's does "
            "not: use a reward function, which gets the column tools"
        )
    yield from map(why_left_out, summary.get("columns_left_out", ()))
    for name, long in summary.items():
        kept = name.removesuffix("_too_long")
        if name != kept and long > summary.get(f"{kept}_that_fit", summary.get(kept, long)):
            of_pairs = f"its {'head' if 'layers' in summary else 'fit'}.max_length"
            limit = "data.max_prompt_tokens" if kept.endswith("prompts") else of_pairs
            yield f"more {kept.replace('_', ' ')} were left out as too long than are used; raise {limit}"
    if summary.get("cut_off", 0.0) > MOST:
        yield (
            f"most responses are cut off at rollout.max_new_tokens ({recipe.rollout.max_new_tokens}), so rewards "
            "see only their beginnings; raise it"
        )


def _of_training(summary: Summary) -> Iterator[str]:
    history = summary.get("history")
    if history and (steps := history[-1]["step"]) < FEW_STEPS:
        yield (
            f"the training had only {counted(steps, 'optimizer step')}, the first at learning rate 0; raise its "
            "fit.epochs or lower its fit.batch_size"
        )
    if history and "loss" in summary and summary["loss"] > (first := next(r["loss"] for r in history if "loss" in r)):
        least, last = number(first, ".3g"), number(summary["loss"], ".3g")
        yield f"the loss rose from {least} to {last}; lower its fit.learning_rate"
    if otherwise := summary.get("rows_rendered_otherwise"):
        yield (
            f"the chat template renders {otherwise:,} of {summary['rows']:,} responses differently from what a "
            "policy generates after a prompt; training uses the generated form"
        )


def _of_rewards(recipe: Recipe, record: Record) -> Iterator[str]:
    summary = record["summary"]
    if record["kind"] == "gold" and recipe.judge is not None and recipe.judge.trained:
        yield "it is trained on the judge's pairs, so it shares the judge's errors; give it its own model or function"
    if "test_accuracy" in summary and summary["test_accuracy"]["low"] <= CHANCE:
        yield ("its accuracy on test pairs is not significantly better than chance; give it more pairs or more epochs")
    if left_out := summary.get("left_out", 0):
        yield (f"{counted(left_out, 'prompt')} left out because the reward returned None for them; check their answers")
    same, prompts = summary.get("degenerate_prompts", 0), summary.get("prompts", 0)
    if MOST * prompts < same < prompts:
        yield (
            f"{same:,} of {prompts:,} prompts teach little because all their rollouts have the same reward; raise "
            "rollout.k, or use a reward that distinguishes responses"
        )


def _of_strength(recipe: Recipe, summary: Summary) -> Iterator[str]:
    if summary.get("strength") != 0:
        return
    if "gain" not in summary:
        yield (
            "it is so far from the reference that the stored rollouts do not tell its gain, so the reference is kept; "
            "lower its fit.learning_rate"
        )
        return
    gain, learned = summary["gain"], summary["seen_gain"]["low"] > 0
    low, mean, high = (number(100 * gain[end], "+.1f") for end in ("low", "mean", "high"))
    served = seen_in(recipe.rollout.k, recipe.procedure)
    gained = f"on held-out prompts it gains {mean} points of {served.name} ({low} to {high})"
    if learned:
        yield (
            f"what it learned does not carry over to new prompts, so the reference is kept: {gained}; "
            f"raise rollout.prompts ({recipe.rollout.prompts})"
        )
    else:
        yield (
            f"it learned nothing that gains, so the reference is kept: {gained}; "
            "raise fit.epochs or rollout.prompts, or start from a better reference"
        )


def _of_kl(recipe: Recipe, record: Record) -> Iterator[str]:
    kl = record["summary"].get("kl", 0.0)
    policy = recipe.policies.get(record["subject"])  # a policy trained elsewhere has no budget here
    if kl == 0 or policy is None or (policy.has_objective and kl < ROUNDING):  # its training said what it kept
        return
    aim, budget = policy.aim(recipe.procedure), policy.budget
    law = aim.rank_law() if budget is None and aim is not None else None
    budget = budget if law is None else law.kl
    if budget is None or abs(kl - budget) <= KL_TOLERANCE * budget:
        return
    cure = "raise its fit.epochs or fit.learning_rate" if kl < budget else "lower its fit.learning_rate or fit.epochs"
    if policy.has_objective:
        cure = "raise rollout.prompts: a tenth of them sets its strength"
    elif (teacher := policy.data_needs.teacher) is not None:
        cure = f"{cure}, if {teacher} spends its own budget"
    yield f"the KL is {number(kl, '.2g')} nats, {number(kl / budget, '.1%')} of the budget of {budget:.3g}; {cure}"
