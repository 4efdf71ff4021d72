"""The report of a run whose answer is known: what it says, and how a browser shows it."""

import io
import json
import re
from base64 import b64decode
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
from pages import show
from rich.console import Console

from infalign.core.display import LOOKS, QUIET, amount, gain, share
from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import read_record, write_record, write_table
from infalign.data.examples import MESSAGES, prompt_id
from infalign.method.procedures import BestOfN
from infalign.method.transforms import parse_transform
from infalign.pipeline.records import FORMAT, records
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.page import examples, saturated, write
from infalign.report.results import read_results, write_results
from infalign.report.run_figures import Look, theory_curves, win_rate_by_kl, win_rate_by_n
from infalign.report.scored_samples import ScoredSamples
from infalign.report.tables import comparison_rows, print_table
from infalign.report.verdict_text import knowledge, likelihood_in_words, verdict
from infalign.theory.law import law_at_kl
from infalign.theory.rank_correlation import supported_correlation

PROMPTS, SAMPLES, K = 24, 32, 16
ATTACK = "<script>alert(1)</script>"
QRPO = {"transform": "exp:10", "kl_budget": 0.5, "solver": "qrpo"}
RLOO = {"transform": "identity", "kl_budget": 0.5, "solver": "rloo"}
AGREEING = "whose ranks within prompts agree with the gold at"
PROMISED = "where theory promises 85.0%"


def make_recipe(root: Path, *, policies: dict, gold: bool = True, **changes: object) -> Recipe:
    """Return a recipe for a run directory whose tables the test writes."""
    function = {"function": "infalign.world:gold"}
    return Recipe.model_validate(
        {
            "run_dir": str(root),
            "data": {"sources": [{"world": 10}]},
            "policy": {"model": "some/model"},
            "reward": {"fit": {}},
            "judge": function,
            "gold": function if gold else None,
            "rollout": {"prompts": PROMPTS, "k": K, "max_new_tokens": 8},
            "policies": policies,
            "evaluate": {"prompts": PROMPTS, "samples": SAMPLES, "max_n": 5, "rewind": "rewind:0.85:8"},
        }
        | changes
    )


def finish_run(root: Path, recipe: Recipe, *, levels: int | None = None, kl: float = 0.5, said: str = ATTACK) -> None:
    """Write what a finished evaluation leaves: every policy follows the theory's law at KL 0.5, judges hear noise.

    With ``levels`` the reward takes only so many values; ``kl`` is what the first policy is said to have spent,
    and every response has ``said`` in it.
    """
    layout, rng = Layout(root), np.random.default_rng(0)
    layout.data.mkdir(parents=True)
    prompts = [[{"role": "user", "content": f"Question {i}?"}] for i in range(PROMPTS)]
    ids = [prompt_id(prompt) for prompt in prompts]
    write_table(
        layout.data / "test_prompts.parquet", pa.table({"prompt_id": ids, "prompt": pa.array(prompts, MESSAGES)})
    )
    shift = rng.normal(size=(PROMPTS, 1))

    def rewards(ranks):
        rewards = shift + np.tan(3 * (ranks - 0.5))
        return rewards if levels is None else np.round(ranks * levels)

    references = np.sort(rewards(rng.random((PROMPTS, K))), axis=1)
    write_table(layout.calibrated, pa.table({"reference_rewards": references.tolist()}))
    for name in ("reference", *recipe.policies):
        ranks = rng.random((PROMPTS, SAMPLES))
        if name != "reference":
            law = law_at_kl(parse_transform(recipe.policies[name].shaping.name), kl=0.5)
            ranks = np.interp(ranks, law.cdf.ravel(), law.u.ravel())
        columns = {"prompt_id": np.repeat(ids, SAMPLES), "index": np.tile(np.arange(SAMPLES, dtype=np.int32), PROMPTS)}
        texts = [f"{name} says {said} {i}" for i in range(PROMPTS * SAMPLES)]
        samples = layout.evaluation(name) / "samples"
        samples.mkdir(parents=True)
        finish = ["length"] * len(texts)
        write_table(samples / "part-00000.parquet", pa.table(columns | {"text": texts, "finish": finish}))
        noisy = {source: (ranks + rng.normal(size=ranks.shape)).ravel() for source in recipe.rewards}
        scores = noisy | {"reward": rewards(ranks).ravel(), "length": rng.integers(1, 9, PROMPTS * SAMPLES)}
        if name != "reference":
            spent = kl if name == next(iter(recipe.policies)) else 0.5
            scores["kl"] = spent / 5 * rng.gamma(5, 1.0, PROMPTS * SAMPLES)
        write_table(layout.evaluation(name) / "scores.parquet", pa.table(columns | scores))
    write_results(ScoredSamples.of(recipe, layout), recipe.policies, on_progress=lambda *_: None)

    steps = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
    online = [row | {"win_rate": 0.5 + 0.05 * row["step"], "kl": 0.01, "reward": 0.1} for row in steps]
    record(root, "data", "data", {"examples": 100, "skipped": 3, "train_prompts_too_long": 2})
    accuracy = {"mean": 0.71, "low": 0.65, "high": 0.77}
    fitted = {"pairs": 50, "history": steps, "test_accuracy": accuracy}
    record(
        root, "reward", "reward-model", fitted | {"over_garbage": {"noise": {"mean": 0.87, "low": 0.8, "high": 0.9}}}
    )
    record(root, "score-0", "score", {"responses": PROMPTS * K, "cut_off": 0.25})
    record(root, "evaluate-reference", "evaluate", {"samples": PROMPTS * SAMPLES, "cut_off": 0.5})
    record(root, "calibrate", "calibrate", {"prompts": PROMPTS, "k": K, "tied": 0.0, "degenerate_prompts": 0})
    for name, policy in recipe.policies.items():
        held_out = [*steps, {"step": 5, "eval_loss": 0.3}]
        record(root, f"train-{name}", "train", {"history": online if policy.solver == "rloo" else held_out})
        record(root, f"evaluate-{name}", "evaluate", {"samples": PROMPTS * SAMPLES, "cut_off": 0.5})


def record(root: Path, name: str, stage: str, summary: dict) -> None:
    """Write the record of one finished step."""
    kind, _, subject = name.partition("-")
    unit = {"format": FORMAT, "stage": stage, "kind": kind, "subject": subject}
    content = unit | {"seconds": 1.5, "summary": summary, "versions": {}}
    (root / "stages").mkdir(exist_ok=True)
    write_record(root / "stages" / f"{name}.json", content)


LEFT = {  # units that are no more of the recipe
    "train-gone": {"history": [{"step": 1, "loss": 1.0}]},
    **{f"{work}-{model}": {} for work in ("samples", "kl") for model in ("gone", "guest.ab")},
    "rank-model": {"rank_correlation": {"mean": 0.0, "low": -0.1, "high": 0.1}},
}


def report(recipe: Recipe, root: Path) -> None:
    """Write the report of what the recipe has."""
    write(recipe, Layout(root), [name for name in records(root) if name not in LEFT])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the recipe and the root of a reported run with a policy of each solver."""
    root = tmp_path_factory.mktemp("run")
    recipe = make_recipe(root, policies={"aware": QRPO, "plain": RLOO})
    finish_run(root, recipe)
    for name, summary in LEFT.items():
        record(root, name, "evaluate", summary)
    report(recipe, root)
    return recipe, root


def html_of(root: Path) -> str:
    """Return the page."""
    return (root / "report.html").read_text(encoding="utf-8")


def test_report_shows_the_numbers_of_results_json_with_their_intervals(run):
    """Every win rate and KL of results.json stands in the page with both ends of its interval."""
    recipe, root = run
    text = re.sub(r"<[^>]+>", "", html_of(root))
    for policy in read_results(root)["policies"].values():
        assert amount(policy["kl"]) in text
        for judge in ("reward", "judge", "gold"):
            for procedure in ("standard", recipe.procedure.name, recipe.evaluate.rewind.name):
                assert share(policy["win_rates"][judge][procedure]) in text


def test_what_speaks_against_the_results_comes_before_them(run, tmp_path):
    """It stands in words before the verdict, units that share it together, and is not there where nothing does."""
    page = html_of(run[1])
    said = "train-aware, train-plain: the training had 5 optimizer steps"
    assert 0 < page.index(said) < page.index('<section class="verdict"')
    recipe = make_recipe(tmp_path, policies={"aware": QRPO}, gold=False, judge=None)
    finish_run(tmp_path, recipe)
    for name in ("reward", "train-aware"):
        path = tmp_path / "stages" / f"{name}.json"
        long = read_record(path)
        long["summary"]["history"][-1]["step"] = 500
        write_record(path, long)
    report(recipe, tmp_path)
    assert "Before you read on" in page
    assert "Before you read on" not in html_of(tmp_path)


def test_the_pareto_front_has_who_is_beaten_by_nobody_cheaper(run):
    """A policy is on the front of a judge if none of the same or a smaller KL, the reference included, wins more."""
    results = read_results(run[1])
    for judge, fronts in results["pareto"].items():
        front = fronts["best-of-4"]
        points = {
            name: (p["kl"]["mean"], p["win_rates"][judge]["best-of-4"]["mean"])
            for name, p in results["policies"].items()
        }
        points["reference"] = (0.0, 0.5)
        for name, (kl, wins) in points.items():
            beaten = any(k <= kl and w >= wins for other, (k, w) in points.items() if other != name)
            assert (name in front) == (not beaten) or name == "reference"


def test_policies_that_follow_the_law_lie_on_the_theory(run):
    """The gain by the reward agrees with the gain that theory gives at the KL where the samples were drawn."""
    matched = read_results(run[1])["matched"]
    wins = {name: law_at_kl(parse_transform(name), kl=0.5).win_rate(BestOfN(4)) for name in ("exp:10", "identity")}
    measured = matched["judges"]["reward"]["gain_over"]["identity (rloo)"]
    assert measured["low"] - 0.01 < wins["exp:10"] - wins["identity"] < measured["high"] + 0.01
    rows = [row for row in comparison_rows(read_results(run[1])) if row["judge"] == "reward"]
    assert [row["method"] for row in rows] == ["exp:10 (qrpo)", "identity (rloo)"]
    assert rows[1]["gain"] == gain(measured)


@pytest.mark.parametrize("spent", [0.3, 0.45])
def test_a_student_that_spends_far_less_does_not_bring_the_others_down(tmp_path, spent):
    """A method that is no student would be compared at .3 nats; a student is left out, and that is said."""
    policies = {"student": {"solver": "distil", "teacher": "aware"}, "aware": QRPO, "plain": RLOO}
    recipe = make_recipe(tmp_path, policies=policies, gold=False, judge=None)
    finish_run(tmp_path, recipe, kl=spent)
    matched, student = read_results(tmp_path)["matched"], "exp:10 (qrpo), distilled"
    assert (student in matched["left_out"]) == (spent < 0.4)
    assert matched["kl"] == pytest.approx(0.5 if spent < 0.4 else 0.45, abs=0.02)
    assert (f"{student} is left out" in printed(tmp_path, 1000)) == (spent < 0.4)
    others = make_recipe(tmp_path / "plain", policies={"aware": QRPO, "plain": RLOO}, gold=False, judge=None)
    finish_run(tmp_path / "plain", others, kl=spent)
    assert read_results(tmp_path / "plain")["matched"]["kl"] == pytest.approx(spent, abs=0.02)


@pytest.mark.parametrize(
    ("spent", "said"), [(0.57, r"brought down from 0\.5\d nats"), (2.0, r"not compared: at least \d\.\d\d nats")]
)
def test_a_method_that_spent_more_is_brought_down_or_not_compared(tmp_path, spent, said):
    """Table, terminal and verdict say the same of it: it has a win rate and a star, or neither."""
    recipe = make_recipe(tmp_path, policies={"aware": QRPO, "plain": RLOO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, kl=spent)
    rows, shown = comparison_rows(read_results(tmp_path)), printed(tmp_path, 120)
    row, compared = next(row for row in rows if row["method"] == "exp:10 (qrpo)"), spent < 1
    assert re.fullmatch(said, row["outside"])
    assert (row["wins"] != "–") == compared == ("exp:10 (qrpo) *" in shown) == ("is brought down to this KL" in shown)
    assert ("exp:10 (qrpo) is not compared" in shown) == (not compared)


def test_policies_that_follow_the_law_know_the_ranks(run):
    """Their ρ is 1 within its interval, and the best that they reach is theory's at the KL that they spent."""
    results = read_results(run[1])
    for name, found in results["knowledge"].items():
        assert 0.75 < found["rho"]["low"] <= found["rho"]["mean"] <= found["rho"]["high"]
        assert found["rho"]["high"] > 0.97
        assert found["kl"] == pytest.approx(results["policies"][name]["kl"]["mean"])
        assert list(found["reach"]) == ["exp:10", "identity"]
        exponential, identity = found["reach"].values()
        assert exponential["mean"] > identity["mean"] + 0.03
        for wins in (exponential, identity):
            assert wins["low"] <= wins["mean"] <= wins["high"]
            assert (wins["low"] < wins["mean"]) == (
                supported_correlation(found["rho"]["low"]) < supported_correlation(found["rho"]["mean"])
            )
        assert share(identity) in re.sub(r"<[^>]+>", "", html_of(run[1]))


def test_policies_that_follow_the_law_win_by_the_judge_what_is_expected(run):
    """The judge of this run hears noise on the rank: what A promises is what it measures, below its own optimum."""
    results = read_results(run[1])
    for judge, found in results["judged"].items():
        for name, expected in found["at_kl"].items():
            measured = results["policies"][name]["win_rates"][judge]["best-of-4"]
            assert measured["low"] - 0.02 < expected["expected"]["mean"] < measured["high"] + 0.02
            assert 0.5 < expected["expected"]["mean"] < expected["optimum"]["mean"]
            for e in expected.values():
                assert e["low"] < e["mean"] < e["high"]
                assert share(e) in re.sub(r"<[^>]+>", "", html_of(run[1]))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.03, "beats identity (rloo) by +2.0 points (+1.0 to +3.0)."),
        (-0.03, -0.01, "loses to identity (rloo) by −2.0 points (−3.0 to −1.0)."),
        (-0.01, 0.03, "cannot be told from identity (rloo), +1.0 points (−1.0 to +3.0)."),
    ],
)
def test_verdict_on_the_training_follows_the_interval(run, low, high, said):
    """The verdict on a gain says better, worse or undecided by where zero lies in its interval."""
    results = read_results(run[1])
    gains = {"mean": (low + high) / 2, "low": low, "high": high}
    results["matched"]["judges"]["judge"]["gain_over"]["identity (rloo)"] = gains
    assert f"by the judge, training on exp:10 (qrpo) {said}" in verdict(results)[1]


def test_verdict_ships_the_policy_that_the_judge_is_sure_of(run):
    """It names the policy with the highest win rate by the judge, or the reference if chance is in its interval."""
    results = read_results(run[1])
    for name, wins in (("aware", 0.6), ("plain", 0.7)):
        results["policies"][name]["win_rates"]["judge"]["best-of-4"] = around(wins)
    assert verdict(results)[0].startswith("Ship plain: by the judge it wins 70.0% (68.0–72.0) of pairs")
    assert "Within that interval too" not in verdict(results)[0]
    results["policies"]["aware"]["win_rates"]["judge"]["best-of-4"] = around(0.69)
    results["policies"]["aware"]["kl"] = around(0.2)
    level = "Within that interval too: aware with 69.0% (67.0–71.0) for 0.20 (0.18–0.22) nats, 40% of its budget."
    assert verdict(results)[0].endswith(level)
    for policy in results["policies"].values():
        policy["win_rates"]["judge"]["best-of-4"] = around(0.51)
    assert verdict(results)[0].startswith("Keep the reference: by the judge no policy is sure to beat it.")


@pytest.mark.parametrize(
    ("wins", "said"),
    [
        ([0.6, 0.65, 0.7, 0.68, 0.66], "largest at N = 3, 70.0% (68.0–72.0); at N = 5 66.0% (64.0–68.0)."),
        ([0.6, 0.61, 0.62, 0.63, 0.64], "largest at N = 5, 64.0% (62.0–66.0), the most that was measured."),
        (
            [0.6, 0.55, 0.53, 0.51, 0.49],
            "largest at N = 1, 60.0% (58.0–62.0); at N = 5 49.0% (47.0–51.0); from N = 4 on it may be gone.",
        ),
    ],
)
def test_verdict_says_for_which_n_it_pays(run, wins, said):
    """It has the N of the largest lead, the lead at the largest N, and from where on chance is in the interval."""
    results = read_results(run[1])
    for policy in results["policies"].values():
        for n, share_won in enumerate(wins, start=1):
            policy["win_rates"]["judge"][f"best-of-{n}" if n > 1 else "standard"] = around(share_won)
    assert said in verdict(results)[2]


@pytest.mark.parametrize(
    ("spent", "theory", "by_reward", "by_judge", "by_gold", "cure"),
    [
        (0.3, None, 0.7, 0.7, 0.7, "the rest of the kl_budget, of which 60% is spent"),
        (0.5, None, 0.7, 0.7, 0.7, "a larger kl_budget, with the same rollouts"),
        (None, None, 0.51, 0.51, 0.51, "more rollout.prompts"),
        (None, 0.85, 0.9, 0.7, 0.5, f"a better reward model than this, {AGREEING}"),
        (None, 0.85, 0.7, 0.7, 0.6, f"more rollout.prompts: by the reward it wins 70.0% (68.0–72.0) {PROMISED}"),
        (None, 0.85, 0.84, 0.7, 0.6, "a larger kl_budget"),
        (None, 0.85, 0.51, 0.7, 0.5, f"more rollout.prompts: by the reward it wins 51.0% (49.0–53.0) {PROMISED}"),
    ],
)
def test_verdict_names_what_limits_the_policy(run, spent, theory, by_reward, by_judge, by_gold, cure):
    """Unspent budget, a gold that sees no gain, theory that did not arrive, or the budget; no word of absent theory."""
    results = read_results(run[1])
    for policy in results["policies"].values():
        policy["theory"] = theory and {"best-of-4": theory}
        policy["kl"] = around(spent) if spent else policy["kl"]
        for judge, share_won in (("reward", by_reward), ("judge", by_judge), ("gold", by_gold)):
            policy["win_rates"][judge] = dict.fromkeys(policy["win_rates"][judge], around(share_won))
    assert f"Next: {cure}" in verdict(results)[-1]
    assert theory or "theory" not in verdict(results)[-1]


def around(mean: float) -> dict[str, float]:
    """Return an estimate that is sure to two points."""
    return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}


def test_control_characters_of_a_model_are_shown_as_such(tmp_path):
    """A page cannot hold them, wherever a model or a prompt has them; new lines and tabs stay."""
    recipe = make_recipe(tmp_path, policies={"only": QRPO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, said="a\0b\x1b[31mc\x7fd\x85e\n\tf")
    report(recipe, tmp_path)
    html = html_of(tmp_path)
    assert "only says a\ufffdb\ufffd[31mc\ufffdd\ufffde\n\tf" in html
    assert set(re.findall(r"[\x00-\x1f\x7f-\x9f]", html)) == {"\n", "\t"}


def test_served_example_is_the_best_of_the_first_n(run):
    """An example's response has the highest reward of the model's first four samples for that prompt."""
    recipe, root = run
    evaluated = ScoredSamples.of(recipe, Layout(root))
    rewards = evaluated.column("aware", "reward")
    for p, example in enumerate(examples(evaluated, recipe.policies)):
        aware = next(model for model in example["models"] if model["name"] == "aware")
        served, plain = aware["responses"]
        assert served["rewards"]["reward"] == rewards[p, :4].max()
        index = p * SAMPLES + int(rewards[p, :4].argmax())
        assert served["text"] == f"aware says {ATTACK} {index}"
        assert plain["text"] == f"aware says {ATTACK} {p * SAMPLES}"
        assert sorted(model["order"] for model in example["models"]) == [0, 1, 2]


def test_a_rewinding_procedure_serves_the_first_example_above_the_quantile(tmp_path):
    """Of a model's samples in their order the first that reaches the reference's quantile, else the best."""
    name = "rewind:0.85:8:best"
    evaluate = {"prompts": PROMPTS, "samples": SAMPLES, "max_n": 2, "rewind": name}
    recipe = make_recipe(tmp_path, policies={"only": QRPO}, gold=False, judge=None, procedure=name, evaluate=evaluate)
    finish_run(tmp_path, recipe)
    evaluated = ScoredSamples.of(recipe, Layout(tmp_path))
    base, places = evaluated.column("reference", "reward"), set()
    for p, example in enumerate(examples(evaluated, recipe.policies)):
        for model in example["models"]:
            drawn = evaluated.column(model["name"], "reward")[p, :8]
            above = np.flatnonzero(drawn >= np.quantile(base[p], 0.85))
            places.add(place := above[0] if above.size else drawn.argmax())
            assert model["responses"][0]["rewards"]["reward"] == drawn[place]
    assert len(places) > 2
    report(recipe, tmp_path)
    assert "8 draws at most, and serve it, or the best where none does." in html_of(tmp_path)


def test_saturation_of_exchangeable_samples_is_one_in_k_plus_one(run):
    """Fresh base samples beat all K calibrating ones with probability 1/(K + 1), which the interval covers."""
    recipe, root = run
    found = saturated(ScoredSamples.of(recipe, Layout(root)), recipe.policies)
    assert found["reference"]["low"] <= 1 / (SAMPLES // 2 + 1) <= found["reference"]["high"]
    assert found["aware"]["low"] > found["reference"]["high"]


def test_units_that_left_the_recipe_are_not_of_it(run):
    """Their seconds are not counted, and nothing is said against the results because of them."""
    page = html_of(run[1])
    seconds = dict(re.findall(r"<th scope=\"row\">([\w-]+)</th><td>([\d.]+)</td><td><span class=\"bar\"", page))
    assert (seconds["train"], seconds["evaluate"], seconds["calibrate"]) == ("3.0", "4.5", "1.5")
    assert "rank-model" not in page


def test_rewards_have_the_confidence_of_their_fitting(tmp_path):
    """Another one asked for later does not fit them again, and does not say so of their intervals."""
    recipe = make_recipe(tmp_path, policies={"only": QRPO}, gold=False, judge=None)
    finish_run(tmp_path, recipe)
    path = tmp_path / "stages" / "reward.json"
    fitted = read_record(path)
    fitted["summary"]["confidence"] = 0.8
    write_record(path, fitted)
    report(recipe, tmp_path)
    assert "on held-out pairs, with 80% intervals" in html_of(tmp_path)


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


ONE: dict[str, object] = {"policies": {"only": QRPO}, "gold": False}
TIES = {"one": RLOO, "two": RLOO | {"kl_budget": 1.0}}


@pytest.mark.parametrize(
    ("asked", "levels"),
    [
        (ONE, None),
        ({"policies": TIES}, 3),
        *(
            (ONE | {"judge": None, "procedure": procedure}, None)
            for procedure in ("standard", "2nd-best-of-4", "0.5*best-of-2+0.5*standard")
        ),
    ],
)
def test_every_run_has_a_report(tmp_path, asked, levels):
    """Without a second method no comparison, without gold no gold, without an N none to choose; ties may be."""
    recipe = make_recipe(tmp_path, **asked)
    finish_run(tmp_path, recipe, levels=levels)
    report(recipe, tmp_path)
    html, served = html_of(tmp_path), recipe.procedure.name
    assert "At the same KL" not in html
    assert ("the gold" in html) == asked.get("gold", True)
    assert f"both served as {served}" in html
    n_is_chosen = any("largest at N" in paragraph for paragraph in verdict(read_results(tmp_path)))
    assert not n_is_chosen or served == "best-of-4"
    assert served in printed(tmp_path, 120) or served == "standard"
    assert printed(tmp_path, 80).count("theory") == 0 or "procedure" in asked


def test_results_of_another_version_are_refused(tmp_path):
    """Numbers in another form are named with the cure, not read as far as they go."""
    for content in ({"policies": {}}, {"format": 0}):
        (tmp_path / "results.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=r"results\.json was written by another version"):
            read_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match=r"results\.json is damaged"):
        read_results(tmp_path)


def test_a_policy_that_ran_away_has_a_report(tmp_path):
    """Beyond what its transformation can spend there is no theory for a policy, and all that was measured is there."""
    recipe = make_recipe(tmp_path, policies={"far": RLOO, "plain": QRPO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, kl=5000.0)
    report(recipe, tmp_path)
    policies = read_results(tmp_path)["policies"]
    assert policies["far"]["theory"] is None
    assert policies["plain"]["theory"] is not None
    assert amount(policies["far"]["kl"]) in re.sub(r"<[^>]+>", "", html_of(tmp_path))


def test_the_best_policies_have_a_look_and_the_others_are_counted(tmp_path, monkeypatch):
    """With more policies than looks, twelve that differ, the figures name those that the judge says win most."""
    assert len(set(LOOKS)) == len(LOOKS) == 12
    monkeypatch.setattr("infalign.evaluation.judge.MIN_JUDGED_SAMPLES", 10**9)  # estimates take long
    budgets = {f"p{i}": QRPO | {"kl_budget": 0.1 + 0.1 * i} for i in range(14)}
    recipe = make_recipe(tmp_path, policies=budgets, gold=False)
    finish_run(tmp_path, recipe)
    report(recipe, tmp_path)
    policies = read_results(tmp_path)["policies"]
    wins = {name: policy["win_rates"]["judge"]["best-of-4"]["mean"] for name, policy in policies.items()}
    for picture in ("win-rate-by-kl-judge", "best-of-n-judge"):
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "figures" / f"{picture}.svg").read_text())
        named = {text for text in texts if text in wins}
        assert len(named) == 12
        assert min(wins[name] for name in named) >= max(wins[name] for name in wins.keys() - named)
        assert "2 other policies" in texts


@pytest.mark.parametrize("judges", [["reward"], ["judge", "gold"]])
def test_two_thousand_policies_leave_room_for_the_axes(run, judges):
    """Neither legend nor layout grows with the number of policies (matplotlib warns of a figure that collapses)."""
    recipe, root = run
    results = read_results(root)
    some = results["policies"]["aware"]
    results["policies"] = {f"p{i}": some for i in range(2000)}
    results["pareto"] = {judge: {key: ["p0"] for key in fronts} for judge, fronts in results["pareto"].items()}
    solver, aim = recipe.policies["aware"], recipe.procedure
    looks = {f"p{i}": Look(*(LOOKS[i] if i < 12 else (QUIET, ".")), solver, aim) for i in range(2000)}
    for picture in (
        win_rate_by_kl(results, aim, judges, looks, theory_curves(results, looks)),
        win_rate_by_n(results, judges[0], "best", looks),
    ):
        picture.figure.savefig(io.BytesIO(), format="png")
        (axes,) = picture.figure.axes
        assert axes.get_position().height > 0.3
        assert "1,988 other policies" in picture.alt


def printed(root: Path, width: int) -> str:
    """Return what the terminal shows."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        print_table(root, console)
    return capture.get()


def test_table_fits_the_terminal(run):
    """At 80 columns every policy, interval and gain stands whole on one line, and the path is last."""
    results, shown = read_results(run[1]), printed(run[1], 80)
    *lines, path = shown.rstrip().split("\n")
    assert max(map(len, lines)) <= 80
    for policy in results["policies"].values():
        for wins in policy["win_rates"].values():
            assert share(wins["best-of-4"]) in shown
    assert gain(results["matched"]["judges"]["judge"]["gain_over"]["identity (rloo)"]) in shown
    assert path == f"Report: {run[1] / 'report.html'}"


def test_the_terminal_says_how_well_policies_know_ranks(run):
    """Each with its interval, or nothing."""
    rho = {"mean": 0.5, "low": 0.4, "high": 0.6}
    said = ["The policies know the final rank with ρ = 0.50 (0.40–0.60) (aware)."]
    assert knowledge({"knowledge": {"aware": {"rho": rho}}}) == said
    assert knowledge({"knowledge": {}}) == []
    (said,) = knowledge(read_results(run[1]))
    assert said in " ".join(printed(run[1], 80).split())


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.2, 0.1, "To no policy are"),
        (0.1, 0.2, "To no policy are"),
        (-0.2, -0.1, "to aware (−0.150 (−0.200 to −0.100))"),
    ],
)
def test_only_a_policy_that_is_surely_worse_at_held_out_responses_is_called_so(low, high, said):
    """The whole interval of its difference is below 0."""
    change = {"mean": (low + high) / 2, "low": low, "high": high}
    (found,) = likelihood_in_words({"held_out_likelihood": {"policies": {"aware": {"difference": change}}}})
    assert said in found


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


def test_the_explorer_is_in_the_report_with_its_policies(run, browser):
    """The page allows its script and no other; it opens with the run's procedure and draws the run's policies."""
    browser.get_log("browser")
    show(browser, run[1] / "report.html", 1200)
    browser.find_element("css selector", "details:has(iframe) summary").click()
    browser.switch_to.frame(browser.find_element("tag name", "iframe"))
    assert "best-of-4" in browser.find_element("id", "said").text.lower().replace("best of 4", "best-of-4")
    words = {text.text for text in browser.find_elements("css selector", "svg text")}
    browser.switch_to.default_content()
    assert set(json.loads((run[1] / "results.json").read_text())["policies"]) <= words
    assert browser.get_log("browser") == []
