"""What is read from logs of other tools: their own numbers on logs that they wrote (`make test-logs`), or an error."""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import written

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.measures import measure
from infalign.evaluation.table_files import Reading
from infalign.integrations.logs import Log, read_log, read_rewards

HERE = Path(__file__).parents[1] / "logs"
LM_EVAL = HERE / "lm_eval" / "output" / "lucky-1b"
GARAK = HERE / "garak" / "lipsum.report.jsonl"
TRACES = HERE / "verifiers" / "traces.jsonl"
EVALPLUS = HERE / "evalplus" / "coder-1b" / "samples_eval_results.json"
VALIDATION = HERE / "verl" / "validation"
needs_inspect = pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed")


def numbers(tool: str) -> Any:
    """Return what the tool itself reports on its log."""
    return json.loads((HERE / tool / "numbers.json").read_text(encoding="utf-8"))


def samples_of(task: str) -> Path:
    """Return lm-eval's samples of a task."""
    (path,) = LM_EVAL.glob(f"samples_{task}_2*.jsonl")
    return path


def by_prompt(log: Log) -> dict[str, dict[str, list[float]]]:
    """Return the rewards that there are, of each prompt of each model."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in log.rows.to_pylist():
        if row["reward"] is not None:
            found[row["model"]][row["prompt"]].append(row["reward"])
    return found


def metric(rewards: dict[str, list[float]], name: str) -> float:
    """Return a metric over the prompts with responses enough for it, as tools leave out the others."""
    k = int(name.rpartition("@")[2])
    return measure([row for row in rewards.values() if len(row) >= k], [name])[0]["mean"]


@needs_inspect
@pytest.mark.parametrize("file", ["arithmetic-strong.eval", "arithmetic-weak.eval", "json/arithmetic-weak.json"])
@pytest.mark.parametrize("scorer", ["match", "includes"])
def test_epochs_of_inspect_give_its_accuracy_and_its_pass_at_2(file: str, scorer: str) -> None:
    """Both formats; an epoch that failed has an error and no reward, and counts in neither number."""
    own = numbers("inspect_ai")[Path(file).stem]
    log = read_log(HERE / "inspect_ai" / file, score=scorer)
    ((model, rewards),) = by_prompt(log).items()
    assert model == f"mockllm/{Path(file).stem.rpartition('-')[2]}"
    assert metric(rewards, "avg@1") == pytest.approx(own[f"{scorer}/mean"])
    assert metric(rewards, "pass@2") == pytest.approx(own[f"{scorer}/pass_at_2"])
    failed = [row for row in log.rows.to_pylist() if row.get("error")]
    assert {row["reward"] for row in failed} == ({None} if model == "mockllm/weak" else set())
    assert set(log.rows["level"].to_pylist()) == {"easy", "hard"}


@needs_inspect
def test_a_folder_of_inspect_logs_has_both_models_on_the_same_prompts(tmp_path: Path) -> None:
    """Another file in it is named; without a scorer's name, and with the same run twice, there is an error."""
    for log in (HERE / "inspect_ai").glob("*.eval"):
        shutil.copy(log, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    log = read_log(tmp_path, score="match")
    strong, weak = (by_prompt(log)[f"mockllm/{name}"] for name in ("strong", "weak"))
    assert strong.keys() >= weak.keys()
    assert log.notes == (f"1 of the files in {tmp_path} are no logs and are ignored, such as notes.txt",)
    with pytest.raises(ConfigError, match="match or includes"):
        read_log(tmp_path)
    shutil.copy(HERE / "inspect_ai" / "json" / "arithmetic-weak.json", tmp_path)
    with pytest.raises(DataError, match=r"weak.json: sample 1 of mockllm/weak .* comes a second time"):
        read_log(tmp_path, score="match")


@needs_inspect
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"status": "success"', '"status": "cancelled"', "status cancelled"),
        ('"version": 2', '"version": 3', "read version 3"),
        ('"epochs": 4', '"epochs": 5', "20 of 25 samples"),
        ('"value": "I"', '"value": "wrong"', "'wrong' is neither a grade"),
        ('"value": "I"', '"value": Infinity', "inf is not a finite number"),
        ('"input":', '"inputs":', "damaged, cut off, or of a version"),
    ],
)
def test_an_inspect_log_that_is_not_whole_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    """Unfinished, of a newer format, with fewer samples than were planned, or with values that are no scores."""
    text = (HERE / "inspect_ai" / "json" / "arithmetic-weak.json").read_text(encoding="utf-8")
    (tmp_path / "log.json").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_log(tmp_path / "log.json", score="match")


@needs_inspect
@pytest.mark.parametrize("size", [0, 40, 9000])
def test_an_inspect_archive_that_is_cut_off_is_refused(size: int, tmp_path: Path) -> None:
    """Its index is at its end."""
    (tmp_path / "log.eval").write_bytes((HERE / "inspect_ai" / "arithmetic-weak.eval").read_bytes()[:size])
    with pytest.raises(DataError, match=r"log.eval cannot be read as a log of inspect_ai .* cut off"):
        read_log(tmp_path / "log.eval")


@pytest.mark.skipif(find_spec("inspect_ai") is not None, reason="inspect_ai is installed")
def test_a_log_of_inspect_names_the_package_that_reads_it() -> None:
    """Where it is not installed."""
    with pytest.raises(ConfigError, match="pip install inspect_ai"):
        read_log(HERE / "inspect_ai" / "arithmetic-weak.eval")


@pytest.mark.parametrize(
    ("task", "score", "scored"),
    [
        ("choices", "acc,none", 1),
        ("choices", "acc_norm,none", 1),
        ("sums", "exact_match,none", 4),
        ("sums_two_filters", "exact_match,first", 4),
    ],
)
def test_samples_of_lm_eval_give_its_metrics(task: str, score: str, scored: int) -> None:
    """Where responses repeat, its metric is that of the first; the others have no reward, and a note says so."""
    log = read_log(samples_of(task), score=score)
    assert by_prompt(log).keys() == {"lucky-1b"}
    assert metric(by_prompt(log)["lucky-1b"], "avg@1") == pytest.approx(numbers("lm_eval")[task][score])
    assert log.rows.num_rows == 6 * scored
    assert ["only the first of the 4" in note for note in log.notes].count(True) == (scored > 1)


def test_a_majority_of_lm_eval_is_the_reward_of_no_response(tmp_path: Path) -> None:
    """Its score of .83 is no sample's, nor is that of a filter that may keep them all."""
    shutil.copytree(LM_EVAL, tmp_path / "run")
    for path in (tmp_path / "run").glob("results_*.json"):
        path.write_bytes(replaced('"take_first"', '"build_predictions"')(path))
    two = samples_of("sums_two_filters")
    for path, score in ((two, "majority"), (tmp_path / "run" / two.name, "first")):
        log = read_log(path, score=score)
        assert log.rows["reward"].null_count == log.rows.num_rows
        assert "no single one of the 4" in log.notes[-1]
    with pytest.raises(DataError, match="no sample has a reward"):
        read_rewards(two, score="majority", reading=Reading(missing="omit"))
    with pytest.raises(ConfigError, match="give the path of a log, of a folder of logs or of a table"):
        read_rewards()


def test_accuracy_of_lm_eval_is_taken_where_none_is_named() -> None:
    """And the other metric is named."""
    log = read_log(samples_of("choices"))
    assert log.rows["reward"].to_pylist() == read_log(samples_of("choices"), score="acc").rows["reward"].to_pylist()
    assert log.notes == ("choices: the reward is acc,none; not used: acc_norm,none",)


def exact(responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for a response that is its answer."""
    return [float(said == right) for said, right in zip(responses, answer, strict=True)]


def test_a_checker_scores_every_response_of_lm_eval(tmp_path: Path) -> None:
    """It takes the fields of the document by name; a note counts where lm-eval agrees. Also of chats without scores."""
    log = read_log(samples_of("sums"), check=exact)
    rewards = np.reshape(log.rows["reward"].to_pylist(), (6, 4))
    assert rewards[:, 0].mean() == numbers("lm_eval")["sums"]["exact_match,none"]
    assert log.notes[-1] == "exact scores 24 texts in place of the log; of its own 6 scores 6 are the same"
    assert (rewards.mean(axis=0) > 0).all()
    rows = [json.loads(line) for line in samples_of("sums").read_text().splitlines()]
    for row in rows:
        row["arguments"]["gen_args_0"]["arg_0"] = [json.dumps([{"role": "user", "content": "Add."}])]
    chat = written(tmp_path / "chat.jsonl", [row | {"metrics": []} for row in rows])
    assert read_log(chat, check=exact).rows["reward"].to_pylist() == log.rows["reward"].to_pylist()
    assert read_log(samples_of("sums_two_filters"), check=exact).rows["reward"].null_count == 0


@pytest.mark.parametrize("name", ["acc", "reward"])
def test_dumps_of_verl_give_its_mean_of_each_step(name: str) -> None:
    """Each step is a model, and equal inputs are one prompt."""
    log = read_log(VALIDATION, score=name)
    for step, own in numbers("verl").items():
        rewards = by_prompt(log)[f"validation step {step}"]
        assert [len(row) for row in rewards.values()] == [4, 4, 4]
        assert np.mean(list(rewards.values())) == pytest.approx(own[name]["mean@4"])
    assert any("equal input" in note for note in log.notes)
    table = read_rewards(VALIDATION / "0.jsonl", reading=Reading({"prompt": "input", "reward": name, "model": "step"}))
    assert list(table.models.names) == ["0"]  # whose columns are named is a table


def test_pass_at_4_is_what_verl_calls_best_at_4_without_its_bias() -> None:
    """One of four right counts as 1 − (3/4)⁴ = .684 there, since it draws four with replacement; here as 1."""
    rewards = by_prompt(read_log(VALIDATION, score="acc"))["validation step 0"]
    assert [sum(row) for row in rewards.values()] == [1, 0, 3]
    assert metric(rewards, "pass@4") == pytest.approx(2 / 3)
    with_replacement = np.mean([1 - (1 - np.mean(row)) ** 4 for row in rewards.values()])
    assert numbers("verl")["0"]["acc"]["best@4/mean"] == pytest.approx(with_replacement, abs=0.02)  # 1,000 draws


@pytest.mark.parametrize("function", ["vowels", "short"])
def test_completions_of_trl_give_the_mean_rewards_that_it_logs(function: str) -> None:
    """A function that returned None leaves a response without a reward."""
    found = by_prompt(read_log(HERE / "trl" / "run", score=function))
    for step, own in numbers("trl").items():
        rewards = [reward for row in found[f"run step {step}"].values() for reward in row]
        assert np.mean(rewards) == pytest.approx(own[function])


def test_episodes_of_verifiers_give_its_rewards() -> None:
    """It gives a rollout that failed the reward 0; here it has an error and no reward."""
    rows = read_log(TRACES).rows.to_pylist()
    own = numbers("verifiers")
    assert [row["reward"] for row in rows] == [None if each["error"] else each["reward"] for each in own]
    assert [row["error"] for row in rows if row["error"]] == ["the sandbox went away"]
    assert len({row["prompt"] for row in rows}) == 3
    exact_only = read_log(TRACES, score="exact").rows["reward"].to_pylist()
    assert exact_only == [None if row["reward"] is None else min(row["reward"], 1.0) for row in rows]


@pytest.mark.parametrize("tests", ["base", "plus"])
def test_results_of_evalplus_give_its_pass_at_1(tests: str) -> None:
    """A solution that never ends is wrong, as it is there."""
    rewards = by_prompt(read_log(EVALPLUS, score=tests))["coder-1b"]
    assert metric(rewards, "pass@1") == pytest.approx(numbers("evalplus")[tests], abs=5e-4)  # it prints three digits


@pytest.mark.parametrize("detector", ["always.Random", "always.Fail"])
def test_attempts_of_garak_give_its_rate_of_success_and_its_hit_at_k(detector: str) -> None:
    """Also at a threshold of its own, .7 here, which its report does not hold."""
    own = numbers("garak")[detector]
    rewards = by_prompt(read_log(GARAK, score=detector))["test.Lipsum"]
    assert sum(map(sum, rewards.values())) == own["fails"]
    for k, hits in own["hit_at_k"].items():
        assert metric(rewards, f"pass@{k}") == pytest.approx(hits["score"])


def test_two_runs_in_a_folder_are_two_models_or_refused(tmp_path: Path) -> None:
    """evalplus writes the model into the file's name, verl into none."""
    (tmp_path / "evalplus").mkdir()
    for name in "ab":
        shutil.copytree(VALIDATION, tmp_path / "verl" / name / "validation")
        shutil.copy(EVALPLUS, tmp_path / "evalplus" / f"{name}_vllm_temp_0.8.eval_results.json")
    with pytest.raises(DataError, match="these are two runs"):
        read_log(tmp_path / "verl", score="acc")
    found = by_prompt(read_log(tmp_path / "evalplus"))
    assert found.keys() == {"a_vllm_temp_0.8", "b_vllm_temp_0.8"}


def doubled(path: Path) -> bytes:
    """Return a file's content twice."""
    return path.read_bytes() * 2


def without_end(path: Path) -> bytes:
    """Return a file without its last line."""
    return b"".join(path.read_bytes().splitlines(keepends=True)[:-1])


def cut(path: Path) -> bytes:
    """Return a file without its last 40 bytes."""
    return path.read_bytes()[:-40]


def replaced(old: str, new: str) -> Any:
    """Return what gives a file's content with one text in place of another."""
    return lambda path: path.read_bytes().replace(old.encode(), new.encode())


DAMAGE = [
    (samples_of("sums"), {}, cut, "line 6: not JSON"),
    (samples_of("sums"), {}, doubled, "sample 0 of .* comes a second time"),
    (samples_of("choices"), {"score": "none"}, replaced("acc", "prob"), "prob,none or prob_norm,none"),
    (samples_of("choices"), {}, replaced('"metrics"', '"measures"'), "cannot be read as a log of lm_eval"),
    (VALIDATION / "0.jsonl", {}, replaced('"score": 1.0', '"score": Infinity'), "inf is not a finite number"),
    (VALIDATION / "0.jsonl", {}, replaced("It is 4.", r"\ud83d"), "a text with half a character"),
    (VALIDATION / "0.jsonl", {"score": "pred"}, Path.read_bytes, "'pred' is not one of them .score or reward or acc"),
    (HERE / "trl/run/completions/completions_00001.parquet", {"score": "vowels"}, cut, "cannot be read"),
    (HERE / "trl/run/completions/completions_00001.parquet", {}, Path.read_bytes, "short or vowels"),
    (VALIDATION / "0.jsonl", {}, replaced('"score": -1.0, "step": 0, "reward": -1.0', '"step": 0'), "is no score .acc"),
    (TRACES, {}, replaced('"version":1', '"version":2'), "line 1: the episode has no trace of format 1"),
    (TRACES, {}, lambda path: path.read_bytes() + replaced('"id":"r"', '"id":"s"')(path), "line 13: the run s begins"),
    (EVALPLUS, {}, cut, "cannot be read as a log of evalplus"),
    (EVALPLUS, {}, replaced('"base_status"', '"base"'), "KeyError: 'base_status'"),
    (GARAK, {"score": "always.Random"}, doubled, "holds 2 runs"),
    (GARAK, {"score": "always.Random"}, without_end, "cut off"),
    (GARAK, {"score": "always.Random"}, replaced('"fails": 3', '"fails": 99'), "cannot be read as a log of garak"),
    (GARAK, {}, Path.read_bytes, "always.Fail or always.Random"),
]


@pytest.mark.parametrize(("path", "options", "damage", "message"), DAMAGE)
def test_a_damaged_log_is_refused(path: Path, options: Any, damage: Any, message: str, tmp_path: Path) -> None:
    """Cut off, two runs in one file, another version's fields, no number, or one of several scores not named."""
    copy = tmp_path / path.name
    copy.write_bytes(damage(path))
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        read_log(copy, **options)
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize("damage", [doubled, without_end])
def test_lm_evals_results_tell_how_many_documents_there_are(damage: Any, tmp_path: Path) -> None:
    """A file without its last lines is whole to look at."""
    shutil.copytree(LM_EVAL, tmp_path / "run")
    path = tmp_path / "run" / samples_of("sums").name
    path.write_bytes(damage(path))
    with pytest.raises(DataError, match="of 6 documents; it is cut off, or holds two runs"):
        read_log(path)


def test_a_score_that_is_nan_is_none(tmp_path: Path) -> None:
    """It is not 0, and whoever measures says what becomes of it."""
    (tmp_path / "0.jsonl").write_bytes(replaced('"score": 1.0', '"score": NaN')(VALIDATION / "0.jsonl"))
    rewards = read_log(tmp_path).rows["reward"].to_pylist()
    assert rewards.count(None) == 4
    assert not any(reward is not None and math.isnan(reward) for reward in rewards)


def test_a_folder_has_the_logs_of_one_tool(tmp_path: Path) -> None:
    """Their rewards are of different kinds."""
    shutil.copy(TRACES, tmp_path)
    shutil.copy(GARAK, tmp_path)
    with pytest.raises(DataError, match=r"several tools: .*garak.*verifiers.*; give one"):
        read_log(tmp_path)


@pytest.mark.parametrize("name", ["rewards.jsonl", "rewards.csv", "rewards.json", "empty.jsonl", "missing.jsonl", "."])
def test_what_no_tool_wrote_is_no_log(name: str, tmp_path: Path) -> None:
    """A table, an empty file and folder, and a file that is not there are somebody else's to read."""
    rows = {
        "rewards.jsonl": '{"prompt": "a", "score": 1}\n',
        "rewards.csv": "prompt,score\na,1\n",
        "rewards.json": '[{"prompt": "a", "score": 1}]',
        "empty.jsonl": "",
    }
    if name in rows:
        (tmp_path / name).write_text(rows[name])
    assert read_log(tmp_path / name) is None
