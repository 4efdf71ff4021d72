"""The numbers of a run whose answer is known, and the words of verdict and terminal."""

import json
import re

import pytest
from known_run import QRPO, RLOO, around, finish_run, make_recipe, printed

from infalign.core.display import gain, share
from infalign.core.errors import DataError
from infalign.method.procedures import BestOfN
from infalign.method.transforms import parse_transform
from infalign.report.results import read_results
from infalign.report.tables import comparison_rows
from infalign.report.verdict_text import verdict
from infalign.theory.law import law_at_kl

AGREEING = "the ranks of this one agree with the gold reward at"
SHORT = "raise rollout.prompts. The win rate by the reward is"
PROMISED = "theory allows 85.0%"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.03, "beats identity (rloo) by +2.0 points (+1.0 to +3.0)."),
        (-0.03, -0.01, "loses to identity (rloo) by −2.0 points (−3.0 to −1.0)."),
        (-0.01, 0.03, "is not significantly different from identity (rloo), +1.0 points (−1.0 to +3.0)."),
    ],
)
def test_verdict_on_the_training_follows_the_interval(run, low, high, said):
    """The verdict on a gain says better, worse or undecided by where zero lies in its interval."""
    results = read_results(run[1])
    gains = {"mean": (low + high) / 2, "low": low, "high": high}
    results["matched"]["judges"]["judge"]["gain_over"]["identity (rloo)"] = gains
    assert f"by the judge, training on exp:10 (qrpo) {said}" in verdict(results)[1]


def test_verdict_ships_the_policy_that_the_judge_is_sure_of(run):
    """Of those with a significant win rate by the judge it names the highest; the reference, if there is none."""
    results = read_results(run[1])
    for name, wins in (("aware", {"mean": 0.8, "low": 0.49, "high": 0.99}), ("plain", around(0.7))):
        results["policies"][name]["win_rates"]["judge"]["best-of-4"] = wins
    assert verdict(results)[0].startswith(
        "Recommended: plain. Its best-of-4 win rate against the reference is 70.0% (68.0–72.0) by the judge, at"
    )
    for policy in results["policies"].values():
        policy["win_rates"]["judge"]["best-of-4"] = around(0.51)
    assert verdict(results)[0].startswith(
        "Recommended: keep the reference. By the judge, no policy is significantly better"
    )


@pytest.mark.parametrize(
    ("spent", "theory", "by_reward", "by_judge", "by_gold", "cure"),
    [
        (0.3, None, 0.7, 0.7, 0.7, "spend the other 40% of kl_budget"),
        (0.5, None, 0.7, 0.7, 0.7, "raise kl_budget, with the same rollouts"),
        (None, None, 0.51, 0.51, 0.51, "raise rollout.prompts"),
        (None, 0.85, 0.9, 0.7, 0.5, f"lower kl_budget, or use a better reward model; {AGREEING}"),
        (None, 0.85, 0.7, 0.7, 0.6, f"{SHORT} 70.0% (68.0–72.0); {PROMISED}"),
        (None, 0.85, 0.84, 0.7, 0.6, "raise kl_budget"),
        (None, 0.85, 0.51, 0.7, 0.5, f"{SHORT} 51.0% (49.0–53.0); {PROMISED}"),
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
    assert f"To improve: {cure}" in verdict(results)[-1]
    assert theory or "theory" not in verdict(results)[-1]


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
    ("spent", "said"), [(0.57, r"extrapolated from 0\.5\d nats"), (2.0, r"not compared: at least \d\.\d\d nats")]
)
def test_a_method_that_spent_more_is_brought_down_or_not_compared(tmp_path, spent, said):
    """Table, terminal and verdict say the same of it: it has a win rate and a star, or neither."""
    recipe = make_recipe(tmp_path, policies={"aware": QRPO, "plain": RLOO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, kl=spent)
    rows, shown = comparison_rows(read_results(tmp_path)), printed(tmp_path, 120)
    row, compared = next(row for row in rows if row["method"] == "exp:10 (qrpo)"), spent < 1
    assert re.fullmatch(said, row["outside"])
    assert (row["wins"] != "–") == compared == ("exp:10 (qrpo) *" in shown) == ("extrapolated down to this KL" in shown)
    assert ("exp:10 (qrpo) is not compared" in shown) == (not compared)


def test_results_of_another_version_are_refused(tmp_path):
    """Numbers in another form are named with the cure, not read as far as they go."""
    for content in ({"policies": {}}, {"format": 0}):
        (tmp_path / "results.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=r"results\.json was written by another version"):
            read_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match=r"results\.json is damaged"):
        read_results(tmp_path)


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


def checked(aware: float, ahead: float, over_raw: dict | None) -> dict:
    """Numbers of a run that serves pass@2: the reference is right in 40 %, raw in 52, ``aware`` is ``ahead`` of it."""

    def rates(name: str, two: float, lead: float, other: dict | None) -> dict:
        over = {"raw" if name == "aware" else "aware": other}
        leads = {"1": -0.05, "2": lead, "4": 0.01}
        return {k: around(two) | {"over": {"reference": around(found)} | over} for k, found in leads.items()}

    over_aware = over_raw and over_raw | {"mean": -over_raw["mean"], "low": -over_raw["high"], "high": -over_raw["low"]}
    reference = {k: around(0.4) for k in ("1", "2", "4")}
    return {
        "pass_at_k": {
            "reference": reference,
            "raw": rates("raw", 0.52, 0.12, over_aware),
            "aware": rates("aware", aware, ahead, over_raw),
        },
        "policies": {"raw": {"kl": around(0.06)}, "aware": {"kl": around(0.02)}},
        "truth": {"served": 2},
        "confidence": 0.95,
    }


@pytest.mark.parametrize(
    ("mean", "said"), [(0.03, "+3.0 points (+1.0 to +5.0)"), (0.01, "+1.0 points (−1.0 to +3.0), not significant")]
)
def test_a_checkers_verdict_is_in_pass_at_k_at_one_kl(mean, said):
    """The policy ahead at one KL is recommended, also if the other has more for three times the KL; each k is named."""
    first, behind, _ = verdict(checked(0.5, 0.1, around(mean) | {"kl": 0.02}))
    assert first == (
        "Recommended: aware. pass@2 is 50.0% (48.0–52.0) for aware at 0.02 nats, 40.0% (38.0–42.0) for the reference. "
        f"aware − raw at the same KL, 0.02 nats: pass@2 {said}, pass@1 {said}."
    )
    assert behind == "aware is significantly below the reference at k = 1."


def test_a_checkers_verdict_does_not_rank_what_is_not_comparable():
    """Then the largest pass@k is no recommendation; and a policy that is not ahead of the reference is none either."""
    first, *_ = verdict(checked(0.5, 0.1, None))
    assert first.startswith("Highest pass@2: raw. pass@2 is 52.0% (50.0–54.0) for raw at 0.06 nats, 40.0%")
    assert first.endswith("for the reference. Not comparable with aware at 0.02 nats.")
    results = checked(0.5, 0.01, None)
    results["pass_at_k"]["raw"]["2"]["over"]["reference"] = around(0.01)
    kept, _ = verdict(results)
    assert kept.startswith("Recommended: keep the reference. No policy is significantly better: pass@2 is 52.0%")


@pytest.mark.parametrize("spent", [0.55, 2.0])
def test_every_two_policies_are_compared_in_pass_at_k_at_one_kl(tmp_path, spent):
    """Table and results have the difference at the smaller KL, the same both ways, or that they are not comparable."""
    recipe = make_recipe(tmp_path, policies={"aware": QRPO, "plain": RLOO}, gold=False, judge=None)
    finish_run(tmp_path, recipe, levels=1, kl=spent)
    results, shown = read_results(tmp_path), " ".join(printed(tmp_path, 160).split())
    kl = results["policies"]["plain"]["kl"]["mean"]
    for k in ("1", "2", "4"):
        lead, other = (results["pass_at_k"][a][k]["over"][b] for a, b in (("aware", "plain"), ("plain", "aware")))
        if spent > 1:
            assert lead is None is other
            continue
        assert lead["kl"] == other["kl"] == kl
        assert [lead["mean"], lead["low"]] == pytest.approx([-other["mean"], -other["high"]], abs=2e-3)
        assert lead["mean"] < results["pass_at_k"]["aware"][k]["mean"] - results["pass_at_k"]["plain"][k]["mean"]
        assert (gain(lead) in shown) == (k != "2")
    at = f"not comparable: 2 and {kl:.2g} nats" if spent > 1 else f"at {kl:.2g} nats"
    assert f"aware − plain, {at}" in shown
