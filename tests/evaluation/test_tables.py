"""Anybody's tables: what is read, what is refused with its place, and what comes out."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from rows import written

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.intervals import estimate
from infalign.evaluation.length import length_controlled
from infalign.evaluation.samples import Samples
from infalign.evaluation.table_files import read_reward_table
from infalign.evaluation.tables import compare_tables, pair, print_comparison
from infalign.evaluation.win_rates import rewind_draws, tie_rate, win_rates_of
from infalign.method.procedures import BestOfN, RewindAndRepeat


def write(path: Path, columns: dict[str, list]) -> Path:
    """Write columns as Parquet, CSV or JSONL, as the ending says."""
    return written(path, pa.table(columns).to_pylist())


def columns(samples: Samples, *, judge: bool = True, lengths: bool = True, prefix: str = "prompt ") -> dict[str, list]:
    """Return the table of ``samples``, its rows in a random order."""
    prompts, count = samples.selected.shape
    order = np.random.default_rng(prompts).permutation(prompts * count)
    found = {
        "prompt_id": [f"{prefix}{i // count}" for i in order],
        "response": [f"one, two\nand {i}" for i in order],
        "reward": samples.selected.ravel()[order].tolist(),
    }
    if judge:
        found["judge_reward"] = samples.judged.ravel()[order].tolist()
    if lengths and samples.lengths is not None:
        found["length"] = samples.lengths.ravel()[order].tolist()
    return found


def pair_of(models: tuple[Samples, Samples], folder: Path, ending: str = "parquet", **options: bool) -> list[Path]:
    """Write the tables of a policy and its base."""
    return [write(folder / f"{n}.{ending}", columns(side, **options)) for n, side in zip("pb", models, strict=True)]


def drawn(prompts: int, samples: int, seed: int, shift: float = 0.0) -> Samples:
    """Return samples with a judge that agrees partly, ties and lengths."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(shift, 1, size=(2, prompts, samples)).round(1)
    return Samples(rewards[0], rewards.sum(axis=0), rng.integers(10, 90, size=(prompts, samples)))


def compare(policy: Path, base: Path, procedures: list[str], *, common: bool = False, **options: Any) -> Any:
    """Return the records of two files."""
    return compare_tables(
        pair(read_reward_table(policy), read_reward_table(base), common_prompts=common), procedures, **options
    )


@pytest.fixture(scope="module")
def models() -> tuple[Samples, Samples]:
    """Return samples of a policy and a base."""
    return drawn(30, 8, 0, shift=0.5), drawn(30, 12, 1)


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "jsonl.gz"])
def test_a_table_of_any_kind_has_the_numbers_of_its_arrays(ending: str, models: Any, tmp_path: Path) -> None:
    """Rows in any order and format give what the estimators give on the arrays, for every procedure."""
    policy, base = models
    paths = pair_of(models, tmp_path, ending)
    best, rewind = compare(*paths, ["best-of-4", "rewind:0.5:4"], confidence=0.9)
    # Prompts come in the order of the policy's table, on which the resampling depends.
    order = [int(p.split()[1]) for p in dict.fromkeys(columns(policy)["prompt_id"])]
    expected = estimate(win_rates_of(policy, base, [BestOfN(4)])[0, order], confidence=0.9)
    assert (best["win_rate"], best["low"], best["high"]) == pytest.approx((expected.mean, expected.low, expected.high))
    controlled = estimate(length_controlled([models], BestOfN(4))[order], confidence=0.9)
    assert best["length_controlled"] == pytest.approx(controlled.as_dict())
    assert best["ties"] == pytest.approx(tie_rate(policy, base).mean())
    assert 0.01 < best["ties"] < 0.1
    assert best | {"prompts": 30, "policy_samples": 8, "base_samples": 12, "judge": "judge_reward"} == best
    assert (best["draws"], best["notes"], best["base_procedure"]) == ({}, [], "best-of-4")
    procedure = RewindAndRepeat(0.5, 4)  # the table's halves are others than the array's
    assert rewind["win_rate"] == pytest.approx(win_rates_of(policy, base, [procedure]).mean(), abs=0.06)
    assert rewind["draws"]["policy"]["mean"] == pytest.approx(rewind_draws(policy, base, procedure).mean(), abs=0.2)
    assert rewind["draws"]["base"]["mean"] == pytest.approx(rewind_draws(base, base, procedure).mean(), abs=0.2)
    assert json.loads(json.dumps([best, rewind])) == [best, rewind]


def test_a_table_sorted_by_reward_gives_rewind_an_honest_threshold(tmp_path: Path) -> None:
    """Sorting rows by reward does not change what Rewind-and-Repeat wins and draws beyond noise."""
    base = np.sort(np.random.default_rng(0).random((400, 24)))
    path = write(tmp_path / "b.parquet", columns(Samples(base, base), judge=False))
    ordered = {"prompt_id": [f"prompt {i // 24}" for i in range(base.size)], "reward": base.ravel().tolist()}
    (row,) = compare(path, write(tmp_path / "s.parquet", ordered), ["rewind:0.75:8"])
    assert row["win_rate"] == pytest.approx(0.5, abs=0.05)  # 3 errors
    assert row["draws"]["base"]["mean"] == pytest.approx((1 - 0.75**8) / 0.25, rel=0.05)


def test_without_a_judge_the_reward_judges(models: tuple[Samples, Samples], tmp_path: Path) -> None:
    """Without judge_reward the selecting reward judges and the record says so; without lengths the notes do."""
    paths = pair_of(models, tmp_path, judge=False, lengths=False)
    (row,) = compare(*paths, ["best-of-2"], base_procedure="standard")
    plain = [Samples(side.selected, side.selected) for side in models]
    assert row["win_rate"] == pytest.approx(win_rates_of(*plain, [BestOfN(2)], [BestOfN(1)]).mean())
    assert (row["judge"], row["base_procedure"], row["length_controlled"]) == ("reward", "standard", None)
    assert len(row["notes"]) == 1
    assert "no column length in" in row["notes"][0]


def test_prompts_may_have_different_numbers_of_samples(tmp_path: Path) -> None:
    """Every prompt counts once, whatever its number of samples, and the fewest are reported."""
    small, large = drawn(10, 4, 2, shift=0.4), drawn(15, 9, 3, shift=0.4)
    base_small, base_large = drawn(10, 6, 4), drawn(15, 5, 5)
    tables = [
        {name: one + columns(two, prefix="other ")[name] for name, one in columns(small_one).items()}
        for small_one, two in ((small, large), (base_small, base_large))
    ]
    paths = [write(tmp_path / f"{n}.parquet", table) for n, table in zip("pb", tables, strict=True)]
    (row,) = compare(*paths, ["best-of-3"])
    blocks = [(small, base_small), (large, base_large)]
    each = np.concatenate([win_rates_of(*block, [BestOfN(3)])[0] for block in blocks])
    assert (row["prompts"], row["policy_samples"], row["base_samples"]) == (25, 4, 5)
    assert row["win_rate"] == pytest.approx(each.mean())
    assert row["length_controlled"]["mean"] == pytest.approx(length_controlled(blocks, BestOfN(3)).mean())
    with pytest.raises(DataError, match=r"prompt 'prompt \d': best-of-5 cannot be estimated from 4 samples"):
        compare(*paths, ["best-of-5"])


def test_prompts_of_one_table_only_are_an_error_or_counted(models: tuple[Samples, Samples], tmp_path: Path) -> None:
    """Prompts on one side only are named; with common_prompts they are left out and counted."""
    policy, base = models
    paths = [write(tmp_path / "p.csv", columns(policy)), write(tmp_path / "b.csv", columns(drawn(25, 12, 1)))]
    said = r"5 prompts are only in .*p.csv, such as 'prompt 2\d'; .*the 25 prompts in both"
    with pytest.raises(DataError, match=said):
        compare(*paths, ["standard"])
    (row,) = compare(*paths, ["standard"], common=True)
    assert (row["prompts"], row["policy_only_prompts"], row["base_only_prompts"]) == (25, 5, 0)
    other = write(tmp_path / "o.csv", columns(base, prefix="another "))
    with pytest.raises(DataError, match="no prompts in common"):
        compare(paths[0], other, ["standard"], common=True)


def test_whole_numbers_and_text_name_the_same_prompts(tmp_path: Path) -> None:
    """Ids are compared as text: 7 in Parquet or JSONL is 7 in CSV, and 07 is another prompt."""
    rewards = [0.0, 1.0, 2.0, 3.0]
    whole = write(tmp_path / "a.parquet", {"prompt_id": [7, 7, 8, 8], "reward": rewards})
    line = write(tmp_path / "b.jsonl", {"prompt_id": [7, 7, 8, 8], "reward": rewards})
    text = write(tmp_path / "c.csv", {"prompt_id": ["7", "7", "8", "8"], "reward": rewards})
    category = pa.table({"prompt_id": pa.array(["7", "7", "8", "8"]).dictionary_encode(), "reward": rewards})
    pq.write_table(category, tmp_path / "d.parquet")
    for path in (whole, line, text, tmp_path / "d.parquet"):
        assert compare(path, whole, ["standard"])[0]["win_rate"] == 0.5
    padded = write(tmp_path / "e.csv", {"prompt_id": ["07", "07", "8", "8"], "reward": rewards})
    with pytest.raises(DataError, match="such as '07'"):
        compare(padded, whole, ["standard"])


def test_the_precision_of_a_file_does_not_decide_ties(tmp_path: Path) -> None:
    """Rewards stored as float32 tie with the same rewards in float64 or as text; decimals too."""
    ids, values = ["a", "a", "b", "b"], [0.1, 0.7, 0.2, 0.3]
    double = write(tmp_path / "a.csv", {"prompt_id": ids, "reward": values})
    for number, kind in enumerate((pa.float32(), pa.float64(), pa.decimal128(5, 2))):
        single = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"prompt_id": ids, "reward": pa.array(values).cast(kind)}), single)
        (row,) = compare(single, double, ["standard"])
        assert (row["win_rate"], row["ties"]) == (0.5, 0.5)
    whole = write(tmp_path / "w.parquet", {"prompt_id": ids, "reward": [0, 1, 0, 1]})
    assert compare(whole, double, ["standard"])[0]["win_rate"] == 0.5


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize(("name", "value"), [("reward", np.nan), ("judge_reward", np.inf), ("length", -np.inf)])
def test_a_number_that_is_not_finite_is_refused_with_its_place(
    ending: str, value: float, name: str, tmp_path: Path
) -> None:
    """NaN and infinities are named by file, row, prompt and column in every format."""
    table = {"prompt_id": ["a", "a", "b"]} | {n: [1.0, 2.0, 3.0] for n in ("reward", "judge_reward", "length")}
    path = write(tmp_path / f"t.{ending}", table | {name: [1.0, value, 3.0]})
    row = {"parquet": "row 1", "csv": "line 3", "jsonl": "line 2"}[ending]
    message = rf"t.{ending} {row}, prompt 'a': {name} is -?(nan|inf), which cannot be ranked"
    with pytest.raises(DataError, match=message):
        read_reward_table(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_id,reward\na,1\na,good\n", "t.csv line 3, prompt 'a': reward is 'good'; it must be a number"),
        ("prompt_id,reward\na,1\na,NA\n", "line 3, prompt 'a': reward is 'NA'; it must be a number"),
        ("prompt_id,reward\na,\n", "line 2: column reward is missing or empty"),
        ("prompt_id,reward\na,1\n,2\n", "line 3: column prompt_id is missing or empty"),
        ("id,reward\na,1\n", "t.csv: no column prompt; there are id, reward; choose one"),
        ("prompt_id,reward,length\na,1,\nb,2,9\n", "line 2: column length is missing or empty, but other rows"),
        ('{"prompt_id": "a", "reward": "0.5"}', "line 1, prompt 'a': reward is '0.5'; it must be a number"),
        ("prompt_id,reward\na,85%\n", "reward is '85%'; it must be a number, such as 0.85 for 85%"),
        (f'{{"prompt_id": "a", "reward": {10**400}}}', "line 1, prompt 'a': reward is inf, which cannot be"),
        ("prompt_id,reward,reward\na,1,-1\n", "the name 'reward' occurs twice"),
        (f"prompt_id,reward\na,{2**53 + 1}\n", f"line 2, prompt 'a': reward is {2**53 + 1}, which a float cannot"),
        (f'{{"prompt_id": "a", "reward": {-(2**53) - 1}}}', "line 1, prompt 'a': reward is -900719925474"),
        ('{"prompt_id": "a", "reward": 1}\n{"prompt_id": "a"}', "line 2: column reward is missing"),
        ("{}", "t.jsonl: no column prompt; there are none; choose one"),
        ('{"prompt_id": 1.5, "reward": 1}', "line 1, prompt 1.5: prompt_id is of type float"),
        ('{"prompt": [{"role": "boss", "content": "a"}], "reward": 1}', "line 1: message 1 of prompt: the role must"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    """What is no number, absent or damaged is named by file, row and column."""
    table = tmp_path / ("t.jsonl" if text.startswith("{") else "t.csv")
    table.write_text(text)
    with pytest.raises(DataError, match=message):
        read_reward_table(table)
    with pytest.raises(DataError, match="does not exist"):
        read_reward_table(tmp_path / "absent.parquet")
    spelled = write(tmp_path / "text.parquet", {"prompt_id": ["a"], "reward": ["0.5"]})  # a column of text is no number
    with pytest.raises(DataError, match=r"text.parquet row 0, prompt 'a': reward is '0.5'; it must be a number"):
        read_reward_table(spelled)


def test_a_judge_on_one_side_only_is_an_error(models: tuple[Samples, Samples], tmp_path: Path) -> None:
    """One table with a judge and one without cannot be compared by either."""
    policy, base = models
    paths = write(tmp_path / "p.parquet", columns(policy)), write(tmp_path / "b.parquet", columns(base, judge=False))
    with pytest.raises(DataError, match=r"p.parquet has the column judge_reward, .*b.parquet does not"):
        compare(*paths, ["standard"])


def test_what_cannot_be_estimated_is_an_error_or_a_note(tmp_path: Path) -> None:
    """One prompt has no interval; where all pairs tie, or all are won, the notes say what the numbers do not mean."""
    single = write(tmp_path / "s.csv", {"prompt_id": ["a", "a"], "reward": [1.0, 2.0]})
    with pytest.raises(DataError, match="at least 2 prompts, found 1"):
        compare(single, single, ["standard"])
    with pytest.raises(ConfigError, match="unknown procedure"):
        compare(single, single, ["best"])
    ids = ["a", "a", "b", "b"]
    tied = write(tmp_path / "t.csv", {"prompt_id": ids, "reward": [5.0] * 4, "length": [1, 2, 3, 9]})
    (row,) = compare(tied, tied, ["best-of-2", "best-of-02"])
    assert (row["win_rate"], row["low"], row["high"], row["ties"]) == (0.5, 0.5, 0.5, 1.0)
    assert row["length_controlled"]["mean"] == pytest.approx(0.5)
    assert [note[:36] for note in row["notes"]] == ["every prompt has the same win rate, "]
    better = write(tmp_path / "w.csv", {"prompt_id": ids, "reward": [9.0] * 4, "length": [2, 1, 9, 3]})
    (row,) = compare(better, tied, ["best-of-2"])
    assert (row["win_rate"], row["length_controlled"]) == (1.0, None)
    assert any("the policy wins every served pair" in note for note in row["notes"])


def test_the_printed_table_has_every_number_and_note(models: tuple[Samples, Samples], tmp_path: Path) -> None:
    """Win rates, draws, counts and notes appear for each procedure, a note that all share once."""
    paths = pair_of(models, tmp_path, "csv", lengths=False)
    rows = compare(*paths, ["best-of-4", "rewind:0.5:4"])
    console = Console(width=110, file=io.StringIO())
    print_comparison(rows, console)
    text = console.file.getvalue()
    for row in rows:
        assert f"{100 * row['win_rate']:.1f} ({100 * row['low']:.1f}–{100 * row['high']:.1f})" in text
    assert f"policy {rows[1]['draws']['policy']['mean']:.1f}" in text
    assert "30 prompts × 8 policy and 12 base samples, 95% intervals" in text
    assert text.count("no column length") == 1
    assert "best-of-4, rewind:0.5:4: no length-controlled" in text
