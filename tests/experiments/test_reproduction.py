"""Figures and claims of the paper, repeated from two tiny seeds."""

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
from markupsafe import escape
from matplotlib.figure import Figure
from pages import show
from rich.console import Console

from infalign.core.errors import ConfigError
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws
from infalign.experiments.compare import _matched, sampled, train_methods
from infalign.experiments.drawings import Drawn
from infalign.experiments.methods import Compared
from infalign.experiments.paper import BY_NUMBER
from infalign.experiments.reproduction import Reproduction, print_plan, reproduce
from infalign.experiments.seeds import Quantity, Seed, WinRate, lead
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.evaluated import Evaluated
from infalign.training.common import save_model

NOTHING = replace(BY_NUMBER[2], draw=lambda seeds: Drawn(Figure(), "", "", (), ()), claims=())
METHODS = ("qrpo", "qrpo-identity", "best-of-n")  # of those that the figures compare
NUMBERS = (3, 4, 7, 8, 9, 10, 12)
SEEDS = (0, 1)


def recipe(root: Path) -> Recipe:
    """Return a recipe that trains no model but policies, and whose judge is not the reward."""
    scratch = Scratch.model_validate(micro.SCRATCH)
    if not (root / "policy").is_dir():
        root.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(["one two three"], scratch)
        save_model(new_policy(scratch, tokenizer, seed=0), tokenizer, root / "policy")
    settings = micro.given(root / "run", str(root / "policy"))
    settings |= {"reward": {"function": "micro:brightness"}, "procedure": "best-of-2", "gold": None}
    settings["policies"]["aware"]["fit"] = micro.FIT | {"epochs": 4, "learning_rate": 1e-2}
    return load_recipe(micro.write(root / "recipe.yaml", settings), ["compute.processes=1"])


def asked(root: Path) -> Reproduction:
    """Return most figures, of which those that compare methods train `METHODS` only."""
    shown = [BY_NUMBER[number] for number in NUMBERS]
    figures = [replace(one, methods=tuple(m for m in one.methods if m in METHODS)) for one in shown]
    return Reproduction(figures, root / "output", recipe(root), SEEDS, [0.2])


def plan(root: Path) -> str:
    """Return what is said of what would be trained."""
    console = Console(file=io.StringIO(), width=200)
    print_plan(asked(root), console)
    return console.file.getvalue()


def done(root: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the verdicts and the names of the units that were done for them."""
    console = Console(file=io.StringIO(), width=200)
    found = reproduce(asked(root), console)
    return found, [line.split()[1] for line in console.file.getvalue().splitlines() if line.startswith("✓")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a reproduction of which the first seed was trained before, by a command that was then stopped."""
    root = tmp_path_factory.mktemp("reproduction")
    before = plan(root)
    untouched = not (root / "output").exists()
    first = asked(root)
    train_methods(first.recipes[0], first.methods()[0], [0.2], splits=["test"], rounds=0, console=Console(quiet=True))
    results, units = done(root)
    return {"root": root, "before": before, "untouched": untouched, "results": results, "units": units}


def claims(finished: dict[str, Any], figure: int) -> list[dict[str, Any]]:
    """Return the verdicts of a figure."""
    found: list[dict[str, Any]] = finished["results"]["figures"][f"figure-{figure}"]["claims"]
    return found


def test_the_plan_counts_policies_and_writes_nothing(finished: dict[str, Any]) -> None:
    """Two trained methods at one budget for two seeds are four policies; without a record no time is promised."""
    assert "4 policies: 3 methods at 0.2 nats for 2 seeds" in finished["before"]
    assert "how long it takes is known when a seed is done" in finished["before"]
    assert "left out: figure-8: best-of-32 needs evaluate.samples of at least 32, found 8" in finished["before"]
    assert finished["untouched"]


def test_a_stopped_reproduction_goes_on(finished: dict[str, Any]) -> None:
    """What the first seed had is not done again, the second is done once, and a third command does nothing."""
    assert sorted(finished["units"]) == sorted(set(finished["units"]))
    assert {f"train-{name}-0.2" for name in METHODS[:2]} <= set(finished["units"])
    assert done(finished["root"]) == (finished["results"], [])
    assert "nothing of this is left to do" in plan(finished["root"])


def test_a_lead_is_that_of_a_comparison(finished: dict[str, Any]) -> None:
    """Each seed's lead over the best baseline at one KL is what `infalign compare` would say of its policies."""
    for place, own in enumerate(asked(finished["root"]).recipes):
        compared, evaluated = Compared(own, METHODS[:2], [0.2]), Evaluated.of(own, Layout(Path(own.run_dir)))
        gains = _matched(compared, evaluated, [BestOfN(2)], 0.2, *sampled(compared, evaluated, [BestOfN(2)]))["gains"]
        for judge, one in zip(("reward", "judge"), claims(finished, 4), strict=False):
            assert one["note"].startswith("qrpo over qrpo-identity; not compared: qrpo-raw, ")
            assert one["by_seed"][place] == pytest.approx(gains[judge]["best-of-2"]["gain"]["qrpo"]["mean"])


@dataclass(frozen=True)
class Told(Seed):
    """A seed that is told what its policies spend and win, for every one of two prompts."""

    spends: Mapping[str, float] = field(default_factory=dict)
    wins: Mapping[str, float] = field(default_factory=dict)
    prompt_ids = ("first", "second")

    def kl(self, name: str) -> Array:
        """Return what was told."""
        return np.full(2, self.spends[name])

    def values(self, quantity: Quantity, name: str) -> Array:
        """Return what was told."""
        return np.full(2, self.wins[name])


def test_a_baseline_that_spends_little_does_not_hinder_the_others(finished: dict[str, Any]) -> None:
    """Each pair has a KL of its own: what is spent by one that cannot be compared moves no lead over another."""
    own = asked(finished["root"]).recipes[0]
    compared = Compared(own, ("qrpo", "qrpo-identity", "qrpo-raw"), [0.5, 1.0])
    spends = {"qrpo-0.5": 0.5, "qrpo-1": 1.0, "qrpo-identity-0.5": 0.5, "qrpo-identity-1": 1.0}
    wins = {"qrpo-0.5": 0.7, "qrpo-1": 0.8, "qrpo-identity-0.5": 0.68, "qrpo-identity-1": 0.74}
    little = {"qrpo-raw-0.5": 0.3, "qrpo-raw-1": 0.31}
    seed = Told(own, compared, spends=spends | little, wins=wins | dict.fromkeys(little, 0.9))
    found = lead([seed, seed], "qrpo", ["qrpo-identity", "qrpo-raw"], WinRate(BestOfN(2), "reward"))
    assert found.note == "qrpo over qrpo-identity; not compared: qrpo-raw"
    assert [one.values.tolist() for one in found.seeds] == [pytest.approx([0.04, 0.04])] * 2


def test_every_verdict_follows_from_its_interval(finished: dict[str, Any]) -> None:
    """The mean is that of the seeds inside of the interval; what was not trained is undecided, and says why."""
    measured = 0
    for figure in finished["results"]["figures"].values():
        for one in figure["claims"]:
            if (e := one["estimate"]) is None:
                assert one["verdict"] == "undecided"
                assert one["note"]
                continue
            measured += 1
            assert e["mean"] == pytest.approx(np.mean(one["by_seed"]))
            assert e["low"] <= e["mean"] <= e["high"]
            assert len(one["by_seed"]) == len(SEEDS)
    assert measured == 6
    assert all(one["estimate"] is None for one in claims(finished, 10))  # no GRPO among the methods


def test_draws_and_raw_rewards_are_those_of_the_samples(finished: dict[str, Any]) -> None:
    """Over all orders of a prompt's samples; raw reward is above the reference's in its standard deviations."""
    root = finished["root"]
    rows = {
        number: list(csv.DictReader((root / "output" / "page" / f"figure-{number}.csv").read_text().splitlines()))
        for number in (9, 12)
    }
    for number, own in enumerate(asked(root).recipes):
        seed = Seed(own)
        reward = {name: seed.evaluated.column(name, "reward") for name in ("reference", "qrpo-0.2")}
        spread = np.sqrt(reward["reference"].var(axis=1, ddof=1).mean())
        (found,) = [row for row in rows[9] if (row["policy"], row["seed"]) == ("qrpo-0.2", str(number))]
        assert float(found["value_mean"]) == pytest.approx((reward["qrpo-0.2"] - reward["reference"]).mean() / spread)
        (found,) = [
            row
            for row in rows[12]
            if (row["policy"], row["seed"], row["quantity"]) == ("qrpo-0.2", str(number), "draws a response")
        ]
        samples = {name: Samples(values, values) for name, values in reward.items()}
        draws = rewind_draws(samples["qrpo-0.2"], samples["reference"], own.evaluate.rewind)
        assert float(found["value_mean"]) == pytest.approx(draws.mean())


def test_the_page_has_every_claim_and_figure(finished: dict[str, Any]) -> None:
    """One file with claims, verdicts, figures and their numbers; the same figures and tables lie beside it."""
    page = finished["root"] / "output" / "page"
    html = (page / "index.html").read_text(encoding="utf-8")
    assert json.loads((page / "claims.json").read_text()) == finished["results"]
    for name, figure in finished["results"]["figures"].items():
        assert f'id="{name}"' in html
        assert f'download="{name}.csv"' in html
        assert all((page / f"{name}{ending}").stat().st_size for ending in (".svg", ".png", ".csv"))
        for one in figure["claims"]:
            assert escape(one["measured"]) in html
    assert html.count("undecided") > 6
    assert all(reason in html for reason in finished["results"]["left_out"].values())
    assert not re.search(r"(src|href)=\"(?!#|data:)", html)


@pytest.mark.parametrize("width", [1280, 360])
def test_a_browser_shows_it_on_any_screen(browser: Any, finished: dict[str, Any], width: int) -> None:
    """Nothing is wider than the screen, figures are seen, nothing is loaded from elsewhere, nothing complains."""
    show(browser, finished["root"] / "output" / "page" / "index.html", width)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.clientWidth, s.clientHeight])"
    )
    assert len(sizes) == len(finished["results"]["figures"])
    assert all(min(size) > 150 for size in sizes)
    assert browser.get_log("browser") == []


def test_a_file_in_the_place_of_the_page_is_not_replaced(tmp_path: Path) -> None:
    """A page that somebody else wrote stays, and the error names it."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("mine")
    with pytest.raises(ConfigError, match=r"index.html was not made by this run"):
        reproduce(Reproduction([NOTHING], tmp_path), Console(quiet=True))
    assert (tmp_path / "page" / "index.html").read_text() == "mine"
