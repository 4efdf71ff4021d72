"""The explorer: its numbers are the laws', and a browser shows them by keyboard, at every width, without a network."""

import json
from pathlib import Path

import explorer_tables
import numpy as np
import pytest
from pages import show

from infalign.method.procedures import BestOfN, Standard, WorstOfN
from infalign.method.transforms import parse_transform
from infalign.report import explorer
from infalign.theory.curve import curve_point, parse_transform_or_optimum
from infalign.theory.rank_correlation import law_at_rank_correlation
from infalign.theory.tabulation import smoothed

SETTINGS = {"KLS": (0.2, 1.0), "NS": (1, 4), "RHOS": (1.0, 0.7), "ROLLOUTS": (None, 16)}


@pytest.fixture(scope="module")
def tables():
    """Return the numbers for a few settings, computed anew."""
    with pytest.MonkeyPatch.context() as patch:
        for name, values in SETTINGS.items():
            patch.setattr(explorer_tables, name, values)
        return json.loads(json.dumps(explorer_tables.explorer_tables()))


@pytest.fixture(scope="module")
def shipped():
    """Return the numbers that the page has."""
    return json.loads(Path(explorer.__file__).with_suffix(".json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def curves(tables):
    """Return the records of the few settings, whose numbers of draws are numbers again."""
    return [
        c | {key: {int(n): v for n, v in c[key].items()} for key in ("won", "from_plain")} for c in tables["curves"]
    ]


def find(curves: list[dict], kind: str, transform: str, n: int) -> dict:
    """Return the record of a transformation."""
    (found,) = (c for c in curves if (c["kind"], c["transform"]) == (kind, transform) and n in c["won"])
    return found


@pytest.mark.parametrize("kl", SETTINGS["KLS"])
@pytest.mark.parametrize(
    ("kind", "served", "names"),
    [
        ("best-of", BestOfN(4), ("identity", "exp:5", "exp:10", "optimal")),
        ("worst-of", WorstOfN(4), ("identity", "exp:-5", "exp:-10", "optimal")),
    ],
)
def test_exact_ranks_win_what_curve_says(curves, kind, served, names, kl):
    """For exact ranks every number is that of `infalign curve`, against the base served alike and one plain draw."""
    i = SETTINGS["KLS"].index(kl)
    for name in names:
        found, point = find(curves, kind, name, 4), curve_point(served, parse_transform_or_optimum(name), kl=kl)
        assert found["won"][4][i][0][0] == pytest.approx(point.win_rate, abs=1e-5)
        assert found["from_plain"][4][i][0][0] == pytest.approx(point.law.win_rate(served, Standard()), abs=1e-5)


def test_noise_and_rollouts_are_those_of_the_laws(curves):
    """A policy of ρ = 0.7 that learns from 16 rollouts wins what the law of the smoothed transformation gives it."""
    found = find(curves, "best-of", "exp:10", 4)
    for rollouts, aim in enumerate((parse_transform("exp:10"), smoothed(parse_transform("exp:10"), 16))):
        law = law_at_rank_correlation(aim, rho=0.7, kl=1.0).law
        assert found["won"][4][1][rollouts][1] == pytest.approx(law.win_rate(BestOfN(4)), abs=1e-5)


def test_the_page_has_the_numbers_of_the_laws(tables, shipped):
    """What is shipped is what is computed; if this fails, write the file again as the module's first lines say."""
    at = [[shipped[key].index(value) for value in tables[key]] for key in ("kls", "rollouts", "rhos")]
    for own in tables["curves"]:
        (there,) = (
            c
            for c in shipped["curves"]
            if (c["kind"], c["transform"]) == (own["kind"], own["transform"]) and own["won"].keys() <= c["won"].keys()
        )
        for key in ("won", "from_plain"):
            for n, wins in own[key].items():
                found = [[[there[key][n][i][k][r] for r in at[2]] for k in at[1]] for i in at[0]]
                assert np.array(wins, dtype=float) == pytest.approx(np.array(found, dtype=float), abs=1.1e-5)
        densities = [there["log_density"][i] for i in at[0]]
        assert np.array(own["log_density"], dtype=float) == pytest.approx(np.array(densities, dtype=float), abs=1.1e-3)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page, which opens with best-of-4 at 0.5 nats."""
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    path.write_text(explorer.explorer_page(), encoding="utf-8")
    return path


def open_at(browser, page: Path, width: int) -> None:
    """Open the page, and go to one nat by the keyboard."""
    show(browser, page, width)
    browser.find_element("id", "kl").send_keys("\ue014" * 2)  # the right arrow: from 0.5 by 0.75 to 1


def test_the_page_says_what_the_laws_say(browser, page, curves):
    """Reached by keyboard, best-of-4 at one nat shows the win rates of its record in words and in the table.

    It asks for nothing but itself, and the console stays empty.
    """
    browser.get_log("performance")
    open_at(browser, page, 1200)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert browser.get_log("browser") == []
    said = browser.find_element("id", "said").text
    rows = [row.text for row in browser.find_elements("css selector", "#rows tr")]
    for name in ("identity", "exp:10", "optimal"):
        won = f"{100 * find(curves, 'best-of', name, 4)['won'][4][1][0][0]:.1f}"
        assert won in said
        assert any(row.startswith(f"{name} {won}") for row in rows)
    browser.find_element("id", "rho").send_keys("0.7")
    knows_less = f"{100 * find(curves, 'best-of', 'identity', 4)['won'][4][1][0][1]:.1f}"
    assert knows_less in browser.find_element("id", "said").text


@pytest.mark.parametrize("width", [375, 1200])
def test_the_page_scrolls_down_only_and_names_its_controls(browser, page, width):
    """It is no wider than the window, and each control and each chart has a name for who does not see it."""
    open_at(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    controls = browser.find_elements("css selector", "input, select")
    charts = browser.find_elements("css selector", "svg[role=img]")
    assert len(controls) == 6
    assert len(charts) == 4
    assert [one for one in (*controls, *charts) if not one.accessible_name] == []


def test_curve_writes_the_page(main, tmp_path):
    """`curve --page` writes it, opened at the procedure; a page that is not .html is refused before it computes."""
    words = ("curve", "--procedure", "worst-of-8", "--transform", "identity", "--kl", "0.5")
    assert main(*words, "--page", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "page.html").read_text() == explorer.explorer_page(served="worst-of-8")
    assert main(*words, "--page", tmp_path / "page.txt")[0] == 2
