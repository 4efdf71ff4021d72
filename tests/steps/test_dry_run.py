"""What a dry run tells of cost: counts of rows, closed forms of FLOPs, and what the time is estimated by."""

import re
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import micro
import pytest
from chat_templates import FAMILIES, tokenizer_of
from rich.console import Console
from rows import written

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import write_record
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.pipeline.records import FORMAT, record_path
from infalign.pipeline.units import identify
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.steps.data import prepare_data
from infalign.steps.dry_run import print_plan
from infalign.steps.run import Run
from infalign.steps.time_estimate import (
    OVERHEAD,
    SAMPLED_ROWS,
    Counts,
    UnknownSizeError,
    count,
    parameters_of,
    read_sample,
    within_minutes,
)
from infalign.steps.whole_run import units, write_recipe

SCRATCH = Scratch(**micro.SCRATCH)
ROWS = {"demonstrations": 90, "reward_pairs": 40, "judge_pairs": 40, "test_pairs": 9}


def run_of(root: Path, **changes: Any) -> Run:
    """Return the run of the micro recipe with changes."""
    return Run.of(Recipe.model_validate(micro.settings(root) | changes))


def counted(run: Run) -> Counts:
    """Return the counts of a run."""
    return count(run, [read_sample(run, source) for source in run.recipe.data.sources], [], whole=True)


def planned(recipe: dict[str, Any], **options: Any) -> str:
    """Return what the plan of a recipe says."""
    print_plan(Recipe.model_validate(recipe), Console(file=(said := StringIO()), width=300), **options)
    return said.getvalue()


def test_the_size_of_a_model_is_that_of_its_weights(tmp_path: Path) -> None:
    """A model from scratch is not made for it, and of a folder only headers are read."""
    tokenizer = train_tokenizer([str(number) for number in range(1000)], SCRATCH)
    model = new_policy(SCRATCH, tokenizer, seed=0)
    model.save_pretrained(tmp_path)
    run = run_of(tmp_path / "run")
    assert len(tokenizer) == SCRATCH.vocabulary
    assert parameters_of(run, SCRATCH) == parameters_of(run, str(tmp_path)) == model.num_parameters()
    named = {"Qwen/Qwen3-0.6B": 6e8, "a/Llama-3.1-8B-Instruct": 8e9, "SmolLM2-135M": 1.35e8}
    assert {name: parameters_of(run, name) for name in named} == named


def test_a_model_that_is_nowhere_has_no_size(tmp_path: Path) -> None:
    """One of the hub is named, a folder that is not there is an error before any work."""
    changed = {"policies": {"aware": {"solver": "qrpo", "kl_budget": 0.3, "guide": {"trunk": "reward"}}}}
    with pytest.raises(UnknownSizeError, match="the size of someone/model"):
        parameters_of(run_of(tmp_path), "someone/model")
    said = planned(micro.settings(tmp_path) | changed | {"reward": {"model": "someone/model"}})
    assert "no time estimate for score-0, score-1, score-2 and 6 more: the size of someone/model" in said
    with pytest.raises(ConfigError, match=r"reward\.model: the folder \./nowhere does not exist"):
        planned(micro.settings(tmp_path) | changed | {"reward": {"model": "./nowhere"}})


@pytest.mark.parametrize("world", [1000, SAMPLED_ROWS + 1000])
def test_rows_are_counted_before_the_data_is_prepared(tmp_path: Path, world: int) -> None:
    """Tables have about the expected rows; where only a sample was read, fewer prompts, as other rows repeat some."""
    run = run_of(tmp_path / "run", data={"sources": [{"world": world}], "max_prompt_tokens": 48})
    recipe, counts = run.recipe, counted(run)
    run.layout.root.mkdir()
    made = prepare_data(recipe, run.layout, None, on_progress=lambda *_: None)
    for table, rows in counts.rows.items():
        prompts = made[f"{table.partition('_')[0]}_prompts"] if "prompts" in table else 0
        beyond = 0.3 * prompts if world > SAMPLED_ROWS else 0.05 * prompts
        assert rows == pytest.approx(made[table], rel=0.1 if world > SAMPLED_ROWS else 0, abs=beyond), table
    assert counts.drawn <= recipe.rollout.max_new_tokens


def test_an_example_is_shown_as_the_policy_reads_it(tmp_path: Path) -> None:
    """With its roles, and what is trained on marked."""
    said = planned(micro.settings(tmp_path / "run") | {"policy": {"model": micro.write_policy(tmp_path / "policy")}})
    assert "An example as the policy reads it: world dialogue 0, user, assistant" in said
    assert re.search(r"<\|user\|>[^<⟦]+<\|end\|><\|assistant\|>⟦[^<⟦]+<\|end\|>⟧", said)


def test_the_day_of_a_run_is_that_of_its_data(tmp_path: Path) -> None:
    """Recorded where a chat template prints it, kept on later days, and a part of the key."""
    folder, settings = tmp_path / "policy", micro.settings(tmp_path / "run")
    tokenizer_of(FAMILIES["llama-3"]).save_pretrained(folder)
    settings["policy"] = {"model": str(folder)}
    assert Run.of(Recipe.model_validate(settings)).date is None
    tokenizer_of(FAMILIES["llama-3-date"]).save_pretrained(folder)
    run = Run.of(Recipe.model_validate(settings))
    assert run.date == str(date.today())
    made = {"kind": "data", "subject": "", "format": FORMAT, "settings": {"date": "2024-07-26"}}
    record_path(run.layout.root, "data").parent.mkdir(parents=True)
    write_record(record_path(run.layout.root, "data"), made)
    assert (run.date, run.scorer("reward").date) == ("2024-07-26", "2024-07-26")
    assert units(run)[0].settings["date"] == "2024-07-26"


def test_gold_alone_learns_from_the_pairs_that_are_kept_for_judges(tmp_path: Path) -> None:
    """They are kept from the reward whenever judge or gold learns."""
    changes = {"judge": micro.GOLD, "gold": {"fit": micro.FIT}}
    assert counted(run_of(tmp_path, **changes)).rows["judge_pairs"] > 0
    assert not run_of(tmp_path, **changes | {"gold": None}).recipe.judge_learns


def test_a_policy_more_leaves_what_others_learned_from(tmp_path: Path) -> None:
    """Other states do not depend on those that it needs."""
    settings = micro.settings(tmp_path / "run")
    last = settings["policies"]["plain"] | {"fit": micro.FIT | {"lora": {"layers": 1}}}
    side = {"side": settings["policies"]["plain"] | {"guide": {"side": {}}}}
    before, after = (identify(units(run_of(tmp_path, policies={"last": last} | more))) for more in ({}, side))
    assert before["train-last"] == after["train-last"]


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_computed(tmp_path: Path) -> None:
    """By its key and package, in a dry run and at the start of a run."""
    with pytest.raises(ConfigError, match="report_to: mlflow is not installed; pip install mlflow, or remove it"):
        planned(micro.settings(tmp_path) | {"report_to": ["tensorboard", "mlflow"]})


def test_every_unit_that_trains_draws_or_scores_says_so(tmp_path: Path) -> None:
    """Each policy costs what its form of guide does; tables cost nothing, nor does what only the hub could tell."""
    plain = micro.settings(tmp_path)["policies"]["plain"]
    forms = {"side": {"side": {}}, "whole": {}}
    policies = {name: plain | {"guide": guide} for name, guide in forms.items()}
    policies |= {"last": plain | {"fit": micro.FIT | {"lora": {"layers": 1}}}}
    policies |= {"student": {"solver": "distil", "teacher": "side", "fit": micro.FIT}}
    run = run_of(tmp_path, policies=policies)
    rollout, parameters = run.recipe.rollout, partial(parameters_of, run)
    counts = Counts(ROWS, 10.0, 20.0, 12.0, parameters)
    found = {unit.name: sum(map(counts.flops, unit.passes)) for unit in units(run)}
    size = OVERHEAD + parameters(SCRATCH)
    drawn = sum(found[f"rollout-{part}"] for part in range(4))
    assert drawn == 5 * size * rollout.prompts * (10 + rollout.k * 12)
    assert sum(found[f"states-3-{part}"] for part in range(4)) == drawn * 2 / 5
    assert found["sft"] == 6 * size * 90 * (10 + 20)
    nothing = {name for name, flops in found.items() if not flops}
    assert nothing >= {"data", "calibrate", "results", "report", *(f"card-{name}" for name in policies)}
    assert nothing.isdisjoint(f"{work}-{name}" for name in policies for work in ("train", "samples", "kl", "evaluate"))
    assert found["train-whole"] == (6 + 2) * size * rollout.prompts * (10 + rollout.k * 12)
    unknown = set[str]()
    for unit in units(run):
        try:
            _ = [*map(replace(counts, rows={}).flops, unit.passes)]
        except UnknownSizeError:
            unknown.add(unit.name)
    assert unknown == {"sft", "reward", "judge"}


@pytest.mark.slow
def test_time_is_told_by_a_matrix_product_or_by_records(tmp_path: Path, finished: Path) -> None:
    """It says which, and how far off it may be."""
    assert "GFLOP/s of a matrix product; accurate to a factor of 3" in planned(micro.settings(tmp_path))
    changed = micro.settings(finished)
    changed["policies"]["aware"]["kl_budget"] = 0.7
    assert "steps; accurate to a factor of 1.5" in planned(changed)
    changed["policies"]["aware"]["fit"] = {"epochs": 9999}  # the recorded time is of another training
    assert re.search(r"About \S+ (min|h) in total", planned(changed))


@pytest.mark.parametrize(
    ("most", "said"), [(180, "policy.fit needs demonstrations, but"), (1, "only 0 train prompts with at most 1 tokens")]
)
def test_a_dry_run_says_what_rows_lack(tmp_path: Path, most: int, said: str) -> None:
    """Pairs under other names are prompts alone, and their columns are named."""
    rows = [{"prompt": f"What is {i}?", "winner": "this", "loser": "that"} for i in range(99)]
    data = {"sources": [{"path": str(written(tmp_path / "rows.jsonl", rows))}], "max_prompt_tokens": most}
    recipe = Recipe.model_validate(micro.settings(tmp_path / "run") | {"data": data})
    with pytest.raises(DataError, match=said):
        print_plan(recipe, Console(file=(shown := StringIO()), width=300))
    assert ": 99 prompts alone; other columns: loser, winner" in shown.getvalue()
    written(tmp_path / "rows.jsonl", [*rows, {"prompt": "What is 1?", "chosen": "this"}])
    with pytest.raises(DataError, match=r"rows\.jsonl line 100: column rejected is missing"):
        print_plan(recipe, Console(quiet=True))


def test_part_of_a_run_has_a_dry_run(tmp_path: Path) -> None:
    """It prints the plan and its cost up to its stage, and writes nothing."""
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run"))
    out = micro.answer("run", path, "--until", "calibrate", "--dry-run")
    assert "in total" in out
    assert "train-aware" not in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gold": {"url": "http://127.0.0.1:9/x", "api_key_env": "INFALIGN_NO_KEY"}}, "INFALIGN_NO_KEY"),
        ({"judge": {"model": "./nowhere"}}, r"judge\.model: the folder \./nowhere does not exist"),
        ({"gold": {"function": "micro:absent"}}, "micro has no function absent"),
        ({"gold": {"function": "trl.rewards:accuracy_reward"}}, "needs the column solution, which is missing in every"),
        ({"run_dir": "/dev/null"}, "/dev/null is not a folder"),
        ({"data": {"sources": [{"world": 5}], "max_prompt_tokens": 180}}, "only 0 test prompts .* needs at least 4"),
    ],
)
def test_a_run_refuses_at_once_what_its_dry_run_refuses(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Before anything is made."""
    recipe = Recipe.model_validate(micro.settings(tmp_path / "run") | change)
    for act in (partial(planned, recipe.model_dump(mode="json")), partial(micro.done, recipe)):
        with pytest.raises((ConfigError, DataError), match=said):
            act()
    assert not (tmp_path / "run" / "data").exists()


def test_as_many_prompts_as_have_their_rollouts_in_time(tmp_path: Path) -> None:
    """`auto` is 4,000 within ten minutes; what a run directory has recorded is kept for these minutes and this K."""

    def prompts(model: str = "", **rollout: Any) -> int:
        settings = micro.settings(tmp_path / "run")
        settings["policy"] = {"model": model} if model else settings["policy"]
        settings["data"]["sources"] = [{"world": 2000}]
        settings["rollout"] |= rollout
        recipe = within_minutes(Recipe.model_validate(settings))
        tmp_path.joinpath("run").mkdir(exist_ok=True)
        write_recipe(recipe, tmp_path / "run")
        return recipe.rollout.prompts

    assert prompts(prompts=30) == 30
    assert prompts(prompts="auto", minutes=1e6) == 4000  # the data may grow
    assert prompts(prompts="auto", minutes=1e-9) == 20
    some = prompts(prompts="auto", minutes=2e-2)
    assert 20 < some < 4000
    write_recipe(load_recipe(tmp_path / "run" / "recipe.yaml", ["rollout.prompts=77"]), tmp_path / "run")
    assert prompts(prompts="auto", minutes=2e-2) == 77
    assert prompts(prompts="auto", minutes=2e-2, k=3) != 77
    assert prompts(prompts=50, minutes=2e-2) == 50
    with pytest.raises(ConfigError, match=r"the size of nameless; give rollout.prompts as a number"):
        prompts(prompts="auto", minutes=1.0, model="nameless")
