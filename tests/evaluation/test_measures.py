"""Tables of rewards of any shape are read as their owner means them, and measured by model and by pairs of models."""

from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import written

from infalign import optimum, pass_at_k, read_rewards
from infalign.core.display import style
from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.intervals import Confidence, estimate_difference, estimate_share
from infalign.evaluation.measures import Measuring, measure, measure_all, over_k, paired_differences
from infalign.evaluation.pass_at_k import Metric
from infalign.evaluation.reward_tables import RewardTable, joined
from infalign.evaluation.table_files import Reading, read_reward_table
from infalign.report.measured import draw_measured

CORRECT = np.array([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], float)
ANSWERS = np.array([[3, 1, 2, 2, 1, 4], [5, 6, 5, 6, 7, 8], [1] * 6, [1, 2, 1, 1, 2, 1]])
RAGGED = [[0, 0, 1, 1], [0, 1, 0], [0, 0], [1, 1, 1, 1, 1]]


def rows_of(rewards: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return a row for each response of each model to each prompt."""
    return [
        {"prompt_id": f"p{number}", "model": name, "reward": value}
        for name, prompts in rewards.items()
        for number, responses in enumerate(prompts)
        for value in responses
    ]


def voted(correct: np.ndarray, answers: np.ndarray) -> float:
    """Return how often the answer that most give is right; of those with as many votes one at random."""
    given, votes = np.unique(answers, return_counts=True)
    return float(np.mean([correct[answers == answer].mean() for answer in given[votes == votes.max()]]))


def means(table: RewardTable, metric: str = "pass@1") -> dict[str, float]:
    """Return the metric of each model."""
    return {record["model"]: record["mean"] for record in measure(table, [metric])}


@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("kind", "of_set"),
    [
        ("pass@", lambda correct, _: correct.max()),
        ("pass^", lambda correct, _: correct.min()),
        ("avg@", lambda correct, _: correct.mean()),
        ("maj@", voted),
        ("best-of-", lambda correct, _: correct.max()),
        ("worst-of-", lambda correct, _: correct.min()),
    ],
)
def test_a_metric_is_the_mean_over_all_sets_of_k(kind: str, of_set: object, k: int) -> None:
    """By enumeration."""
    sets = [list(chosen) for chosen in combinations(range(6), k)]
    expected = [
        np.mean([of_set(correct[one], answers[one]) for one in sets])  # type: ignore[operator]
        for correct, answers in zip(CORRECT, ANSWERS, strict=True)
    ]
    assert Metric.parse(f"{kind}{k}").of_prompts(CORRECT, ANSWERS) == pytest.approx(expected)


def test_what_cannot_be_measured_is_named() -> None:
    """Too few responses, an unknown metric, and votes without answers."""
    with pytest.raises(DataError, match="pass@8 needs 8 responses per prompt, found 6"):
        Metric.parse("pass@8").of_prompts(CORRECT)
    with pytest.raises(ConfigError, match=r"unknown metric 'best@8'; known: pass@K, pass\^K"):
        Metric.parse("best@8")
    with pytest.raises(DataError, match="maj@2 needs a column answer"):
        Metric.parse("maj@2").of_prompts(CORRECT)
    rewards, given = [[1, 0], [1, 1]], [["4", "4"], ["5", "5"]]
    with pytest.raises(DataError, match="it is the right answer, not the responses'; choose: --columns answer=NAME"):
        measure(RewardTable.of(rewards, given), ["maj@2"])
    assert measure(RewardTable.of([[1, 1], [0, 0]], given), ["maj@2"])[0]["mean"] == pytest.approx(0.5)


def test_pass_at_k_of_prompts_with_different_numbers_of_responses() -> None:
    """1 − C(n − c, k)/C(n, k), a mean over prompts; graded rewards by a threshold."""
    expected = np.mean([1 - comb(n - c, 2) / comb(n, 2) for n, c in ((4, 2), (3, 1), (2, 0), (5, 5))])
    assert pass_at_k(RAGGED, 2).mean == pytest.approx(expected, abs=1e-15)
    graded = [[0.9 * reward + 0.05 for reward in row] for row in RAGGED]
    assert pass_at_k(graded, 2, threshold=0.5) == pass_at_k(RAGGED, 2)
    assert pass_at_k(np.eye(4), 1).mean == pytest.approx(0.25, abs=1e-15)
    with pytest.raises(DataError, match="pass@5 needs 5 responses per prompt, one has 4; measure gives bounds"):
        pass_at_k(np.eye(4), 5)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_models_in_one_file_are_measured_apart_and_compared_on_shared_prompts(ending: str, tmp_path: Path) -> None:
    """As on arrays; prompts that only one model has are counted."""
    rng = np.random.default_rng(0)
    rewards = {name: (rng.random((12, 4)) < rate).astype(int).tolist() for name, rate in (("a", 0.3), ("b", 0.6))}
    rewards["b"] = rewards["b"][:10]
    table = read_reward_table(written(tmp_path / f"t.{ending}", rows_of(rewards)))
    for record in measure(table, ["pass@2"]):
        values = Metric.parse("pass@2").of_prompts(rewards[record["model"]])
        expected = estimate_share(values)
        assert (record["mean"], record["low"], record["high"]) == pytest.approx(tuple(expected.as_dict().values()))
        assert (record["prompts"], record["fewest"], record["most"]) == (len(values), 4, 4)
    (pair,) = paired_differences(table, ["pass@2"])
    apart = [Metric.parse("pass@2").of_prompts(rewards[name][:10]) for name in "ba"]
    assert pair | estimate_difference(apart[0] - apart[1]).as_dict() == pytest.approx(pair)
    assert (pair["model"], pair["against"], pair["prompts"], pair["alone"]) == ("b", "a", 10, 2)
    of_one = {f"of {name}": RewardTable.of({name: rows}) for name, rows in rewards.items()}
    assert [one["model"] for one in measure(of_one, ["pass@2"])] == ["of a", "of b"]
    with pytest.raises(DataError, match="both has several models"):
        measure({"both": table}, ["pass@2"])


def test_the_columns_are_found_chosen_or_named(tmp_path: Path) -> None:
    """One other usual name is taken and said, two are refused, and what is ignored is named."""
    rows = rows_of({"a": RAGGED, "b": RAGGED[::-1]})
    rows = [{"problem": r["prompt_id"], "model": r["model"], "score": r["reward"], "temperature": 1} for r in rows]
    table = read_reward_table(written(tmp_path / "t.csv", rows))
    assert table.notes == (
        "prompt is read from column problem.",
        "reward is read from column score.",
        "Ignored columns: temperature.",
    )
    both = written(tmp_path / "two.csv", [row | {"task_id": 1} for row in rows])
    with pytest.raises(DataError, match="columns problem and task_id could be the prompt; choose: --columns prompt="):
        read_reward_table(both)
    chosen = read_reward_table(both, Reading({"prompt": "problem", "model": "temperature"}))
    assert list(means(chosen)) == ["1"]
    words = ("win-rate", "--policy", tmp_path / "t.csv", "--base", tmp_path / "t.csv", "--procedure", "standard")
    assert "50.0" in micro.answer(*words, "--columns", "prompt=problem,reward=score,model=temperature")
    with pytest.raises(DataError, match="no column grade for reward; there are problem, model, score, temperature"):
        read_reward_table(tmp_path / "t.csv", Reading({"reward": "grade"}))
    with pytest.raises(DataError, match="results are by model already"):
        measure(chosen, ["pass@1"], Measuring(by="model"))
    with pytest.raises(DataError, match="no column topic; there are problem, model, score, temperature"):
        read_reward_table(tmp_path / "t.csv", Reading(keep=["topic"]))
    with pytest.raises(ConfigError, match="unknown role 'rewrad' of a column; known: prompt, reward, model"):
        read_reward_table(tmp_path / "t.csv", Reading({"rewrad": "score"}))


def test_of_many_columns_the_first_are_named(tmp_path: Path) -> None:
    """A table of a thousand columns does not fill the terminal, whether it can be read or not."""
    rows = [{"prompt_id": p, "llm": "m", "reward": 1} | {f"c{i}": 0 for i in range(1000)} for p in "ab"]
    table = read_reward_table(written(tmp_path / "t.csv", rows))
    assert table.models.names == ["m"]
    assert table.notes[-1].endswith("c10, c11 and 988 more.")
    with pytest.raises(DataError, match=r"no column grade for reward; there are prompt_id, .* and 991 more$"):
        read_reward_table(tmp_path / "t.csv", Reading({"reward": "grade"}))
    for row in rows:
        del row["prompt_id"]
    with pytest.raises(DataError, match=r"no column prompt; there are .* and 990 more; choose one"):
        read_reward_table(written(tmp_path / "u.csv", rows))


def test_a_prompt_with_an_empty_list_of_rewards_has_none(tmp_path: Path) -> None:
    """It does not vanish: it is refused as a missing reward is, or counted among those left out."""
    given = zip("abc", ([1], [], [0]), strict=True)
    rows = [{"prompt_id": name, "reward": rewards, "length": len(rewards) or None} for name, rewards in given]
    file = written(tmp_path / "t.jsonl", rows)
    with pytest.raises(DataError, match=r"line 2: column reward is missing or empty.*--missing omit leaves it out"):
        read_reward_table(file)
    table = read_reward_table(file, Reading(missing="omit"))
    assert table.notes == ("1 of 3 samples have no reward and are left out.",)


def test_a_row_may_hold_all_samples_of_a_prompt_or_all_models(tmp_path: Path) -> None:
    """A list of rewards, columns of samples, or a column for each model give the table of one row per response."""
    expected = {"a": np.mean([np.mean(row) for row in RAGGED])}
    lists = [{"prompt_id": f"p{i}", "model": "a", "epoch": 0, "reward": row} for i, row in enumerate(RAGGED)]
    for ending in ("jsonl", "parquet"):
        assert means(read_reward_table(written(tmp_path / f"lists.{ending}", lists))) == pytest.approx(expected)
    wide = [{"prompt_id": i, "epoch": 0, "s1": i % 2, "s2": 1} for i in range(4)]
    table = read_reward_table(written(tmp_path / "wide.csv", wide), Reading({"reward": "s[0-9]"}))
    assert means(table) == {"wide": 0.75}
    assert means(read_reward_table(tmp_path / "wide.csv", Reading({"model": "s?"}))) == {"s1": 0.5, "s2": 1.0}


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_words_and_booleans_are_rewards(ending: str, tmp_path: Path) -> None:
    """C and I, passed and failed, true and false are 1 and 0, and the words are said."""
    for right, wrong in (("C", "I"), ("passed", "failed"), (True, False)):
        rows = rows_of({"a": [[1, 0], [1, 1]]})
        file = written(tmp_path / f"t.{ending}", [row | {"reward": right if row["reward"] else wrong} for row in rows])
        table = read_reward_table(file)
        assert means(table) == {"a": 0.75}
        assert (f"{right} is 1" in " ".join(table.notes)) == isinstance(right, str)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_missing_reward_is_refused_left_out_or_wrong(ending: str, tmp_path: Path) -> None:
    """Never 0 in silence; the choice is noted with the number of samples."""
    rows = rows_of({"a": [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]})
    rows[1]["reward"] = "" if ending == "csv" else None
    file = written(tmp_path / f"t.{ending}", rows)
    with pytest.raises(DataError, match="column reward is missing or empty"):
        read_reward_table(file)
    for missing, mean, said in (("omit", (1 / 2 + 1 / 3) / 2, "are left out"), ("wrong", 1 / 3, "count as wrong")):
        table = read_reward_table(file, Reading(missing=missing))  # type: ignore[arg-type]
        assert means(table)["a"] == pytest.approx(mean)
        assert table.notes == (f"1 of 6 samples have no reward and {said}.",)


def test_what_must_not_be_pooled_is_refused(tmp_path: Path) -> None:
    """A sample that occurs twice, and several steps of a run, unless a column tells them apart."""
    rows = [{"prompt_id": p, "epoch": e, "reward": 1} for p in "ab" for e in range(2)]
    twice = written(tmp_path / "twice.csv", [*rows, rows[2]])
    with pytest.raises(DataError, match="prompt 'b' has sample 0 more than once; if the file holds several runs"):
        read_reward_table(twice)
    index = written(tmp_path / "index.csv", [{"prompt": "a", "index": 7, "reward": r} for r in (0, 1)])  # of whatever
    assert read_reward_table(index).numbers["reward"].size == 2
    steps = written(tmp_path / "steps.jsonl", [row | {"step": step} for step in (10, 20) for row in rows])
    with pytest.raises(DataError, match=r"column step has several values for a prompt.*--columns model=step"):
        read_reward_table(steps)
    assert means(read_reward_table(steps, Reading({"model": "step"}))) == {"10": 1.0, "20": 1.0}
    kept = read_reward_table(steps, Reading({"model": "step"}, ["step"]))
    assert [record["part"] for record in measure(kept, ["pass@1"], Measuring(by="step"))] == ["10", "20"]
    later = [{"prompt_id": "a", "reward": 1}, {"prompt_id": "a", "reward": 0, "model": "m"}]  # a column of later rows
    with pytest.raises(DataError, match="has no model, but others have one"):
        read_reward_table(written(tmp_path / "later.jsonl", later))
    some = written(tmp_path / "some.csv", [row | {"family": "f" * (place > 0)} for place, row in enumerate(rows)])
    for how in (Measuring(by="family"), Measuring(cluster="family")):
        with pytest.raises(DataError, match="column family is empty in 1 of 4 rows"):
            measure(read_reward_table(some, Reading({}, ["family"])), ["pass@1"], how)


def test_several_files_are_one_table_whose_models_keep_apart(tmp_path: Path) -> None:
    """Without a model column the file is the model; models of one name get their file's name in front."""
    bare = [{key: row[key] for key in ("prompt_id", "reward")} for row in rows_of({"m": RAGGED})]
    files = [written(tmp_path / f"{name}.csv", bare) for name in ("before", "after")]
    table = joined([read_reward_table(file) for file in files])
    assert list(means(table)) == ["before", "after"]
    named = [written(tmp_path / f"{name}.jsonl", rows_of({"m": RAGGED})) for name in ("before", "after")]
    assert list(means(joined([*map(read_reward_table, named)]))) == ["before: m", "after: m"]
    with pytest.raises(DataError, match="two files or folders of one name have the model before"):
        joined([read_reward_table(files[0])] * 2)


def test_prompts_are_measured_by_a_column_and_against_a_model(tmp_path: Path) -> None:
    """Each value of a column apart; of many models each against one."""
    rows = rows_of(dict.fromkeys("abc", RAGGED))
    rows = [row | {"subject": "x" if row["prompt_id"] in ("p0", "p1") else "y"} for row in rows]
    table = read_reward_table(written(tmp_path / "t.jsonl", rows), Reading(keep=["subject"]))
    how = Measuring(by="subject", confidence=Confidence(0.9))
    found = measure(table, ["pass@1"], how)
    assert [(r["part"], r["model"]) for r in found] == [(part, model) for part in "xy" for model in "abc"]
    assert found[0]["mean"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    pairs = paired_differences(table, ["pass@1"], against="b")
    assert [(r["model"], r["against"], r["mean"]) for r in pairs] == [("a", "b", 0.0), ("c", "b", 0.0)]
    with pytest.raises(ConfigError, match="no model is named 'd'; the table has a, b, c"):
        paired_differences(table, ["pass@1"], against="d")
    with pytest.raises(ConfigError, match="'model' is the only model of the table"):
        measure_all(RewardTable.of([[1], [0]]), ["pass@1"], Measuring(), "model")
    assert over_k(table) == over_k(table, how=how) == ["pass@1", "pass@2"]
    with pytest.raises(DataError, match="prompt_id p0: an interval needs at least 2 prompts, found 1"):
        measure(replace(table, columns={"prompt_id": table.prompts}), ["pass@1"], Measuring(by="prompt_id"))


def test_a_table_of_graded_rewards_has_one_unit_in_all_its_parts(tmp_path: Path) -> None:
    """Also in a part whose rewards happen to be 0 and 1, which would be shown in percent."""
    rows = rows_of({"a": [[0, 1], [1, 1], [0.5, 3], [0, 2]]})
    rows = [row | {"subject": "x" if row["prompt_id"] in ("p0", "p1") else "y"} for row in rows]
    table = read_reward_table(written(tmp_path / "t.jsonl", rows), Reading(keep=["subject"]))
    found = measure(table, ["best-of-2"], Measuring(by="subject"))
    assert [(one["unit"], one["mean"]) for one in found] == [("reward", 1.0), ("reward", 2.5)]


def test_rewards_by_prompt_are_what_a_law_takes(tmp_path: Path) -> None:
    """Sorted, of one model."""
    table = read_reward_table(written(tmp_path / "t.jsonl", rows_of({"a": [[3, 1, 2], [0, 5]], "b": [[1], [1]]})))
    with pytest.raises(DataError, match="has the models a, b; take the rows of one"):
        table.rewards_by_prompt()
    one = (own := table.take(table.models.codes == 0)).rewards_by_prompt()
    assert {prompt: row.tolist() for prompt, row in one.items()} == {"p0": [1, 2, 3], "p1": [0, 5]}
    for given in (one, own, iter(one.values())):
        law = optimum(given, "best-of-2", kl=0.05, objective="reward")
        assert [row.tolist() for row in law.rewards_PK] == [[1, 2, 3], [0, 5]]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]  # one prompt, two rewards
    path = written(tmp_path / "c.jsonl", [{"prompt": chat, "reward": [1, 0]}])
    assert [*map(list, read_reward_table(path))] == [[0, 1]]


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        (["", None, float("nan"), "7", "  "], [0, 0, 0, 1, 0]),  # no answer is no vote and agrees with nobody
        (["1", "1.0", "2", "02", "1e0"], [1, 1, 0, 0, 1]),  # numbers compare as numbers
        (["1", "1.0", "1", "x", ""], [1, 0, 1, 0, 0]),  # among text they are text
        ([" a", "a ", "b", "B", None], [1, 1, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_majority_counts_answers_only(answers: list[object], right: list[int], k: int) -> None:
    """Against all sets of k: those without any answer are not right."""
    text = [None if a is None or a != a else str(a).strip() for a in answers]
    numeric = "x" not in text and "a" not in text
    keys = np.array([np.nan if not t else float(t) if numeric else hash(t) for t in text])
    expected = []
    for one in map(list, combinations(range(5), k)):
        said = [i for i in one if not np.isnan(keys[i])]
        expected.append(voted(np.array(right)[said], keys[said]) if said else 0.0)
    found = measure(RewardTable.of([right, right], [answers, answers]), [f"maj@{k}"])[0]
    assert found["mean"] == pytest.approx(np.mean(expected), abs=1e-12)


@pytest.mark.parametrize("metric", ["pass@2048", "pass^2048", "avg@4096", "pass@4096"])
def test_large_numbers_of_responses_are_exact(metric: str) -> None:
    """Of 4,096 responses all but one are right: C(4095, k)/C(4096, k) = 1 − k/4096 of all sets are right as a whole."""
    k = int(metric[5:])
    share = 1.0 - k / 4096 if metric.startswith("pass^") else 1.0 - (metric.startswith("avg")) / 4096
    found = measure([np.arange(4096) > 0] * 2, [metric])[0]
    assert found["mean"] == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(
    ("rewards", "threshold", "said"),
    [
        ([[0.5, 1.0]] * 2, None, "not all 0 or 1; give the threshold"),
        ([[1.0, np.nan], [0, 1]], 0.5, "one or more finite rewards for each prompt"),
        ([[1, 0], [np.inf, 1]], 0.5, "one or more finite rewards for each prompt"),
        ([[], [1]], None, "one or more finite rewards for each prompt"),
        ([], None, "one or more finite rewards for each prompt"),
        ([[1]], None, "at least 2 prompts, found 1"),
        ({"a": [[1], [0]], "b": [[1], [1]]}, None, "the rewards are of 2 models; give those of one"),
        ([[1, 0], [0, 1]], np.nan, "the threshold must be finite, found nan"),
        ([[1, 0], [0, 1]], np.inf, "the threshold must be finite, found inf"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(rewards: Any, threshold: float | None, said: str) -> None:
    """NaN and infinity pass no comparison silently, and nothing there is an error."""
    with pytest.raises((ConfigError, DataError), match=said):
        pass_at_k(rewards, 1, threshold=threshold)
    with pytest.raises(DataError, match="an answer, or None, for each reward"):
        RewardTable.of(RAGGED, [[1]])


def test_a_table_that_a_dictionary_shrinks_is_read(tmp_path: Path) -> None:
    """Texts are numbers to it, so long names of a million rows are no bomb; to find that it is no log costs nothing."""
    prompts = pa.DictionaryArray.from_arrays(np.arange(1_500_000, dtype=np.int32) // 750_000, ["p" * 100, "q" * 100])
    pq.write_table(pa.table({"prompt_id": prompts, "reward": np.ones(1_500_000, np.int8)}), tmp_path / "t.parquet")
    table = read_rewards(tmp_path / "t.parquet")
    assert (table.prompts.names, table.numbers["reward"].sum()) == (["p" * 100, "q" * 100], 1_500_000)


def test_a_figure_marks_what_is_claimed_beyond_the_samples() -> None:
    """The line with markers ends at the samples; a dotted one goes on to what a model claims, a band over bounds."""
    found = measure([[0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], [f"pass@{k}" for k in (1, 2, 4, 8, 16)])
    with style():
        (axes,) = draw_measured({"metrics": found, "differences": []}).axes
    dotted, measured = axes.lines
    assert (list(measured.get_xdata()), dotted.get_linestyle()) == ([1, 2, 4], ":")
    assert list(np.isfinite(np.asarray(dotted.get_ydata()))) == [True] * 4 + [False]
    assert "claims for more responses than there are" in axes.get_xlabel()
