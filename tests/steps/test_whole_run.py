"""A whole small run, and what happens when it is run again, changed, extended or killed."""

import io
import json
import shutil
from pathlib import Path

import micro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import infalign
from infalign.core.errors import ConfigError
from infalign.method.calibration import win
from infalign.method.procedures import BestOfN
from infalign.method.transforms import parse_transform
from infalign.models.pretrained import load_policy
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.rewards.classifier import ClassifierReward
from infalign.steps import train
from infalign.steps.dry_run import print_plan
from infalign.steps.run import Run
from infalign.theory.optimum import rank_optimum

POLICIES = ["aware", "plain", "online"]
CARDS = [f"card-{name}" for name in POLICIES]


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def recipe_of(root: Path) -> Recipe:
    """Return the recipe that a run recorded."""
    return load_recipe(root / "recipe.yaml")


def test_a_run_leaves_models_that_transformers_loads(finished: Path) -> None:
    """Reference and policies are causal language models, reward and judge classifiers with one output."""
    prompt = [{"role": "user", "content": "Hello"}]
    for name in ("reference", *POLICIES):
        model, info = AutoModelForCausalLM.from_pretrained(finished / "models" / name, output_loading_info=True)
        assert not info["missing_keys"]
        tokenizer = AutoTokenizer.from_pretrained(finished / "models" / name)
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert torch.isfinite(model(**ids).logits).all()
    for name in ("reward", "judge"):
        folder = finished / "models" / name
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert model.config.num_labels == 1
    assert {path.name for path in (finished / "models").iterdir()} == {"reference", "reward", "judge", *POLICIES}
    assert not list(finished.rglob("checkpoint-*"))


def test_a_run_leaves_tables_that_pyarrow_reads(finished: Path) -> None:
    """Each of the first prompts is in one of four parts, all rows are there, and calibration is a dataset column."""
    recipe = recipe_of(finished)
    prompts, k = recipe.rollout.prompts, recipe.rollout.k
    first = pq.read_table(finished / "data" / "train_prompts.parquet")["prompt_id"].to_pylist()[:prompts]
    parts = [part.read().prompt_ids for part in Run.of(recipe).rollout_parts]
    assert (len(parts), sorted(i for ids in parts for i in ids)) == (4, sorted(first))
    assert len(micro.rollouts(finished / "rollouts")) == prompts * k
    scores = pa.concat_tables([pq.read_table(path) for path in sorted((finished / "scores").glob("*.parquet"))])
    assert scores.num_rows == prompts * k
    calibrated = pq.read_table(finished / "calibrated.parquet").to_pylist()
    own: dict[str, list[float]] = {}
    for row in scores.to_pylist():
        own.setdefault(row["prompt_id"], []).append(row["reward"])
    assert {row["prompt_id"]: row["reference_rewards"] for row in calibrated} == {i: sorted(r) for i, r in own.items()}
    for name in ("reference", *POLICIES):
        table = pq.read_table(finished / "evaluation" / name / "scores.parquet")
        assert table.num_rows == recipe.evaluate.prompts * recipe.evaluate.samples
        assert {"reward", "judge", "gold", "length"} <= set(table.column_names)


@pytest.mark.parametrize("judge", ["reward", "judge", "gold"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_win_rates_follow_from_the_table_of_scores(finished: Path, policy: str, judge: str) -> None:
    """Standard and best-of-2 win rates and KL of results.json are recomputed by counting pairs of samples."""
    results = json.loads((finished / "results.json").read_text())["policies"][policy]

    def samples(name: str, column: str) -> np.ndarray:
        return pq.read_table(finished / "evaluation" / name / "scores.parquet")[column].to_numpy().reshape(6, 8)

    def served(name: str) -> list[np.ndarray]:
        """Return, prompt by prompt, the judge's score of what each pair of samples serves: the better by reward."""
        pairs = [(i, j) for i in range(8) for j in range(8) if i != j]
        selected, judged = samples(name, "reward"), samples(name, judge)
        both = zip(selected, judged, strict=True)
        # Of a tie the first is served; the pair also comes in the other order, so each is served once.
        return [np.array([q[i] if s[i] >= s[j] else q[j] for i, j in pairs]) for s, q in both]

    standard = win(samples(policy, judge)[:, :, None], samples("reference", judge)[:, None, :]).mean()
    best = np.mean([win(a[:, None], b).mean() for a, b in zip(served(policy), served("reference"), strict=True)])
    assert results["win_rates"][judge]["standard"]["mean"] == pytest.approx(standard)
    assert results["win_rates"][judge]["best-of-2"]["mean"] == pytest.approx(best)
    assert results["kl"]["mean"] == pytest.approx(samples(policy, "kl").mean())


def test_a_recipe_runs_from_python(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings change by dotted key, no file of a finished run changes, the numbers come back; stdout stays empty."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet")}
    recipe = micro.write(root / "again.yaml", micro.settings(root / "elsewhere"))
    results = infalign.run(recipe, {"run_dir": str(root), "compute.processes": 1})
    assert results == json.loads((root / "results.json").read_text())
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet")} == before


def test_a_changed_judge_costs_its_own_training_and_scores_only(root: Path) -> None:
    """Samples, KL and the reward's scores stay as they are; the judge's are new."""
    evaluated = {path: path.stat().st_mtime_ns for path in (root / "evaluation").rglob("*.parquet")}
    models = ["reference", *POLICIES]
    done = micro.again(root, "judge.fit.epochs=2", "judge.fit.learning_rate=0.01", until="evaluate")
    assert done[0] == "judge"
    assert sorted(done[1:5]) == sorted(f"evaluate-{name}" for name in models)
    assert done[5:] == ["results", *CARDS]
    changed = {path for path, before in evaluated.items() if not path.exists() or path.stat().st_mtime_ns != before}
    names = {"/".join(path.relative_to(root / "evaluation").parts[1:]) for path in changed}
    assert names == {"scores.parquet", "scores/judge/part-00000.parquet"}


@pytest.mark.slow
def test_a_solved_transformation_travels_with_the_policy_trained_on_it(root: Path, tmp_path: Path) -> None:
    """A recipe takes a table by its path; its content decides what is redone, and the policy's folder keeps it."""
    table, elsewhere = tmp_path / "best.json", tmp_path / "moved.json"
    table.write_text(rank_optimum(BestOfN(4), kl=0.5).transform.to_json())
    expected = ["law-plain", "train-plain", *micro.evaluation("plain"), "results", "report", *CARDS]
    assert micro.again(root, f"policies.plain.transform={table}") == expected
    kept = parse_transform(str(Layout(root).model("plain") / "transformation.json"))
    ranks = np.linspace(0, 1, 11)
    assert (kept(ranks) == parse_transform(str(table))(ranks)).all()
    table.rename(elsewhere)
    assert micro.again(root, f"policies.plain.transform={elsewhere}") == []
    elsewhere.write_text(rank_optimum(BestOfN(4), kl=0.4).transform.to_json())
    assert micro.again(root, f"policies.plain.transform={elsewhere}") == expected


def test_a_ready_judge_gives_its_rows_to_the_reward_model(root: Path) -> None:
    """A judge that needs no training changes the split, so the data is shared out again, all pairs to the reward."""
    before = pq.read_table(Layout(root).data / "reward_pairs.parquet").num_rows
    done = micro.again(root, "judge={function: 'infalign.world:gold'}", until="data")
    assert done == ["data"]
    assert pq.read_table(Layout(root).data / "judge_pairs.parquet").num_rows == 0
    assert pq.read_table(Layout(root).data / "reward_pairs.parquet").num_rows > before


@pytest.mark.slow
def test_a_policy_may_lie_in_a_gguf(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is converted at the start; where the file lies does not count, and the recipe keeps its name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    model, tokenizer = load_policy(finished / "models" / "reference")
    file = micro.write_gguf(model, tokenizer, tmp_path / "tiny.gguf")
    path = micro.write(tmp_path / "recipe.yaml", micro.settings(tmp_path / "run"))
    changes = ["policy.scratch=null", "policy.fit=null", "policies={aware: {solver: qrpo, kl_budget: 0.3}}"]
    micro.done(load_recipe(path, [*changes, f"policy.model={file}"]), until="rollout")
    root = tmp_path / "run"
    assert recipe_of(root).policy.model == str(file)
    assert len({row["text"] for row in micro.rollouts(root / "rollouts")}) > 1
    moved = file.rename(tmp_path / "moved.gguf")
    assert micro.again(root, *changes, f"policy.model={moved}", until="rollout") == []


def test_reward_and_judge_may_be_heads_on_frozen_models(root: Path) -> None:
    """Only the head is trained, on its pairs; policy and reward have the chat template that their folder lacks."""
    pretrained = Layout(root).model("reference").rename(root.parent / "pretrained")
    bare = shutil.copytree(pretrained, root.parent / "bare")
    turns = (bare / "chat_template.jinja").rename(root.parent / "turns.jinja")
    changes = ["reward.fit=null", "reward.head={pairs: 40}", f"judge={{head: {{pairs: 30}}, model: {pretrained}}}"]
    of_policy = [f"policy.model={bare}", f"policy.chat_template={turns}", "policy.scratch=null", "policy.fit=null"]
    done = micro.again(root, *of_policy, *changes, until="calibrate")
    assert {"reward", "judge", "score-0"} <= set(done)
    records = {name: json.loads((root / "stages" / f"{name}.json").read_text()) for name in ("reward", "judge")}
    assert [records[name]["summary"]["pairs"] for name in ("reward", "judge")] == [40, 30]
    for record in records.values():
        assert record["summary"]["layers"] == [1]
        assert 0 <= record["summary"]["validated_accuracy"]["mean"] <= 1
    reward = AutoModelForSequenceClassification.from_pretrained(root / "models" / "reward")
    assert type(reward).__name__ == "PooledForSequenceClassification"


def test_a_judge_may_be_a_head_on_an_encoder(root: Path, tmp_path: Path) -> None:
    """It alone is trained anew, and a dry run tells what it and the evaluations take."""
    folder = micro.encoder(tmp_path / "encoder")
    change = f"judge={{model: {folder}, head: {{pairs: 30}}}}"
    console = Console(file=io.StringIO(), width=200)
    print_plan(load_recipe(micro.write(root / "again.yaml", micro.settings(root)), [change]), console)
    assert "judge" in console.file.getvalue()
    assert "no time estimate" not in console.file.getvalue()
    assert micro.again(root, change, until="reward-model") == ["judge"]
    config = AutoConfig.from_pretrained(root / "models" / "judge")
    assert config.base["model_type"] == "bert"
    of_policy = [f"policy.model={folder}", "policy.scratch=null"]
    with pytest.raises(ConfigError, match="contains BertModel, not a causal language model"):
        print_plan(load_recipe(root / "again.yaml", of_policy), console)


def test_half_precision_is_for_drawing_and_scoring(root: Path) -> None:
    """What depends on it is made again, and nothing else; the rewards are those of float32 to its rounding."""
    before = {path.name: pq.read_table(path)["reward"].to_numpy() for path in (root / "scores").glob("*.parquet")}
    reward = ClassifierReward.load(root / "models" / "reward", dtype="bfloat16")
    prompts, responses = [[{"role": "user", "content": "Hi"}]] * 2, ["Hello there.", "No"]
    exact = ClassifierReward.load(root / "models" / "reward")(prompts, responses)
    np.testing.assert_allclose(reward(prompts, responses), exact, atol=0.05)
    done = micro.again(root, "compute.dtype=bfloat16", until="calibrate")
    assert {"data", "sft"}.isdisjoint(done)
    assert {"reward", "judge", "rollout-0", "score-3", "calibrate"} <= set(done)
    after = {path.name: pq.read_table(path)["reward"].to_numpy() for path in (root / "scores").glob("*.parquet")}
    assert any((before[name] != after[name]).any() for name in before)
    assert micro.again(root, "compute.dtype=bfloat16", until="calibrate") == []


def test_a_student_comes_after_its_teacher_and_before_the_next_policy(tmp_path: Path) -> None:
    """Wherever the recipe names it: it takes the longest, and nothing else would be left to do beside it."""
    recipe = load_recipe("preferences", [f"run_dir={tmp_path}"])
    named = dict(sorted(recipe.policies.items(), key=lambda item: item[0] != "aware-student"))
    for policies in (recipe.policies, named):
        run = Run.of(recipe.model_copy(update={"policies": policies}))
        trained = {unit.name: unit for unit in train.units(run) if unit.name.startswith("train-")}
        assert [*trained] == [f"train-{name}" for name in ("aware", "aware-student", "raw", "identity")]
        assert "procedure" in trained["train-raw"].settings  # its gain chooses the strength


def test_a_changed_setting_removes_what_an_unfinished_attempt_left(root: Path) -> None:
    """Rollouts of other lengths are not mixed with those that are there."""
    micro.again(root, "rollout.max_new_tokens=3", until="rollout")
    assert len(micro.rollouts(root / "rollouts")) == 72
    assert max(len(row["token_ids"]) for row in micro.rollouts(root / "rollouts")) == 3
    assert Layout(root).scores(0).exists()  # not yet touched
