"""What a run says against its own results: from the numbers of its records, with the cure."""

import re
from pathlib import Path
from typing import Any

import micro
import pytest

from infalign.core.errors import InfalignError
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.findings import FEW_STEPS, Finding, check_worth, findings, sentences


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Return a recipe with two policies of 1 nat and one of 0.5."""
    settings = micro.settings(tmp_path / "run")
    del settings["allow_worthless"]
    return load_recipe(micro.write(tmp_path / "recipe.yaml", settings))


def test_a_reward_that_is_the_truth_needs_no_judge(recipe: Recipe) -> None:
    """Where a recipe says so; otherwise a run with no judge says what that is worth."""
    alone = recipe.model_copy(update={"judge": None, "gold": None})
    (found,) = findings(alone, record("results", {}))
    assert "set evaluate.truth to reward" in found.said
    truth = alone.model_copy(update={"evaluate": alone.evaluate.model_copy(update={"truth": "reward"})})
    assert findings(truth, record("results", {})) == []


def test_a_policy_may_be_called_as_a_number_of_a_summary(recipe: Recipe) -> None:
    """The results are by the names of policies, which are free."""
    headline = {"history": {"mean": 0.6}, "cut_off": {"mean": 0.5}, "train_prompts": {"mean": 0.7}, "kl": 0}
    assert findings(recipe, record("results", headline)) == []


def record(unit: str, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a finished unit."""
    kind, _, subject = unit.partition("-")
    return {"kind": kind, "subject": subject, "summary": summary}


def history(steps: int, *losses: float) -> list[dict[str, Any]]:
    """Return a log as a trainer leaves it."""
    return [*({"loss": loss, "step": 1} for loss in losses), {"step": steps, "train_runtime": 1.0}]


@pytest.mark.parametrize(
    ("unit", "bad", "good", "words"),
    [
        ("data", {"test_prompts": 9, "test_prompts_too_long": 10}, {"test_prompts_too_long": 9}, "max_prompt_tokens"),
        ("judge", {"pairs": 9, "pairs_too_long": 10}, {"pairs_too_long": 9}, "more pairs .* its fit.max_length"),
        ("judge", {"pairs": 9, "pairs_too_long": 10, "layers": [1]}, {"pairs_that_fit": 10}, "its head.max_length"),
        ("score-0", {"cut_off": 0.96}, {"cut_off": 0.5}, r"rollout.max_new_tokens \(12\), .* raise it"),
        ("sft", {"history": history(1)}, {"history": history(FEW_STEPS)}, "1 optimizer step, .* raise its fit.epochs"),
        ("train-aware", {"history": history(9)}, {"history": history(10)}, "had only 9 optimizer steps"),
        ("sft", {"history": history(99, 1.0, 9.0), "loss": 9.0}, {"loss": 1.0}, "from 1 to 9; lower its fit.learning"),
        ("sft", {"rows": 9, "rows_rendered_otherwise": 3}, {"rows_rendered_otherwise": 0}, "renders 3 of 9 responses"),
        ("reward", {"test_accuracy": {"low": 0.5}}, {"test_accuracy": {"low": 0.51}}, "better than chance; .*pairs"),
        ("data", {"with_tools": 3}, {"with_tools": 0}, "3 rows with tools; .* use a reward function"),
        ("calibrate", {"prompts": 8, "degenerate_prompts": 5}, {"degenerate_prompts": 4}, "5 of 8 .* raise rollout.k"),
        ("evaluate-aware", {"kl": 0.07}, {"kl": 0.9}, "0.07 nats, 7.0% of the budget of 1; raise rollout.prompts"),
        ("evaluate.train-online", {"kl": 0.56}, {"kl": 0.54}, "112.0% of the budget of 0.5; lower its fit.learning"),
    ],
)
def test_a_bad_number_is_said_with_its_cure(unit: str, bad: Any, good: Any, words: str, recipe: Recipe) -> None:
    """One sentence for each number beyond its limit, and none at the limit."""
    (found,) = findings(recipe, record(unit, bad))
    assert (found.unit, found.worthless) == (unit, False)
    assert re.search(words, found.said)
    assert findings(recipe, record(unit, bad | good)) == []


@pytest.mark.parametrize(
    ("unit", "summary", "words"),
    [
        ("calibrate", {"prompts": 8, "degenerate_prompts": 8}, " .* the same reward, .* use a reward that"),
        ("evaluate-online", {"kl": 0.0}, " the KL is exactly 0, .* raise its fit.epochs or fit.learning"),
    ],
)
def test_what_is_worthless_is_an_error_unless_allowed(unit: str, summary: Any, words: str, recipe: Recipe) -> None:
    """The error says what was found, the cure and how to go on nevertheless; then it is said like other findings."""
    found = findings(recipe, record(unit, summary))
    with pytest.raises(InfalignError, match=f"{unit}:{words}.* --set allow_worthless=true"):
        check_worth(recipe, found)
    check_worth(recipe.model_copy(update={"allow_worthless": True}), found)
    assert len(sentences(found)) == 1


def test_a_policy_without_a_budget_is_held_to_its_law(recipe: Recipe) -> None:
    """A given β has the KL of its law, here of exp:10 at 1 nat; raw rewards have no law, so any KL will do."""
    aware = recipe.policies["aware"]
    law = aware.aim(recipe.procedure).rank_law()
    assert law is not None
    own = {"kl_budget": None, "beta": law.beta}
    for transform, said in (("exp:10", 1), ("raw", 0)):
        policy = type(aware).model_validate(aware.model_dump() | own | {"transform": transform})
        asked = recipe.model_copy(update={"policies": {"aware": policy}})
        assert len(findings(asked, record("evaluate-aware", {"kl": 0.4}))) == said
        assert findings(asked, record("evaluate-aware", {"kl": 0.95})) == []


@pytest.mark.parametrize(
    ("name", "spent", "words"),
    [
        ("guided", 0.85, "85.0% of the budget of 1; raise rollout.prompts: a tenth of them sets its strength"),
        ("student", 0.85, "raise its fit.epochs or fit.learning_rate, if guided spends its own"),
        ("online", 0.44, "88.0% of the budget of 0.5; raise its fit.epochs or fit.learning_rate"),
    ],
)
def test_who_misses_the_budget_is_told_its_own_knob(name: str, spent: float, words: str, tmp_path: Path) -> None:
    """Guides, students and policies that learn on their own responses miss it for reasons of their own."""
    settings = micro.settings(tmp_path / "run")
    settings["policies"] |= {
        "guided": settings["policies"]["aware"] | {"guide": {}},
        "student": {"solver": "distil", "teacher": "guided", "fit": micro.FIT},
    }
    recipe = load_recipe(micro.write(tmp_path / "recipe.yaml", settings))
    (found,) = findings(recipe, record(f"evaluate-{name}", {"kl": spent}))
    assert re.search(words, found.said)
    nothing = findings(recipe, record(f"evaluate-{name}", {"kl": 0.0}))
    assert [one.worthless for one in nothing] == ([] if name == "guided" else [True])
    assert findings(recipe, record(f"evaluate-{name}", {"kl": 0.92 * recipe.policies[name].budget})) == []


@pytest.mark.parametrize(
    ("gain", "seen_gain", "words"),
    [
        ([], [], "do not tell its gain, so the reference is kept; lower its fit.learning_rate"),
        ([-0.01, 0.002, 0.014], [0.02, 0.04, 0.06], r"\+0.2 points of best-of-3 \(−1.0 to \+1.4"),
        ([-0.02, -0.01, 0.0], [0.02, 0.04, 0.06], r"; raise rollout.prompts \(12\)$"),
        ([-0.02, -0.01, 0.0], [-0.02, 0.0, 0.02], "it learned nothing that gains, so the reference is kept"),
    ],
)
def test_who_keeps_the_reference_is_told_once_what_would_help_most(
    recipe: Recipe, gain: list[float], seen_gain: list[float], words: str
) -> None:
    """More prompts where the policy gains on those that it saw, otherwise more of a model; nothing where it gains."""
    learned = {"gain": gain, "seen_gain": seen_gain} if gain else {}
    gains = {name: dict(zip(("low", "mean", "high"), ends, strict=True)) for name, ends in learned.items()}
    (found,) = findings(recipe, record("train-aware", {"strength": 0.0, "strength_kl": 0.0, **gains}))
    assert re.search(words, found.said)
    assert not found.worthless
    assert findings(recipe, record("train-aware", {"strength": 0.5, "strength_kl": 0.9, **gains})) == []
    assert findings(recipe, record("evaluate-aware", {"kl": 0})) == []


def test_fewer_prompts_than_asked_for_are_said(recipe: Recipe) -> None:
    """Each number that the data does not reach, and where other prompts went; nothing where all are there."""
    there = {"train_prompts": 12, "train_prompts_too_long": 0, "test_prompts": 6, "test_prompts_too_long": 2}
    assert findings(recipe, record("data", there)) == []
    (found,) = findings(recipe, record("data", there | {"test_prompts": 5}))
    assert found.said == (
        "only 5 of the 6 prompts of evaluate.prompts: the data has no more; the others are too long "
        "(data.max_prompt_tokens)"
    )
    (found,) = findings(
        recipe, record("data", there | {"train_prompts": 9, "test_prompts": 5, "test_prompts_too_long": 0})
    )
    assert found.said == (
        "only 9 of the 12 prompts of rollout.prompts, 5 of the 6 prompts of evaluate.prompts: the data has no more; "
        "the others are reserved for the judge (data.judge_fraction)"
    )
    alone = recipe.model_copy(update={"judge": None})
    (found,) = findings(alone, record("data", there | {"train_prompts": 9}))
    assert found.said == "only 9 of the 12 prompts of rollout.prompts: the data has no more"


def test_units_share_a_line() -> None:
    """The same words against several units are one line, and what is worthless comes first."""
    found = [Finding(f"score-{part}", "is short") for part in range(5)]
    assert sentences([*found, Finding("calibrate", "is flat", worthless=True)]) == [
        "calibrate: is flat",
        "score-0, score-1, score-2 and 2 more: is short",
    ]
