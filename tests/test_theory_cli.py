"""Theory on the command line: known answers as JSON, exit codes, readable figures, files that recipes accept."""

import json
from pathlib import Path
from typing import Any

import pytest
from micro import answer, given, refusal, write

from infalign.method.transforms import Tabulated, parse_transform
from infalign.recipe.reading import load_recipe
from infalign.theory.law import law_at_kl


@pytest.mark.parametrize(
    ("procedure", "win_rates"),
    [
        ("best-of-4", {"identity": 0.8770, "log": 0.8631, "exp:5": 0.9192, "exp:10": 0.9351, "optimal": 0.9411}),
        ("worst-of-4", {"identity": 0.9745, "log": 0.9859, "exp:-10": 0.9927, "optimal": 0.9929}),
    ],
)
def test_win_rates_at_one_nat(procedure: str, win_rates: dict[str, float]) -> None:
    """Transformations at two budgets give a list, in the order asked for, with the known win rates."""
    words = [word for name in win_rates for word in ("--transform", name)] + ["--kl", "0.5", "--kl", "1"]
    points = json.loads(answer("curve", "--procedure", procedure, *words, "--base", procedure, "--json"))
    assert [(p["transform"], round(p["kl"], 9)) for p in points] == [(n, kl) for n in win_rates for kl in (0.5, 1.0)]
    assert [p["win_rate"] for p in points[1::2]] == pytest.approx(list(win_rates.values()), abs=5e-5)
    assert all(point["error"] < 1e-8 and point["base"] == procedure for point in points)


def test_the_table_has_win_rates_draws_and_errors() -> None:
    """Without --json a table in per cent; Rewind-and-Repeat adds its draws and what the base draws."""
    out = answer("curve", "--procedure", "best-of-4", "--transform", "exp:10", "--kl", 1)
    assert ("93.51" in out, "5315.3" in out, "error" in out) == (True, True, False)
    out = answer("curve", "--procedure", "rewind:0.85:32", "--transform", "identity", "--kl", 1)
    assert "rewind:0.85:32 against the base policy served alike" in out
    assert "The base policy needs 6.63 samples." in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("curve --procedure best-of-4 --transform log --kl -1", "must be positive and finite, found -1.0"),
        ("curve --procedure best-of-4 --transform identity --beta 1e-320", "beta = 9.99989e-321 is too small"),
        ("curve --procedure best-of-4 --transform log --kl 1 --beta 1", "--kl, --beta or --sweep"),
        ("curve --procedure best-of-4 --kl 1", "--transform"),
        ("choose --procedure best-of-4 --kl 50 --rollouts 100", "100 rollouts cannot spend a KL of 50.0 nats"),
        ("choose --procedure best-of-4 --kl 1 --rollouts 9 --output x.yaml", "must end in .json"),
        ("choose --procedure best-of-4 --kl 1 --rollouts 9 --output absent/x.json", "the folder absent does not exist"),
    ],
)
def test_a_wrong_question_is_one_sentence_and_exit_code_2(line: str, said: str) -> None:
    """What cannot be answered is said in one line of stderr, and stdout stays empty."""
    assert said in refusal(*line.split())


@pytest.mark.parametrize("procedure", ["best-of-32", "worst-of-4"])
def test_what_is_chosen_can_be_trained_with(tmp_path: Path, procedure: str) -> None:
    """The file has the law of the recommended transformation at the budget that is given, and a recipe accepts it."""
    file = tmp_path / "best.json"
    words = ("--procedure", procedure, "--kl", 0.5, "--rollouts", 60, "--output", file, "--json")
    ranking = json.loads(answer("choose", *words))
    best = ranking["recommended"]
    assert 0.9 < best["memorizing"] < best["generalizing"]
    assert best["transform"] in [c["transform"] for c in ranking["candidates"] if c["ties"]]
    table = parse_transform(str(file))
    assert table.name == best["transform"]
    law = law_at_kl(table, kl=0.5)
    assert law.win_rate(procedure) == pytest.approx(best["limit"], abs=1e-8)
    policy = {"transform": str(file), "kl_budget": ranking["kl"]}
    settings = given(tmp_path / "run", str(tmp_path)) | {"policies": {"aware": policy}}
    read_back = load_recipe(write(tmp_path / "recipe.yaml", settings)).policies["aware"]
    named = str(file) if isinstance(table, Tabulated) else table.name
    assert (read_back.transformation, read_back.budget) == (named, 0.5)


def test_choose_prints_what_to_write_into_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table ends with two lines for a recipe; no file unasked; Rewind-and-Repeat says what is missing."""
    monkeypatch.chdir(tmp_path)
    out = answer("choose", "--procedure", "best-of-4", "--kl", 0.5, "--rollouts", 4)
    words = ("\n  transform: exp:", "\n  kl_budget: 0.5", "2000 simulated prompts", "memorizes", "generalizes")
    assert [word for word in (*words, "exact ranks") if word not in out] == []
    assert "beta:" not in out
    out = answer("choose", "--procedure", "rewind:0.85:4", "--kl", 0.5, "--rollouts", 100)
    assert "a policy that memorizes ranks is not known" in out
    assert "Recommended: optimal:rewind:0.85:4" in out
    assert "This transformation has no name: write it to a file with --output FILE.json." in out
    assert not list(tmp_path.iterdir())


def test_a_transformation_that_fails_does_not_hide_the_others(main: Any) -> None:
    """The points of the others are printed, each failure is a line of stderr, and the exit code is the last one's."""
    words = [word for name in ("exp:-500", "identity", "exp:-400") for word in ("--transform", name)]
    code, out, err = main("curve", "--procedure", "best-of-4", *words, "--kl", 600, "--json")
    assert code == 2
    assert json.loads(out)["transform"] == "identity"
    for line, name in zip(err.splitlines(), ("exp:-500", "exp:-400"), strict=True):
        assert line.startswith(f"infalign: {name} cannot reach a KL of 600 nats")
