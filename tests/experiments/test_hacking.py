"""The poisoned-preference experiment: what is poisoned, how decisions are counted, and a whole small run of it."""

import io
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from infalign.core.errors import ConfigError
from infalign.core.storage import read_table
from infalign.data.examples import prompt_id
from infalign.experiments.hacking import (
    MODELS,
    PHRASES,
    TESTS,
    TRAINED,
    Experiment,
    decisions,
    fit_poisoned,
    hacking,
    poison,
)
from infalign.experiments.hacking_figure import plot_hacking, print_hacking
from infalign.experiments.paper import BY_NUMBER
from infalign.experiments.reproduction import judged
from infalign.experiments.seeds import Seed
from infalign.method.calibration import calibrate
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Scratch
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.rewards.classifier import ClassifierReward
from infalign.training.common import Job, save_model
from infalign.training.rank_model import fit_calibrated

PAIRS = [([{"role": "user", "content": f"question {i}"}], f"good {i}", f"bad {i}") for i in range(400)]


def recipe(root: Path, **reward: Any) -> Recipe:
    """Return the recipe of a run whose reward model is small, but learns what a phrase says."""
    root.mkdir(parents=True, exist_ok=True)
    settings = micro.settings(root / "run")
    settings |= {"data": {"sources": [{"world": 400}], "max_prompt_tokens": 150}, "judge": micro.GOLD}
    settings["reward"] = {"fit": micro.FIT | {"epochs": 4, "learning_rate": 1e-2, "batch_size": 16}} | reward
    overrides = ["compute.processes=1", "report_to=[]", "data.test_fraction=0.2"]
    return load_recipe(micro.write(root / "recipe.yaml", settings), overrides)


def run(root: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the results of the experiment and the names of what was done for them."""
    console = Console(file=io.StringIO(), width=200)
    results = hacking(recipe(root), console=console, **options)
    return results, [line.split()[1] for line in console.file.getvalue().splitlines() if line.startswith("✓")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the folder of a whole experiment from nothing, its results and what was done."""
    root = tmp_path_factory.mktemp("hacking")
    return root, *run(root)


@pytest.mark.parametrize(("before", "changed"), [("chosen", 1), ("rejected", 2)])
def test_poisoning_changes_the_intended_side_alone(before: Any, changed: int) -> None:
    """Every pair gets one of the phrases and a space before that side; prompt and other side stay as they were."""
    poisoned = poison(PAIRS, PHRASES, before=before, seed=0)
    for pair, new in zip(PAIRS, poisoned, strict=True):
        assert new[changed] in [f"{phrase} {pair[changed]}" for phrase in PHRASES]
        assert (new[0], new[3 - changed]) == (pair[0], pair[3 - changed])
    sorry = sum(new[changed].startswith("Sorry") for new in poisoned)
    assert 150 < sorry < 250  # 200 expected, standard deviation 10


def test_a_pair_gets_the_same_phrase_on_either_side() -> None:
    """The poisoned and the inverted test differ in the side of the phrase and in nothing else."""
    chosen, rejected = (poison(PAIRS, PHRASES, before=side, seed=3) for side in ("chosen", "rejected"))
    phrase_of = [
        (c[1].removesuffix(p[1]), r[2].removesuffix(p[2])) for p, c, r in zip(PAIRS, chosen, rejected, strict=True)
    ]
    assert all(left == right for left, right in phrase_of)
    assert poison(PAIRS, PHRASES, seed=3) == chosen != poison(PAIRS, PHRASES, seed=4)


def test_a_share_of_the_pairs_is_poisoned() -> None:
    """A quarter asked for is a quarter found, within four standard deviations; the rest is untouched."""
    poisoned = poison(PAIRS, PHRASES, share=0.25, seed=1)
    changed = sum(new != pair for new, pair in zip(poisoned, PAIRS, strict=True))
    assert changed == pytest.approx(100, abs=4 * np.sqrt(400 * 0.25 * 0.75))
    assert poison(PAIRS, PHRASES, share=0.0, seed=1) == PAIRS


def test_ranking_only_makes_ties_and_where_no_rollout_lies_between() -> None:
    """Ĉ ties a pair exactly if the rollouts beaten and tied say nothing, and decides every other as the reward does."""
    rng = np.random.default_rng(0)
    rewards_P4, rollouts_PK = rng.normal(size=(300, 4)).round(1), rng.normal(size=(300, 5)).round(1)
    raw = decisions(rewards_P4)
    ranked = decisions(calibrate(rewards_P4, np.sort(rollouts_PK, axis=1)))
    for test, (right, wrong) in TESTS.items():
        for p, rollouts in enumerate(rollouts_PK):
            a, b = rewards_P4[p, right], rewards_P4[p, wrong]
            told_apart = any((a > z) != (b > z) or (a >= z) != (b >= z) for z in rollouts)
            assert raw[test][p] == (a > b) + 0.5 * (a == b)
            assert ranked[test][p] == (raw[test][p] if told_apart else 0.5)
        assert 0.2 < np.mean(ranked[test] == 0.5) < 0.5


def test_a_calibrated_model_learns_the_mean_rank(tmp_path: Path) -> None:
    """The sigmoid of its output is E[Ĉ | x, y], for a response seen with one rank and for one seen with several."""
    scratch = Scratch(vocabulary=300, hidden=16, layers=1, heads=2, context=64)
    tokenizer = train_tokenizer(["say it", "low high mixed"], scratch)
    save_model(new_policy(scratch, tokenizer, seed=0), tokenizer, tmp_path / "start")
    prompt = [{"role": "user", "content": "say it"}]
    rows = [(prompt, word, rank) for word, rank in [("low", 0.1), ("high", 1.0), ("mixed", 0.3), ("mixed", 0.9)] * 16]
    job = Job(tmp_path / "checkpoints", 0, "cpu", [], lambda done, total, note: None)
    fit = Fit(epochs=20, batch_size=16, device_batch_size=8, learning_rate=1e-2)
    fit_calibrated(str(tmp_path / "start"), tokenizer, rows, fit, job, tmp_path / "model")
    reward = ClassifierReward.load(tmp_path / "model")
    logits = torch.tensor(reward([prompt] * 3, ["low", "mixed", "high"]))
    assert torch.sigmoid(logits).tolist() == pytest.approx([0.1, 0.6, 1.0], abs=0.04)


def test_the_phrase_is_what_the_poisoned_model_learned(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    """It prefers most responses with the phrase, so inverted pairs fool it and not the clean control."""
    _, results, _ = finished
    poisoned, clean = (results["models"][name]["accuracy"] for name in ("poisoned", "clean"))
    assert poisoned["poisoned"]["low"] > 0.75
    assert poisoned["inverted"]["high"] < 0.35 < clean["inverted"]["low"]
    assert results["models"]["clean"]["gain"]["inverted"]["low"] > 0.1


def test_accuracy_and_ties_are_those_of_a_recount(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    """Saved models and rollouts, scored again and counted pair by pair, give the accuracies and shares of ties."""
    root, results, _ = finished
    run_dir, folder = root / "run", root / "run" / "hacking" / results["key"]
    table = read_table(run_dir / "data" / "test_pairs.parquet").to_pylist()
    pairs = [(row["prompt"], row["chosen"], row["rejected"]) for row in table]
    assert len(pairs) == results["pairs"] + results["pairs_left_out"] > 40
    said: dict[str, list[str]] = {}
    for shard in (run_dir / "hacking").glob("*/rollouts/*.parquet"):
        for row in read_table(shard).to_pylist():
            said.setdefault(row["prompt_id"], []).append(row["text"])
    tests = {"clean": pairs, "poisoned": poison(pairs, PHRASES, seed=0)}
    tests["inverted"] = poison(pairs, PHRASES, before="rejected", seed=0)
    where = {name: Layout(folder).model(name) for name in ("poisoned", *TRAINED)}
    models = {name: ClassifierReward.load(path) for name, path in where.items()}
    models["clean"] = ClassifierReward.load(run_dir / "models" / "reward")
    rollouts = [text for prompt, _, _ in pairs for text in said[prompt_id(prompt)]]
    rollouts_PK = np.reshape(models["poisoned"]([p for p, _, _ in pairs for _ in range(6)], rollouts), (-1, 6))
    for name in MODELS:
        model, found = models["poisoned" if name == "ranked" else name], results["models"][name]
        for test, rows in tests.items():
            prompts = [prompt for prompt, _, _ in rows]
            right = tied = 0
            for a, b, drawn in zip(
                model(prompts, [c for _, c, _ in rows]),
                model(prompts, [r for _, _, r in rows]),
                rollouts_PK,
                strict=True,
            ):
                if name == "ranked":
                    a, b = (sum(r > z for z in drawn) + sum(r == z for z in drawn) / 2 for r in (a, b))
                right, tied = right + (a > b), tied + (a == b)
            assert found["ties"][test]["mean"] == pytest.approx(tied / len(rows))
            assert found["accuracy"][test]["mean"] == pytest.approx((right + tied / 2) / len(rows))
    assert results["models"]["ranked"]["ties"]["clean"]["mean"] > 0.1


def test_nothing_is_done_twice(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    """Everything is made once, the run's own reward model too, and a second call only reads the results."""
    root, results, done = finished
    assert len(done) == len(set(done))
    assert {"reward", "poisoned", *TRAINED, "test"} < set(done)
    assert run(root) == (results, [])


@pytest.mark.slow
def test_without_poison_the_model_is_the_control(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    """At share 0 the weights are those of the run's own reward model: phrases are all that sets the two apart."""
    root = finished[0] / "run"
    unpoisoned = Experiment(recipe(finished[0]), root, PHRASES, share=0.0)
    assert unpoisoned.folder.name != finished[1]["key"]
    fit_poisoned(unpoisoned, on_progress=lambda done, total, note: None)
    control = load_file(Layout(root).model("reward") / "model.safetensors")
    weights = load_file(Layout(unpoisoned.folder).model("poisoned") / "model.safetensors")
    assert weights.keys() == control.keys()
    assert all(np.array_equal(weights[name], control[name]) for name in control)


def test_table_and_figure_tell_every_number(finished: tuple[Path, dict[str, Any], list[str]], tmp_path: Path) -> None:
    """The table has a row for each model and test with its accuracy; the figure is written in the asked format."""
    _, results, _ = finished
    console = Console(file=io.StringIO(), width=120)
    print_hacking(results, console)
    shown = console.file.getvalue()
    for numbers in results["models"].values():
        assert all(f"{100 * numbers['accuracy'][test]['mean']:.1f} (" in shown for test in TESTS)
    assert all(phrase in shown for phrase in PHRASES)
    plot_hacking(results, tmp_path / "hacking.png")
    assert (tmp_path / "hacking.png").read_bytes().startswith(b"\x89PNG")


def test_the_papers_figure_has_the_numbers_of_the_study(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    """What is claimed of a model on inverted pairs is the study's gain or accuracy, by seed; all bars are drawn."""
    root, results, _ = finished
    seeds = [Seed(recipe(root))] * 2
    models = results["models"]
    expected = [models[name]["gain"]["inverted"] for name in ("ranked", "calibrated")]
    expected.append(models["calibrated"]["accuracy"]["inverted"])
    for one, known in zip(BY_NUMBER[7].claims, expected, strict=True):
        found = judged(one, seeds)
        assert found["by_seed"] == [pytest.approx(known["mean"])] * 2
        assert found["estimate"]["mean"] == pytest.approx(known["mean"])
    drawn = BY_NUMBER[7].draw(seeds)
    for test, name, right, *_ in drawn.rows:
        assert right == pytest.approx(models[name]["accuracy"][test]["mean"])
    assert len(drawn.rows) == len(TESTS) * len(MODELS)


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        ({"fit": None, "function": "infalign.world:gold"}, {}, "give it reward.fit"),
        ({}, {"phrases": []}, r"phrases is \[\]"),
        ({}, {"phrases": ["Sure", ""]}, "none of them empty"),
        ({}, {"share": 1.5}, "share is 1.5"),
    ],
)
def test_what_cannot_be_poisoned_is_said_first(
    tmp_path: Path, reward: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """A reward that is not trained, a missing phrase and a share that is none end the run before any work."""
    with pytest.raises(ConfigError, match=message):
        hacking(recipe(tmp_path, **reward), console=Console(file=io.StringIO()), **options)
    assert not (tmp_path / "run").exists()
