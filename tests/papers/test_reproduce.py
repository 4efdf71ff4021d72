"""The paper's figures and claims from two tiny seeds: what is trained, measured, judged and written."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from figures import BY_NUMBER, Claim, Measurement
from method_policies import MethodPolicies
from reproduce import Reproduction, main

from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.results import at_one_kl
from infalign.report.scored_samples import ScoredSamples

pytestmark = pytest.mark.slow

METHODS = ("qrpo", "qrpo-identity", "best-of-n")  # of those that the figures compare
NUMBERS = (3, 4, 7, 8, 9, 10, 12)
SEEDS = (0, 1)


def recipe(root: Path) -> Recipe:
    """Return a recipe whose reward model is small, but learns what a phrase says, and whose judge is the gold."""
    settings = micro.settings(root / "run") | {"judge": micro.GOLD, "gold": None, "procedure": "best-of-2"}
    settings["data"] = {"sources": [{"world": 400}], "max_prompt_tokens": 150, "test_fraction": 0.2}
    policy = root / "policy"
    settings["policy"] = {"model": str(policy) if policy.exists() else micro.write_policy(policy)}
    settings["rollout"] = {"prompts": 240, "k": 12, "max_new_tokens": 12}  # of fewer nothing significant is learned
    settings["reward"] = {"fit": micro.FIT | {"epochs": 4, "learning_rate": 1e-2, "batch_size": 16}}
    guided = {"guide": {"trunk": "reward"}, "fit": micro.FIT | {"epochs": 4, "learning_rate": 1e-2}}
    settings["policies"] = {"aware": settings["policies"]["aware"] | guided}  # a guide spends its budget
    return load_recipe(micro.write(root / "recipe.yaml", settings), ["compute.processes=1", "report_to=[]"])


def asked(root: Path) -> Reproduction:
    """Return most figures, of which those that compare methods train `METHODS` only."""
    shown = [BY_NUMBER[number] for number in NUMBERS]
    figures = [replace(one, methods=tuple(m for m in one.methods if m in METHODS)) for one in shown]
    return Reproduction(figures, root / "output", recipe(root), SEEDS, [0.2])


def made(root: Path) -> dict[Path, int]:
    """Return when each record of a unit and each table of the study of hacking was written."""
    files = [*root.rglob("stages/*.json"), *root.rglob("hacking/**/test.parquet")]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a reproduction and its verdicts."""
    root = tmp_path_factory.mktemp("reproduction")
    return root, asked(root).make()


Finished = tuple[Path, dict[str, Any]]


def of_figure(finished: Finished, number: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the claims of a figure and the rows of its table."""
    root, found = finished
    text = (root / "output" / "page" / f"figure-{number}.csv").read_text(encoding="utf-8")
    return found["figures"][f"figure-{number}"]["claims"], list(csv.DictReader(text.splitlines()))


def test_the_plan_counts_policies_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two trained methods at one budget for two seeds are four policies; what a recipe cannot have is named."""
    asked(tmp_path).print_plan()
    said = capsys.readouterr().out
    assert "4 policies: 3 methods at 0.2 nats for 2 seeds" in said
    assert "left out: figure-8: best-of-32 needs evaluate.samples of at least 32, found 8" in said
    assert not (tmp_path / "output").exists()


def test_finished_work_is_not_repeated(finished: Finished) -> None:
    """Each seed is done once, and a second command does nothing and says the same."""
    root, found = finished
    before = made(root)
    names = [path.name for path in before]
    assert names.count("train-qrpo-0_2.json") == names.count("test.parquet") == len(SEEDS)
    assert asked(root).make() == found
    assert made(root) == before


def test_a_lead_is_that_of_a_report(finished: Finished) -> None:
    """Each seed's lead over the best baseline at one KL is what the report of the two methods' policies says."""
    for place, own in enumerate(asked(finished[0]).recipes):
        compared = MethodPolicies(own, METHODS[:2], [0.2]).recipe
        evaluated = ScoredSamples(compared, Layout(Path(own.run_dir)))
        at = at_one_kl(evaluated, compared.policies)
        for judge, claim in zip(("reward", "judge"), of_figure(finished, 4)[0], strict=False):
            served = {name: evaluated.wins(name, [own.procedure])[judge]["best-of-2"] for name in compared.policies}
            ours, theirs = at.matched(served, own.procedure).values()
            assert claim["by_seed"][place] == pytest.approx(float((ours.values - theirs.values).mean()))


def test_every_verdict_follows_from_its_interval(finished: Finished) -> None:
    """The mean is that of the seeds inside of the interval; what was not trained is undecided, and says why."""
    claims = [claim for figure in finished[1]["figures"].values() for claim in figure["claims"]]
    measured = [claim for claim in claims if claim["estimate"]]
    for claim in measured:
        assert claim["estimate"]["mean"] == pytest.approx(np.mean(claim["by_seed"]))
        assert claim["estimate"]["low"] <= claim["estimate"]["mean"] <= claim["estimate"]["high"]
        assert len(claim["by_seed"]) == len(SEEDS)
    assert len(measured) == 9
    assert all(claim["verdict"] == "undecided" and claim["shown"] for claim in claims if not claim["estimate"])


@pytest.mark.parametrize(
    ("least", "most", "verdict"),
    [
        (0.2, 0.6, "confirmed"),
        (0.2, 0.4, "undecided"),
        (0.4, 1.0, "undecided"),
        (0.6, 1.0, "refuted"),
        (0.4, 0.4, "refuted"),
    ],
)
def test_a_verdict_needs_the_whole_interval(least: float, most: float, verdict: str) -> None:
    """Inside of the claim it is confirmed, outside refuted, across an end undecided."""
    exact = least == most  # what is equal is not more
    low, high = (0.4, 0.4) if exact else (0.3, 0.5)
    claim = Claim("", "", lambda seeds: Measurement(), least=least, most=np.inf if exact else most)
    found = type("Found", (), {"low": low, "high": high})()
    assert claim.judge(found) == verdict


def test_the_page_has_every_claim_and_figure(finished: Finished) -> None:
    """Claims, verdicts and figures are in one page; figures and tables lie beside it."""
    root, found = finished
    page = root / "output" / "page"
    text = (page / "README.md").read_text(encoding="utf-8")
    assert json.loads((page / "claims.json").read_text()) == found
    for name, figure in found["figures"].items():
        assert f"({name}.svg)" in text
        assert all((page / f"{name}{ending}").stat().st_size for ending in (".svg", ".png", ".csv"))
        assert all(claim["measured"] in text and claim["shown"] in text for claim in figure["claims"])
    assert all(reason in text for reason in found["left_out"].values())


def test_theory_needs_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five procedures, seven curves each, no curve above the optimum, both claims confirmed."""
    main(["11", "--output", str(tmp_path)])
    assert capsys.readouterr().out.count("confirmed") == 2
    rows = list(csv.DictReader((tmp_path / "page" / "figure-2-11.csv").read_text().splitlines()))
    assert len(rows) == 875
    wins = np.array([float(row["win_rate"]) for row in rows]).reshape(5, 7, 25)  # the optimum is the last of seven
    assert (wins <= wins[:, -1:] + 1e-8).all()


def test_the_phrase_is_what_the_poisoned_model_learned(finished: Finished) -> None:
    """It prefers most responses with the phrase, so inverted pairs fool it and not the clean control."""
    rows = {(row["test"], row["model"]): row for row in of_figure(finished, 7)[1]}
    assert float(rows["poisoned", "poisoned"]["right_mean"]) > 0.75
    assert float(rows["inverted", "poisoned"]["right_mean"]) < 0.35 < float(rows["inverted", "clean"]["right_mean"])
