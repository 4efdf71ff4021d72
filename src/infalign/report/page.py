"""The report of a finished run: one HTML file that opens offline."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from infalign.core.display import LOOKS
from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.core.storage import read_table, write_text
from infalign.data.messages import prompts_of
from infalign.evaluation.diagnostics import rank_error
from infalign.evaluation.worth import about_budgets, budget_rows
from infalign.method.calibration import Array
from infalign.method.procedures import BaseQuantile, Draws, Served, Standard
from infalign.pipeline.records import Record, records
from infalign.pipeline.units import Summary
from infalign.recipe.layout import Layout
from infalign.recipe.reading import dump_recipe
from infalign.recipe.settings import Recipe
from infalign.recipe.stored_laws import reference_rewards, stored_budgets
from infalign.report import run_figures as draw
from infalign.report.equal_kl import MAX_EXTRAPOLATION
from infalign.report.findings import findings, sentences
from infalign.report.results import Results, read_results
from infalign.report.run_figures import STYLE, Look, Picture, save_picture
from infalign.report.scored_samples import ScoredSamples
from infalign.report.tables import checker_only, comparison_rows, differences, shown_ks
from infalign.report.templates import embedded, html_template
from infalign.report.verdict_text import SPOKEN, verdict
from infalign.sampling.rollouts import find_rollouts

SHOWN_EXAMPLES = 4


def write(recipe: Recipe, layout: Layout, finished: Sequence[str], *, on_progress: OnProgress) -> Summary:
    """Write ``report.html`` with embedded figures, and the same figures as ``figures/*.svg`` and ``*.png``.

    ``layout`` is that of a run whose evaluation is done, and ``finished`` names the units whose records count. Raises
    ConfigError without matplotlib or jinja2.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib
    except ImportError as error:
        raise ConfigError("the report needs matplotlib and jinja2; pip install 'infalign[report]'") from error
    folder, evaluated = layout.root / "figures", ScoredSamples(recipe, layout)
    recorded = records(layout.root)
    results, made = read_results(layout.root), {name: recorded[name] for name in finished if name in recorded}
    against = [finding for record in made.values() for finding in findings(recipe, record)]
    budgets = stored_budgets(recipe.policies, recipe.procedure, layout)
    looks = {
        name: Look(*look, policy.transformation, partial(evaluated.law_at, policy))
        for (name, policy), look in zip(recipe.policies.items(), cycle(LOOKS), strict=False)
    }
    with matplotlib.rc_context(STYLE):
        pictures = _pictures(evaluated, results, made, looks)
        folder.mkdir(exist_ok=True)
        figures = {section: [save_picture(p, folder) for p in gallery] for section, gallery in pictures.items()}
    of_kl = figures["kl"][len(results["judges"]) > 1 :]
    lead = (figures["pass_at_k"] + of_kl)[: 1 if figures["n"] else 2] + figures["n"][:1]
    html = html_template("report.html.j2").render(
        recipe=recipe,
        recipe_yaml=dump_recipe(recipe),
        near=MAX_EXTRAPOLATION,
        results=results,
        spoken=SPOKEN,
        differences=differences(results),
        right_or_wrong=evaluated.right_or_wrong,
        checker_only=checker_only(results),
        looks=looks,
        findings=sentences(against),
        verdict=verdict(results),
        ks=shown_ks(results),
        comparison=comparison_rows(results),
        figures=figures,
        lead=lead,
        results_json=embedded(layout.results, "application/json"),
        budgets=budgets,
        about_budgets=about_budgets(budgets[0]) if budgets else [],
        budget_rows=budget_rows(budgets) if budgets else [],
        examples=examples(evaluated, recipe.policies),
        records=made,
        rank_error=rank_error(recipe.rollout.k),
        facts=facts(recipe, made),
    )
    write_text(layout.report, html)
    return {}


def _pictures(
    evaluated: ScoredSamples, results: Results, made: Mapping[str, Record], looks: Mapping[str, Look]
) -> dict[str, list[Picture]]:
    judges = [] if checker_only(results) else sorted(results["judges"], key=("judge", "reward", "gold").index)
    others: list[Served] = [] if checker_only(results) else [Standard(), evaluated.rewind]
    served = results["truth"]["served"] if checker_only(results) else None
    return {
        "kl": [draw.pass_at_k_by_kl(results, str(served), looks)]
        if served
        else [
            draw.win_rate_by_kl(results, procedure, by, looks)
            for procedure in dict.fromkeys([evaluated.procedure, *others])
            for by in (["reward"], *([results["judges"][1:]] if len(results["judges"]) > 1 else []))
        ],
        "n": [draw.win_rate_by_n(results, judge, kind, looks) for judge in judges for kind in ("best", "worst")],
        "pass_at_k": [draw.pass_at_k(results, looks), *draw.leads_by_k(results, looks)]
        if "pass_at_k" in results
        else [],
        "calibration": [] if evaluated.right_or_wrong else [draw.reward_by_rank(reference_rewards(evaluated.layout))],
        "training": [draw.training_curves(record, looks) for record in made.values() if "history" in record["summary"]],
    }


def examples(evaluated: ScoredSamples, policies: Iterable[str]) -> list[dict[str, Any]]:
    """Return the first test prompts, each with what every model serves of its samples in order, and its first."""
    procedure, layout = evaluated.procedure, evaluated.layout
    base_PM = evaluated.column("reference", "reward")
    table = read_table(layout.prompts("test"), ["prompt_id", "prompt"]).slice(0, len(evaluated.kept))
    table = table.filter(evaluated.kept).slice(0, SHOWN_EXAMPLES)
    prompt_ids = [str(prompt_id) for prompt_id in table["prompt_id"].to_pylist()]
    shown: list[dict[str, Any]] = [{"prompt": prompt, "models": []} for prompt in prompts_of(table)]
    for name in ("reference", *policies):
        rewards = {source: evaluated.column(name, source) for source in evaluated.sources}
        drawn = find_rollouts(layout.evaluation(name) / "samples", prompt_ids, evaluated.samples)
        texts, finishes = drawn.values("text"), drawn.values("finish")
        for p, example in enumerate(shown):
            responses = []
            served = _served(procedure, rewards["reward"][p], base_PM[p], np.random.default_rng(p))
            for way, index in {procedure.name: served, "first sample": 0}.items():
                place = p * evaluated.samples + index
                scores = {source: float(values[p, index]) for source, values in rewards.items()}
                cut_off = finishes[place] == "length"
                responses.append({"way": way, "text": texts[place], "cut_off": cut_off, "rewards": scores})
            example["models"].append({"name": name, "responses": responses})
    return shown


def _served(procedure: Served, rewards_M: Array, base_M: Array, rng: np.random.Generator) -> int:
    """Return which sample ``procedure`` serves if it draws them in order, with the base's quantile from its samples."""
    serving, drawn = procedure.serving(rng), 0
    try:
        ask = next(serving)
        while True:
            match ask:
                case Draws(number):
                    ask = serving.send(rewards_M[drawn : drawn + number].tolist())
                    drawn += number
                case BaseQuantile(quantile):
                    ask = serving.send([float(np.quantile(base_M, quantile))])
    except StopIteration as ended:
        return int(ended.value)


def facts(recipe: Recipe, made: Mapping[str, Record]) -> dict[str, dict[str, str]]:
    """Return further facts for judging or repeating the run: counts of the data stage, sampling, versions, seconds."""
    rollout, test = recipe.rollout, recipe.evaluate
    summaries = {name: record["summary"] for name, record in made.items()}
    cut_off, seconds = dict[str, str](), Counter[str]()
    versions = defaultdict[str, dict[str, None]](dict)  # of each library; several if stages ran with different ones
    for record in made.values():
        seconds[record["stage"]] += record["seconds"]
        for library, version in record["versions"].items():
            versions[library][version] = None
        if record["kind"] == "evaluate":
            summary = record["summary"]
            cut_off[record["subject"]] = f"{summary['cut_off']:.1%} of {summary['samples']:,}"
    test_prompts = summaries["evaluate-reference"]["samples"] // test.samples
    rollouts = [record["summary"] for record in made.values() if record["kind"] == "score"]
    if total := sum(summary["responses"] for summary in rollouts):
        share_cut = sum(summary["cut_off"] * summary["responses"] for summary in rollouts) / total
        cut_off = {"training rollouts": f"{share_cut:.1%} of {total:,}"} | cut_off
    return {
        "Data": {
            name.replace("_", " "): f"{value:,}" if isinstance(value, int) else ", ".join(value)
            for name, value in summaries.get("data", {}).items()
            if name != "example" and value
        },
        "Sampling": {
            "temperature": "1, without top-k or top-p",
            "engine": rollout.engine.kind,
            "training": f"{summaries['calibrate']['prompts']} prompts × {rollout.k} rollouts",
            "evaluation": f"{test_prompts} prompts × {test.samples} samples",
            "seed": str(recipe.seed),
        },
        f"Responses cut off at {rollout.max_new_tokens} tokens": cut_off,
        "Versions": {library: ", ".join(every) for library, every in versions.items()},
        "Seconds per stage (stages can overlap)": {stage: f"{spent:.1f}" for stage, spent in seconds.items()},
    }
