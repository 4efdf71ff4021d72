"""What a dry run tells of cost: counts of what will be made, closed forms of FLOPs, and laws of what is measured."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import micro
import pytest
from rich.console import Console
from transformers import MambaConfig

from infalign.core.errors import ConfigError
from infalign.data.sources import read_examples
from infalign.models.guided import GuidedForCausalLM
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Lora, Scratch
from infalign.pipeline.units import Unit, follows, keys
from infalign.recipe.settings import Recipe
from infalign.steps.cost import cost, makespan, stand_in, texts_of
from infalign.steps.data import prepare_data
from infalign.steps.dry_run import print_plan
from infalign.steps.passes import Aside, Draw, Last, Read, Texts, Train, UnknownSizeError
from infalign.steps.probe import H100, Probe
from infalign.steps.run import Run
from infalign.steps.whole_run import units
from infalign.training.solvers.base import Guide, Side

SCRATCH = Scratch(**micro.SCRATCH)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a small tokenizer."""
    return train_tokenizer(["Here is a text."], SCRATCH)


def test_a_run_ends_when_its_longest_chain_does() -> None:
    """With enough jobs at a time that chain decides; with one the sum; nobody waits for a unit that is done."""
    seconds = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 0.5}
    needed = {"c": ("b", "done before"), "d": ("a", "c")}
    assert makespan(seconds, needed, 4) == 4.5
    assert makespan(seconds, needed, 1) == 6.5
    assert makespan({}, needed, 2) == 0.0


def test_what_is_not_here_is_told_by_its_flops(tokenizer: Any) -> None:
    """Six a parameter and token that is trained on, four with an adapter, two otherwise, at the use that is said."""
    probe = Probe(None, tokenizer, "float32")
    parameters = new_policy(SCRATCH, tokenizer, seed=0).num_parameters()
    train = Train(SCRATCH, Fit(bf16=True), 10, 32, 8, 16.0, 24.0)
    assert train.tokens == 10 * (32 / 8 * 16 + 32 * 24)
    whole = 6 * parameters * train.tokens / (H100.used * H100.bfloat16)
    assert train.at(probe).seconds == pytest.approx(whole)
    adapted = replace(train, fit=Fit(bf16=True, lora=Lora()))
    assert adapted.at(probe).seconds == pytest.approx(whole * 4 / 6)
    assert train.at(probe).memory == 16 * parameters
    read = Read(SCRATCH, 5, 3, 16.0, 24.0)
    assert read.at(probe).seconds == pytest.approx(2 * parameters * 5 * (16 + 72) / (H100.used * H100.float32))
    draw = Draw(SCRATCH, 5, 3, 16.0, 24.0, 48)
    assert draw.at(probe).seconds == pytest.approx(read.at(probe).seconds * H100.used / H100.used_drawing)
    served = replace(draw, by_server=True)
    assert served.at(probe).seconds == pytest.approx(draw.at(probe).seconds * H100.float32 / H100.bfloat16)
    halved = Probe(None, tokenizer, "bfloat16")  # of drawing and scoring, not of training
    assert read.at(halved).seconds == pytest.approx(read.at(probe).seconds * H100.float32 / H100.bfloat16)
    whole = replace(train, fit=Fit())
    assert whole.at(halved).seconds == whole.at(probe).seconds
    keys_and_values = 2 * micro.SCRATCH["layers"] * micro.SCRATCH["hidden"]
    assert draw.at(probe).memory == 4 * (parameters + keys_and_values * (16 + 3 * 48))


def test_parts_of_a_model_take_what_they_compute_beside_all_of_it_in_memory(tokenizer: Any) -> None:
    """The last layers need those alone for each token; a guide on states its own weights and its tokens' embeddings.

    A guide's trunk looks up its tokens.
    """
    probe, deep = Probe(None, tokenizer, "float32"), SCRATCH.model_copy(update={"layers": 4})
    whole, one = (new_policy(shape, tokenizer, seed=0).num_parameters() for shape in (deep, SCRATCH))
    train = Train(deep, Fit(bf16=True, lora=Lora()), 10, 32, 8, 16.0, 24.0)
    last = replace(train, model=Last(deep, 1))
    assert last.at(probe).seconds == pytest.approx(train.at(probe).seconds * one / whole)
    assert last.at(probe).memory == train.at(probe).memory == 4 * whole
    asides = list[Train]()
    for likely in (None, 20):
        side = Side(hidden=8, layers=1, heads=2, reads=2)
        shape = side.model_dump(exclude={"stored"})
        guided = GuidedForCausalLM.reading(new_policy(deep, tokenizer, seed=0), **shape, likely=likely)
        own = guided.num_parameters(only_trainable=True)
        aside = replace(train, model=Aside(deep, Guide(side=side, likely=likely)), fit=Fit(bf16=True))
        tokens, width = guided.reference.get_output_embeddings().weight.shape
        passed = own + (likely or tokens) * width
        assert aside.at(probe).seconds == pytest.approx(6 * passed * train.tokens / (H100.used * H100.bfloat16))
        assert aside.at(probe).memory == 4 * (whole + own + 3 * own)
        asides.append(aside)
    trunk = new_policy(SCRATCH, tokenizer, seed=0).base_model
    tokens, width = trunk.get_input_embeddings().weight.shape
    own = GuidedForCausalLM.beside(new_policy(deep, tokenizer, seed=0), trunk, likely=20).num_parameters(True)
    beside = replace(train, model=Aside(deep, Guide(trunk="reward", likely=20), SCRATCH), fit=Fit(bf16=True))
    passed = own - tokens * width + 20 * width
    assert beside.at(probe).seconds == pytest.approx(6 * passed * train.tokens / (H100.used * H100.bfloat16))
    assert beside.at(probe).memory == 4 * (whole + own + 3 * own)
    asides.append(beside)
    measured = Probe("cpu", tokenizer, "float32")
    for part in (last, *asides):
        assert 0 < part.at(measured).seconds < math.inf


def test_a_trunk_of_fewer_tokens_than_the_policy_is_measured(tokenizer: Any, tmp_path: Path) -> None:
    """As where a policy's tokenizer is on the hub, so that a reward of its tokens is measured with another."""
    more = train_tokenizer([str(number) for number in range(1000)], SCRATCH)
    assert len(more) > len(tokenizer)
    new_policy(SCRATCH, more, seed=0).save_pretrained(tmp_path)
    beside = Aside(str(tmp_path), Guide(trunk="reward", likely=20), SCRATCH)
    train = Train(beside, Fit(), 10, 32, 8, 16.0, 24.0)
    assert 0 < train.at(Probe("cpu", tokenizer, "float32", checked=[str(tmp_path)])).seconds < math.inf


def test_a_policy_in_a_gguf_has_its_own_tokenizer_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a plan counts its tokens exactly, knows the sizes, and writes nothing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    own = train_tokenizer([str(number) for number in range(1000)], SCRATCH)
    file = micro.write_gguf(new_policy(SCRATCH, own, seed=0), own, tmp_path / "tiny.gguf")
    small = {"scratch": micro.SCRATCH, "fit": micro.FIT}
    settings = micro.given(tmp_path / "run", str(file)) | {"reward": small}
    settings["policies"] = {"aware": {"solver": "qrpo", "kl_budget": 0.3, "guide": {"trunk": "reward", "likely": 9}}}
    recipe = Recipe.model_validate(settings)
    found, exact = stand_in(Run.of(recipe), [])
    assert exact
    assert found("From 17 to 345.")["input_ids"] == own("From 17 to 345.")["input_ids"]
    print_plan(recipe, Console(file=(said := StringIO()), width=200), lambda run: [])
    assert "states of the reference" in said.getvalue()
    assert "unknown size" not in said.getvalue()
    assert not (tmp_path / "cache").exists()


def test_a_terminal_shows_what_a_dry_run_measures(tmp_path: Path) -> None:
    """A minute for a real model: which unit it is at, of how many, and nothing of it afterwards."""
    settings = micro.settings(tmp_path) | {"judge": micro.GOLD}
    del settings["gold"]
    recipe = Recipe.model_validate(settings | {"policies": {"aware": settings["policies"]["aware"]}})
    said = StringIO()
    print_plan(recipe, Console(file=said, width=200, force_terminal=True))
    during, plan = said.getvalue().split("Work in")
    number = len(units(Run.of(recipe)))
    assert "lengths of texts" in during
    assert f"/{number}" in during  # a fast machine has passed the first before it is shown
    assert "speeds of models" not in plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_measurement_is_taken_once_and_grows_with_the_work(tokenizer: Any, dtype: str) -> None:
    """Twice the prompts, or steps, take exactly twice as long; every number is there, in any order of precisions."""
    probe = Probe("cpu", tokenizer, dtype)
    for once in (
        Read(SCRATCH, 3, 4, 6.0, 5.0),
        Train(SCRATCH, Fit(), 10, 8, 4, 6.0, 5.0),
        Draw(SCRATCH, 3, 4, 6.0, 5.0, 8),
    ):
        name = "steps" if isinstance(once, Train) else "prompts"
        twice = replace(once, **{name: 2 * getattr(once, name)})
        assert 0 < once.at(probe).seconds < math.inf
        assert twice.at(probe).seconds == pytest.approx(2 * once.at(probe).seconds)
        assert once.at(probe).memory > 0
    assert probe.measures
    assert not probe.assumes


def test_models_that_only_the_hub_has_are_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network their size is unknown; what else there is to count is counted."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnknownSizeError, match="the size of someone/model, for which the hub could not be asked"):
        Read("someone/model", 5, 3, 16.0, 24.0).at(Probe(None, tokenizer, "float32"))


def test_a_trunk_is_looked_for_as_any_model(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the hub that is not here has an unknown size, a folder that is not there is an error before any work."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    beside = Aside(SCRATCH, Guide(trunk="someone/model", likely=20), "someone/model")
    with pytest.raises(UnknownSizeError, match="someone/model"):
        Train(beside, Fit(), 10, 32, 8, 16.0, 24.0).at(Probe(None, tokenizer, "float32"))
    settings = micro.settings(tmp_path / "run")
    settings["policies"] = {"aware": {"solver": "qrpo", "kl_budget": 0.3, "guide": {"trunk": "./nowhere"}}}
    with pytest.raises(ConfigError, match=r"policies\.aware\.guide\.trunk: there is no folder \./nowhere"):
        print_plan(Recipe.model_validate(settings), Console(quiet=True))


def test_a_model_without_attention_reads_text_by_text(tokenizer: Any, tmp_path: Path) -> None:
    """A state space keeps no keys and values, and its texts cannot be packed: the prompt is read with each response.

    How fast it draws and learns is not told.
    """
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, state_size=2)
    config.save_pretrained(tmp_path)
    probe = Probe("cpu", tokenizer, "float32", checked=[str(tmp_path)])
    assert probe.shape(str(tmp_path)).parameters > 0
    assert probe.shape(str(tmp_path)).cached == 0
    read = Read(str(tmp_path), 5, 3, 16.0, 24.0)
    assert read.at(probe).seconds == pytest.approx(replace(read, prompts=15, k=1).at(probe).seconds)
    asked = [
        Draw(str(tmp_path), 5, 3, 16.0, 24.0, 48),
        replace(read, vocabulary=True),
        Train(str(tmp_path), Fit(), 10, 32, 8, 16.0, 24.0),
    ]
    for one in asked:
        with pytest.raises(UnknownSizeError, match="has layers without full attention"):
            one.at(probe)


def test_pairs_that_are_too_long_are_not_trained_on() -> None:
    """Of four rows two have at most 30 tokens with their longer response: half the rows, as long as those."""
    sample = ((10, 5, 9), (20, 3, 10), (20, 3, 40), (90, 3, 3))
    texts = Texts({"reward_pairs": 40, "test_pairs": 8}, 35.0, 3.5, 12.0, sample)
    short = texts.within(30)
    assert short.rows == {"reward_pairs": 20, "test_pairs": 4}
    assert (short.prompt, short.response, short.drawn) == (15.0, 4.0, 12.0)
    assert texts.within(5).count("reward_pairs") == 0


def test_a_guide_that_is_an_adapter_costs_what_an_adapter_does(tmp_path: Path, tokenizer: Any) -> None:
    """Its weights are few, so no gradients and moments of the whole model are in memory."""
    settings = micro.settings(tmp_path / "run")
    plain = {"solver": "qrpo", "kl_budget": 0.3}
    settings["policies"] = {"adapter": plain | {"guide": {"lora": {}}}, "whole": plain | {"guide": {}}}
    run, probe = Run.of(Recipe.model_validate(settings)), Probe(None, tokenizer, "float32")
    texts = Texts({}, 10.0, 20.0, 12.0)
    found = {unit.name: cost(unit, texts, probe) for unit in units(run)}
    assert found["train-adapter"].memory < found["train-whole"].memory / 3
    assert found["train-adapter"].seconds < found["train-whole"].seconds


def test_gold_alone_learns_from_the_pairs_that_are_kept_for_judges(tmp_path: Path) -> None:
    """They are kept from the reward whenever judge or gold learns."""
    settings = micro.settings(tmp_path / "run") | {"judge": micro.GOLD, "gold": {"fit": micro.FIT}}
    recipe = Recipe.model_validate(settings)
    run = Run.of(recipe)
    examples, _ = read_examples(recipe.data, recipe.data.sources, seed=recipe.seed)
    assert texts_of(run, examples, [], True, *stand_in(run, examples)).rows["judge_pairs"] > 0
    assert not Recipe.model_validate(settings | {"gold": None}).judge_learns


def test_rows_are_counted_before_the_data_is_prepared(tmp_path: Path) -> None:
    """Tables that the stage data writes have the expected rows; what fits is told by a tokenizer like the run's."""
    data = {"sources": [{"world": 1000}], "max_prompt_tokens": 48}
    recipe = Recipe.model_validate(micro.settings(tmp_path / "run") | {"data": data})
    run = Run.of(recipe)
    examples, _ = read_examples(recipe.data, recipe.data.sources, seed=recipe.seed)
    texts = texts_of(run, examples, [], True, *stand_in(run, examples))
    run.layout.root.mkdir()
    made = prepare_data(recipe.data, recipe.policy, run.layout, judge_learns=True, seed=0, on_progress=lambda *_: None)
    for table, rows in texts.rows.items():
        beyond = 0.02 * made[f"{table.partition('_')[0]}_prompts"] if "prompts" in table else 0
        assert rows == pytest.approx(made[table], abs=beyond), table
    tokenizer, _ = stand_in(run, examples)
    assert texts.response == pytest.approx(
        sum(len(tokenizer(e.chosen)["input_ids"]) + 1 for e in examples) / len(examples), rel=0.1
    )
    assert texts.drawn <= recipe.rollout.max_new_tokens


def test_a_policy_more_leaves_what_others_learnt_from(tmp_path: Path) -> None:
    """States that it needs too may be copied, so they come first, and yet other states do not depend on them."""
    settings = micro.settings(tmp_path / "run")
    last = settings["policies"]["plain"] | {"fit": micro.FIT | {"lora": {"layers": 1}}}
    found = list[list[Unit]]()
    for more in ({}, {"side": settings["policies"]["plain"] | {"guide": {"side": {}}}}):
        settings["policies"] = {"last": last} | more
        found.append(units(Run.of(Recipe.model_validate(settings))))
    before, after = map(keys, found)
    assert before["train-last"] == after["train-last"]
    assert "states-3-0" in follows(found[1])["states-below-1-0"]


def test_every_unit_that_trains_draws_or_scores_says_so(tmp_path: Path, tokenizer: Any) -> None:
    """What a recipe asks for is what its units pass through models: rollouts by the token, and nothing for tables."""
    settings = micro.settings(tmp_path / "run")
    settings["policies"]["side"] = settings["policies"]["plain"] | {"guide": {"side": {}}}
    last = {"fit": micro.FIT | {"lora": {"layers": 1}}}
    settings["policies"] |= {"last": settings["policies"]["plain"] | last}
    settings["policies"] |= {"student": {"solver": "distil", "teacher": "side"} | last}
    run = Run.of(recipe := Recipe.model_validate(settings))
    probe = Probe(None, tokenizer, "float32")
    texts = Texts({"demonstrations": 90, "reward_pairs": 40, "judge_pairs": 40, "test_pairs": 9}, 10.0, 20.0, 12.0)
    found = {unit.name: cost(unit, texts, probe) for unit in units(run)}
    drawn = sum(found[f"rollout-{part}"].tokens for part in range(4))
    assert drawn == recipe.rollout.prompts * recipe.rollout.k * 12.0
    assert sum(found[f"states-3-{part}"].tokens for part in range(4)) == drawn + recipe.rollout.prompts * 10.0
    assert found["sft"].tokens == 90 / 32 * 32 * (10 + 20)
    nothing = {name for name, one in found.items() if not one.seconds}
    assert nothing == {"data", "calibrate", "results", "report", *(f"card-{name}" for name in recipe.policies)}
    missing = {name: one.unknown for name, one in found.items() if one.unknown}
    assert not missing
    unknown = {unit.name for unit in units(run) if cost(unit, replace(texts, rows={}), probe).unknown}
    assert unknown == {"sft", "reward", "judge"}


def test_train_and_compare_have_a_dry_run(main: Any, tmp_path: Path) -> None:
    """They print the plan and its cost, up to their stage and with their policies, and write nothing."""
    path = micro.write(tmp_path / "recipe.yaml", json.loads(json.dumps(micro.settings(tmp_path / "run"))))
    code, out, err = main("run", path, "--until", "calibrate", "--dry-run")
    assert (code, err) == (0, "")
    assert "In all about" in out
    assert "train-aware" not in out
    code, out, err = main("compare", path, "--methods", "qrpo,ipo", "--kl-budgets", "0.5", "--dry-run")
    assert (code, err) == (0, "")
    assert "train-ipo-0.5" in out
    assert "In all about" in out
    assert not (tmp_path / "run").exists()
