"""The page of a run whose answer is known: what it shows, and how a browser shows it."""

import io
import json
import re
from base64 import b64decode
from math import comb
from xml.etree import ElementTree

import numpy as np
import pytest
from known_run import ATTACK, PROMPTS, QRPO, RLOO, SAID, SAMPLES, finish_run, html_of, make_recipe, printed, report
from pages import show
from rich.console import Console

from infalign.core.display import amount, share
from infalign.core.errors import ConfigError
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.report.card import model_card
from infalign.report.page import examples
from infalign.report.results import read_results
from infalign.report.scored_samples import ScoredSamples
from infalign.report.tables import print_table
from infalign.report.verdict_text import verdict

ONE: dict[str, object] = {"policies": {"only": QRPO}, "gold": False}


def test_report_shows_the_numbers_of_results_json_with_their_intervals(run):
    """Every win rate and KL of results.json stands in the page with both ends of its interval."""
    recipe, root = run
    text = re.sub(r"<[^>]+>", "", html_of(root))
    for policy in read_results(root)["policies"].values():
        assert amount(policy["kl"], 3) in text
        for judge in ("reward", "judge", "gold"):
            for procedure in ("standard", recipe.procedure.name, recipe.evaluate.rewind.name):
                assert share(policy["win_rates"][judge][procedure]) in text


def test_warnings_come_before_figures_and_tables(run):
    """They follow the recommendation, units that share one together."""
    page = html_of(run[1])
    said = "train-aware, train-plain: the training had only 5 optimizer steps"
    assert page.index("Recommended: ") < page.index(said) < page.index("<figure") < page.index("<table")


def test_served_example_is_the_best_of_the_first_n(run):
    """An example's response has the highest reward of the model's first four samples for that prompt."""
    recipe, root = run
    evaluated = ScoredSamples(recipe, Layout(root))
    rewards = evaluated.column("aware", "reward")
    for p, example in enumerate(examples(evaluated, recipe.policies)):
        aware = next(model for model in example["models"] if model["name"] == "aware")
        served, plain = aware["responses"]
        assert served["rewards"]["reward"] == rewards[p, :4].max()
        index = p * SAMPLES + int(rewards[p, :4].argmax())
        assert served["text"] == f"aware says {SAID} {index}"
        assert plain["text"] == f"aware says {SAID} {p * SAMPLES}"


def test_a_rewinding_procedure_serves_the_first_example_above_the_quantile(tmp_path):
    """Of a model's samples in their order the first that reaches the reference's quantile, else the best."""
    name = "rewind:0.85:8:best"
    evaluate = {"prompts": PROMPTS, "samples": SAMPLES, "max_n": 2, "rewind": name}
    recipe = make_recipe(tmp_path, policies={"only": QRPO}, gold=False, judge=None, procedure=name, evaluate=evaluate)
    finish_run(tmp_path, recipe, steps=500)
    evaluated = ScoredSamples(recipe, Layout(tmp_path))
    base, places = evaluated.column("reference", "reward"), set()
    for p, example in enumerate(examples(evaluated, recipe.policies)):
        for model in example["models"]:
            drawn = evaluated.column(model["name"], "reward")[p, :8]
            above = np.flatnonzero(drawn >= np.quantile(base[p], 0.85))
            places.add(place := above[0] if above.size else drawn.argmax())
            assert model["responses"][0]["rewards"]["reward"] == drawn[place]
    assert len(places) > 2
    report(recipe, tmp_path)
    assert 'class="findings"' not in html_of(tmp_path)
    assert "at most 8 times, and serve that sample, or the best if none reaches it." in html_of(tmp_path)


def test_units_that_left_the_recipe_are_not_of_it(run):
    """Their seconds are not counted, and nothing is said against the results because of them."""
    page = html_of(run[1])
    seconds = dict(re.findall(r'<th scope="row">([\w-]+)</th><td>([\d.]+)</td>', page.partition("per stage")[2]))
    assert (seconds["train"], seconds["evaluate"], seconds["calibrate"]) == ("3.0", "4.5", "1.5")
    assert "reward-gone" not in page


@pytest.mark.slow
def test_writing_again_changes_no_byte_of_the_page(run):
    """The same run gives the same report."""
    recipe, root = run
    before = html_of(root)
    report(recipe, root)
    assert html_of(root) == before


def test_figures_are_files_that_parse(run):
    """Each figure of the page is an SVG that parses as XML and a PNG; none is of a policy that left the recipe."""
    root = run[1]
    names = set(re.findall(r'download="([\w.-]+)\.png"', html_of(root)))
    assert {"win-rate-by-kl-reward", "best-of-n-judge", "calibration", "training-plain", "training-reward"} <= names
    assert "training-gone" not in names
    assert names == {path.stem for path in (root / "figures").iterdir()}
    for name in names:
        assert ElementTree.parse(root / "figures" / f"{name}.svg").getroot().tag.endswith("svg")
        assert (root / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_page_is_whole_without_its_folder(run):
    """Every link is a place on the page or data in it, and the embedded results are those of the run."""
    links = re.findall(r'(?:href|src)="([^"]*)"', html_of(run[1]))
    assert [link[:40] for link in links if not link.startswith(("#", "data:"))] == []
    (numbers,) = (link for link in links if link.startswith("data:application/json"))
    assert json.loads(b64decode(numbers.partition(",")[2])) == read_results(run[1])


@pytest.mark.parametrize(
    ("asked", "levels"),
    [({"policies": {"one": RLOO, "two": RLOO | {"kl_budget": 1.0}}}, 3)]
    + [(ONE | {"judge": None, "procedure": name}, None) for name in ("standard", "0.5*best-of-2+0.5*standard")],
)
def test_every_run_has_a_report(tmp_path, asked, levels):
    """Without a second method no comparison, without gold no gold, ties may be."""
    recipe = make_recipe(tmp_path, **asked)
    finish_run(tmp_path, recipe, levels=levels)
    report(recipe, tmp_path)
    html, served = html_of(tmp_path), recipe.procedure.name
    assert "At the same KL" not in html
    assert ("the gold" in html) == asked.get("gold", True)
    assert f"both served as {served}" in html
    assert served in printed(tmp_path, 120) or served == "standard"
    assert printed(tmp_path, 80).count("theory") == 0 or "procedure" in asked


@pytest.mark.slow
def test_a_policy_that_ran_away_has_a_report(tmp_path):
    """Beyond what its transformation can spend there is no theory for a policy, and all that was measured is there."""
    recipe = make_recipe(tmp_path, policies={"far": RLOO, "plain": QRPO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, kl=5000.0)
    report(recipe, tmp_path)
    policies = read_results(tmp_path)["policies"]
    assert policies["far"]["theory"] is None
    assert policies["plain"]["theory"] is not None
    assert amount(policies["far"]["kl"], 3) in re.sub(r"<[^>]+>", "", html_of(tmp_path))


def test_missing_libraries_are_named(run, monkeypatch):
    """Without jinja2 the error says what to install."""
    recipe, root = run
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"pip install 'infalign\[report\]'"):
        report(recipe, root)


@pytest.mark.parametrize("opened", [False, True])
def test_a_phone_scrolls_down_only(run, browser, opened):
    """At 375 pixels the page is no wider than the screen, with every box closed and with every box open."""
    show(browser, run[1] / "report.html", 375)
    browser.execute_script(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 375


def test_the_page_asks_for_nothing_and_examples_wait_for_a_click(run, browser):
    """It requests only itself, the console stays empty, and model text is behind a warning until it is clicked."""
    browser.get_log("performance")
    show(browser, run[1] / "report.html", 1200)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [(run[1] / "report.html").as_uri()]
    assert browser.get_log("browser") == []
    details = browser.find_element("css selector", "#examples")
    assert "offensive" in details.text
    assert ATTACK not in details.text
    details.find_element("css selector", "summary").click()
    assert f"aware says {ATTACK}" in details.text


def test_figures_follow_the_dark_scheme(run, browser):
    """The axis labels of a figure have the color of the page's text in both schemes."""
    seen = set()
    for scheme in ("light", "dark"):
        show(browser, run[1] / "report.html", 1200, scheme)
        ink, label = browser.execute_script(
            "const color = (q, of) => getComputedStyle(document.querySelector(q))[of];"
            "return [color('body', 'color'), color('figure svg text', 'fill')]"
        )
        assert ink == label
        seen.add(ink)
    assert len(seen) == 2


def test_figures_have_words(run, browser):
    """Every figure is an image with a text in its place and a caption."""
    show(browser, run[1] / "report.html", 1200)
    figures = browser.find_elements("css selector", "figure")
    assert len(figures) >= 10
    for figure in figures:
        assert len(figure.find_element("css selector", "[role=img]").get_attribute("aria-label")) > 30
        assert figure.find_element("css selector", "figcaption").get_attribute("textContent").strip()


def test_rewards_that_are_right_or_wrong_have_pass_at_k(tmp_path):
    """By counts of right answers, with the lead over the reference; other rewards have none."""
    recipe = make_recipe(tmp_path, **ONE)
    finish_run(tmp_path, recipe, levels=1)
    report(recipe, tmp_path)
    found = read_results(tmp_path)["pass_at_k"]
    evaluated = ScoredSamples(recipe, Layout(tmp_path))
    right = {name: evaluated.column(name, "reward").sum(axis=1).astype(int) for name in ("reference", "only")}
    for k in (1, 8, SAMPLES):
        passed = {name: 1 - np.array([comb(SAMPLES - c, k) for c in right[name]]) / comb(SAMPLES, k) for name in right}
        for name, values in passed.items():
            assert found[name][f"{k}"]["mean"] == pytest.approx(values.mean())
        ahead = found["only"][f"{k}"]["over"]["reference"]
        assert ahead["mean"] == pytest.approx((passed["only"] - passed["reference"]).mean())
    assert read_results(tmp_path)["policies"]["only"]["theory"] is None  # that of continuous ranks
    page = html_of(tmp_path)
    assert 'id="pass-at-k"' in page
    assert share(found["only"]["8"]) in re.sub(r"<[^>]+>", "", page)
    print_table(tmp_path, Console(file=(terminal := io.StringIO()), width=120))
    card = model_card(recipe, read_results(tmp_path), "only", prompts=7)
    for said in (terminal.getvalue(), card):
        assert all(share(found[name][f"{SAMPLES}"]) in said for name in right)


def test_a_page_of_right_or_wrong_rewards_has_no_empty_columns_and_fits(tmp_path, browser):
    """At 1,200 pixels no table scrolls; of ranks, theory and win rates, which pass@k replaces, there is nothing."""
    recipe = make_recipe(tmp_path, policies={"aware": QRPO, "plain": RLOO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, levels=1)
    report(recipe, tmp_path)
    page = html_of(tmp_path)
    text = re.sub(r"<[^>]+>", " ", page)
    left_out = " theory ", "Theory:", "DKW", "same raw reward ranks", "Rewind-and-Repeat", "Win rate"
    assert not any(word in text for word in left_out)
    assert {"pass-at-k", "leads-by-k", "pass-at-k-by-kl"} <= set(re.findall(r'download="([\w.-]+)\.png"', page))
    show(browser, tmp_path / "report.html", 1200)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    find = "return [...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth).length"
    assert browser.execute_script(find) == 0
    rows = [row.text for row in browser.find_elements("css selector", "tr") if "aware − plain, at" in row.text]
    assert len(rows) == 2


def test_a_card_names_no_folder_of_this_machine(run, tmp_path):
    """It is made to be uploaded: a reward function in a file is named without where the file lies."""
    recipe = load_recipe("demo", [f"gold.function={tmp_path}/mine.py:score"])
    found = read_results(run[1])
    card = model_card(recipe, found | {"judges": ["gold"]}, "aware", prompts=7)
    assert "- gold: the Python function `mine.py:score`; a second judge" in card
    assert str(tmp_path) not in card
    assert "library_name: infalign" in card  # of a guide, which nothing else loads
    with_adapter = recipe.policies["aware"].model_copy(update={"guide": None})
    plain = recipe.model_copy(update={"policies": {"aware": with_adapter}})
    assert "library_name: transformers" in model_card(plain, found | {"judges": ["gold"]}, "aware", prompts=7)


@pytest.mark.parametrize("levels", [1, None])
def test_a_policy_that_is_the_reference_is_not_recommended(tmp_path, levels):
    """Its own samples are better by chance, here by much, and no verdict calls that a gain."""
    recipe = make_recipe(tmp_path, **ONE)
    finish_run(tmp_path, recipe, levels=levels, kl=0.0)
    assert verdict(read_results(tmp_path))[0].startswith("Recommended: keep the reference.")


def test_a_trained_policy_is_recommended_before_one_that_is_the_reference(tmp_path):
    """Also where the samples of the other happen to win more."""
    recipe = make_recipe(tmp_path, policies={"kept": QRPO, "trained": RLOO})
    finish_run(tmp_path, recipe, kl=0.0)
    found = read_results(tmp_path)
    wins = [found["policies"][name]["win_rates"]["reward"][recipe.procedure.name]["mean"] for name in recipe.policies]
    assert wins[0] > wins[1]
    assert verdict(found | {"judges": ["reward"]})[0].startswith("Recommended: trained")
