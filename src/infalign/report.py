"""The report of a finished run: one HTML file that opens offline, its figures, and a short table for the terminal."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infalign.calibration import Array, calibrate
from infalign.config import Recipe, dump_recipe
from infalign.data import atomic_path, read_table, write_text
from infalign.errors import ConfigError
from infalign.evaluation import estimate, rank_error, saturation, uniformity
from infalign.figures import COLOURS, INK, PAPER, QUIET
from infalign.figures import STYLE as ANY_STYLE
from infalign.procedures import BestOfN, WorstOfN, parse_procedure
from infalign.results import drawn_procedures, read_results
from infalign.stages.calibrate import reference_rewards
from infalign.stages.evaluate import samples_of
from infalign.stages.laws import method_law, policy_betas
from infalign.stages.layout import Layout, parts, records
from infalign.stages.models import reward_names, reward_source
from infalign.theory import Law

Numbers = dict[str, Any]

MARKERS = "osD^vP"
STYLE = ANY_STYLE | {"lines.linewidth": 1.3, "lines.markersize": 5, "axes.facecolor": "none"}
SPOKEN = {"reward": "the reward itself", "judge": "the judge", "gold": "the gold"}
SHOWN_PROMPTS = 10  # curves of the calibration figure
SHOWN_EXAMPLES = 4
CHANCE_DRAWS = 200


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, the words below it and the words instead of it."""

    name: str
    figure: Any  # matplotlib.figure.Figure
    caption: str
    alt: str


def write(recipe: Recipe, root: Path) -> None:
    """Write ``report.html``, which holds its figures, and the same figures as ``figures/*.svg`` and ``*.png``.

    ``root`` is a run directory whose evaluation is done. Raises ConfigError without matplotlib or jinja2.
    """
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise ConfigError("the report needs matplotlib and jinja2; pip install 'infalign[report]'") from error

    results, made = read_results(root), _made(recipe, root)
    looks = {name: Look(COLOURS[i % 6], MARKERS[i % 6]) for i, name in enumerate(recipe.policies)}
    with matplotlib.rc_context(STYLE):
        pictures = {
            "kl": [
                win_rate_by_kl(results, procedure, judges, looks)
                for procedure in drawn_procedures(recipe)
                for judges in (["reward"], results["judges"][1:])
            ],
            "n": [
                win_rate_by_n(results, judge, kind, looks)
                for judge in ("judge", "reward")
                for kind in ("best", "worst")
            ],
            "calibration": [reward_by_rank(recipe, root), rank_histogram(recipe, root, results)],
            "training": [
                training_curves(name, record["summary"]["history"], looks.get(name.removeprefix("train-")))
                for name, record in made.items()
                if "history" in record["summary"]
            ],
        }
        if "gold" in results["judges"]:
            pictures["n"] += [win_rate_by_n(results, "gold", kind, looks) for kind in ("best", "worst")]
        figures = {section: [_save(p, root / "figures") for p in found] for section, found in pictures.items()}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infalign"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "amount": amount, "gain": gain}
    html = environment.get_template("report.html.j2").render(
        recipe=recipe,
        recipe_yaml=dump_recipe(recipe),
        rewind=parse_procedure(recipe.evaluate.rewind),
        results=results,
        spoken=SPOKEN,
        looks=looks,
        verdict=verdict(results),
        comparison=compare(results),
        figures=figures,
        betas={name: policy_betas(recipe, root, name) for name in recipe.policies},
        saturation=saturated(recipe, root),
        examples=examples(recipe, root),
        records=made,
        rank_error=rank_error(recipe.rollout.k),
        facts=facts(recipe, made),
        seconds=_seconds(made),
    )
    write_text(root / "report.html", html)


def print_table(root: Path, console: Console) -> None:
    """Print the numbers of a finished run: each policy by each judge, the comparison at one KL, where the report is."""
    results = read_results(root)
    procedure = results["procedure"]
    spent = f"{results['prompts']} test prompts × {results['samples']} samples, {results['confidence']:.0%} intervals"
    table = plain_table("policy", "judged by", "KL, nats", "standard, %")
    if procedure != "standard":
        table.add_column(f"{procedure}, %", no_wrap=True)
    for name, policy in results["policies"].items():
        for judge, wins in policy["win_rates"].items():
            first = judge == results["judges"][0]
            served = [wins["standard"], wins[procedure]][: 1 + (procedure != "standard")]
            table.add_row(name if first else "", judge, amount(policy["kl"]) if first else "", *map(share, served))
        table.add_section()
    console.print(f"\n[bold]Win rate against the reference, both served alike[/]\n{spent}", highlight=False)
    console.print(table)
    if rows := compare(results):
        matched = results["matched"]
        table = plain_table("judged by", "trained on", f"{procedure}, %", "theory", "gain, points")
        for row in rows:
            judge = row["judge"] if row["first"] else ""
            table.add_row(judge, escape(row["method"]), row["wins"], row["theory"], row["gain"])
            if row["last"]:
                table.add_section()
        title = f"Gain of {matched['first']} over the others at the same KL, {matched['kl']:.2f} nats"
        console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
        console.print(table)
    console.print(f"\nReport: {root / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def plain_table(*columns: str) -> Table:
    """Return an empty table of two columns of names, which break where space is short, the others unbroken."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i > 1)
    return table


# Words


def share(e: Mapping[str, float]) -> str:
    """Return an estimated share in per cent with its interval: ``71.2 (69.5–72.9)``."""
    return amount({key: 100 * value for key, value in e.items()}, digits=1)


def amount(e: Mapping[str, float], digits: int = 2) -> str:
    """Return an estimate with its interval: ``0.93 (0.88–0.98)``."""
    return f"{e['mean']:.{digits}f} ({e['low']:.{digits}f}–{e['high']:.{digits}f})"


def gain(e: Mapping[str, float]) -> str:
    """Return a difference of shares in percentage points with its interval: ``+1.2 (−0.4 to +2.8)``."""
    return "{} ({} to {})".format(*(_points(e[key]) for key in ("mean", "low", "high")))


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def verdict(results: Numbers) -> list[str]:
    """Return the outcome in sentences: each policy against the reference, methods at one KL, what stays uncertain."""
    procedure, matched, unseen = results["procedure"], results["matched"], results["judges"][1:]
    sentences = [f"Policy and reference are both served as {procedure}."]
    ways = ("finds {} better than the reference", "finds {} worse than the reference")
    unclear = "sees {} differ from the reference, but the interval includes 50%"
    for judge in unseen:
        wins = {name: policy["win_rates"][judge][procedure] for name, policy in results["policies"].items()}
        said = {f"{name} with {share(e).replace(' ', '% ', 1)}": e for name, e in wins.items()}
        sentences += _sorted_by_outcome(judge, said, 0.5, (*ways, unclear))
    if matched:
        first, theory = matched["first"], matched["theory"]
        gains = {judge: found["gain_over"] for judge, found in matched["judges"].items()}
        sentences.append(f"At the same KL of {matched['kl']:.2f} nats, {first} is compared with the others.")
        ways = ("finds it better than {}", "finds it worse than {}")
        unclear = "sees it differ from {}, but the interval includes zero"
        for judge in unseen:
            said = {f"{other} by {_gain_in_points(e)}": e for other, e in gains[judge].items()}
            sentences += _sorted_by_outcome(judge, said, 0.0, (*ways, unclear))
        for other, e in gains["reward"].items():
            known = first in theory and other in theory
            promised = f"; theory gives {_points(theory[first] - theory[other])}" if known else ""
            sentences.append(
                f"By the reward that both were trained on, it gains {_gain_in_points(e)} over {other}{promised}."
            )
    sentences.append(
        f"The {results['confidence']:.0%} intervals are over test prompts; "
        "training from another seed would add a spread that one run cannot show."
    )
    return sentences


def _sorted_by_outcome(
    judge: str, said: Mapping[str, Mapping[str, float]], level: float, ways: tuple[str, str, str]
) -> list[str]:
    """Return a sentence for those with an interval above ``level``, those below and those that include it."""
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for words, e in said.items():
        groups[0 if e["low"] > level else 1 if e["high"] < level else 2].append(words)
    subject = SPOKEN[judge].capitalize()
    return [f"{subject} {way.format(_listed(group))}." for way, group in zip(ways, groups, strict=True) if group]


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _gain_in_points(e: Mapping[str, float]) -> str:
    return gain(e).replace(" ", " points ", 1)


def compare(results: Numbers) -> list[Numbers]:
    """Return the rows of the comparison at one KL, judge by judge; none for a single method.

    Theory speaks of the reward itself as the judge, so only those rows have it.
    """
    if results["matched"] is None:
        return []
    matched, rows = results["matched"], []
    first = matched["first"]
    for judge, found in matched["judges"].items():
        for i, (method, wins) in enumerate(found["win_rates"].items()):
            theory = matched["theory"].get(method) if judge == "reward" else None
            first_theory = matched["theory"].get(first)
            rows.append(
                {
                    "judge": judge,
                    "first": i == 0,
                    "last": i == len(found["win_rates"]) - 1,
                    "method": method,
                    "wins": share(wins),
                    "theory": "" if theory is None else f"{100 * theory:.1f}",
                    "gain": "" if i == 0 else gain(found["gain_over"][method]),
                    "theory_gain": "" if i == 0 or None in (theory, first_theory) else _points(first_theory - theory),
                }
            )
    return rows


# Figures


@dataclass(frozen=True, slots=True)
class Look:
    """How a policy looks in every figure and table."""

    color: str
    marker: str


def win_rate_by_kl(results: Numbers, procedure: str, judges: list[str], looks: Mapping[str, Look]) -> Picture:
    """Draw each policy's KL and win rate with both intervals; with the reward as judge, above the theory's curves.

    A second judge has open markers.
    """
    policies = results["policies"]
    figure, axes = _axes("KL to the reference, nats a response", f"win rate as {procedure}, %")
    if judges == ["reward"]:
        most = 1.15 * max(0.1, *(policy["kl"]["high"] for policy in policies.values()))
        kls = most * np.linspace(0.01, 1, 60) ** 2  # the curves bend near 0
        drawn: set[str] = set()
        for name, policy in policies.items():
            aim = "optimum" if policy["solver"] == "maxk" else policy["transform"]
            laws = [law for kl in kls if aim not in drawn and (law := _law(results, policy, kl)) is not None]
            if laws:
                drawn.add(aim)
                expected = [100 * law.win_rate(parse_procedure(procedure)) for law in laws]
                axes.plot([0, *kls], [50, *expected], "--", color=looks[name].color, label=f"theory, {aim}")
    for judge, dots in zip(judges, (":", (0, (1, 4))), strict=False):
        front = [policies[name] for name in results["pareto"][judge][procedure]]
        if len(front) > 1:
            x = [0.0, *(policy["kl"]["mean"] for policy in front)]
            y = [50.0, *(100 * policy["win_rates"][judge][procedure]["mean"] for policy in front)]
            axes.step(x, y, linestyle=dots, where="post", color=QUIET, linewidth=0.8, label=_front(judges, judge))
    for name, policy in policies.items():
        color, kl = looks[name].color, policy["kl"]
        for judge, fill in zip(judges, (color, PAPER), strict=False):
            wins = {key: 100 * value for key, value in policy["win_rates"][judge][procedure].items()}
            label = name if len(judges) == 1 else f"{name}, {judge}"
            axes.plot([kl["low"], kl["high"]], [wins["mean"]] * 2, color=color)
            axes.plot([kl["mean"]] * 2, [wins["low"], wins["high"]], color=color)
            axes.plot(
                kl["mean"], wins["mean"], looks[name].marker, color=color, markerfacecolor=fill, label=label, zorder=3
            )
    axes.plot(0, 50, "o", color=QUIET)
    axes.annotate("reference", (0, 50), (7, -3), textcoords="offset points", color=QUIET, va="top")
    axes.margins(0.08)
    _legend(figure)
    by = " and ".join(SPOKEN[judge] for judge in judges)
    points = "; ".join(
        f"{name}: KL {amount(policy['kl'])}, "
        + ", ".join(f"{share(policy['win_rates'][judge][procedure])} per cent by {SPOKEN[judge]}" for judge in judges)
        for name, policy in policies.items()
    )
    theory = " Curves: what a policy that is free for every prompt would reach." if judges == ["reward"] else ""
    return Picture(
        "-".join(["win-rate-by-kl", *([] if procedure == results["procedure"] else procedure.split(":")), judges[0]]),
        figure,
        f"Win rate as {procedure} against KL, judged by {by}. Bars: {results['confidence']:.0%} intervals.{theory}",
        f"Points of win rate against KL, judged by {by}. {points}.",
    )


def _law(results: Numbers, policy: Numbers, kl: float) -> Law | None:
    """Return what theory gives for a policy's method at a KL, if it has a law."""
    aim = parse_procedure(results["procedure"])
    return method_law(policy["solver"], policy["transform"], aim, max(kl, 1e-6))


def _front(judges: list[str], judge: str) -> str:
    return "Pareto front" if len(judges) == 1 else f"Pareto front, {judge}"


def win_rate_by_n(results: Numbers, judge: str, kind: str, looks: Mapping[str, Look]) -> Picture:
    """Draw each policy's win rate under best-of-N or worst-of-N (``kind``) for every N that was evaluated."""
    title = f"{kind}-of-N"
    figure, axes = _axes("N", f"win rate as {title}, %")
    ends = []
    for name, policy in results["policies"].items():
        wins = policy["win_rates"][judge]
        names = {1: "standard"} | {int(p[len(kind) + 4 :]): p for p in wins if p.startswith(f"{kind}-of-")}
        mean, low, high = (100 * np.array([wins[p][key] for p in names.values()]) for key in ("mean", "low", "high"))
        axes.fill_between(list(names), low, high, color=looks[name].color, alpha=0.2, linewidth=0)
        axes.plot(list(names), mean, color=looks[name].color, marker=looks[name].marker, markersize=3.5, label=name)
        law = _law(results, policy, policy["kl"]["mean"]) if judge == "reward" else None
        if law is not None:
            expected = [100 * law.win_rate(BestOfN(n) if kind == "best" else WorstOfN(n)) for n in names]
            axes.plot(list(names), expected, "--", color=looks[name].color, label=f"theory, {name}")
        ends.append(
            f"{name} {share(wins['standard'])} per cent at N = 1, {share(wins[names[max(names)]])} at N = {max(names)}"
        )
    axes.axhline(50, color=QUIET, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(_nowhere())
    _legend(figure)
    theory = " Dashed: theory at the policy's mean KL." if judge == "reward" else ""
    return Picture(
        f"{kind}-of-n-{judge}",
        figure,
        f"{kind.capitalize()}-of-N, judged by {SPOKEN[judge]}. Bands: {results['confidence']:.0%} intervals.{theory}",
        f"Win rate as {title} against N, judged by {SPOKEN[judge]}: {'; '.join(ends)}.",
    )


def reward_by_rank(recipe: Recipe, root: Path) -> Picture:
    """Draw calibrated against raw reward for ten training prompts, evenly spaced by their median reward."""
    figure, axes = _axes("raw reward", "calibrated reward")
    rewards_PK = reference_rewards(root)
    order = np.argsort(np.median(rewards_PK, axis=1), kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, SHOWN_PROMPTS).astype(int))]
    shown = np.unique(np.linspace(0, recipe.rollout.k - 1, 100).astype(int))  # a thousand points a curve help nobody
    for i, prompt in enumerate(chosen):
        color = _shade(i / max(len(chosen) - 1, 1))
        rewards = rewards_PK[prompt]
        axes.plot(rewards[shown], calibrate(rewards, rewards)[shown], ".-", color=color, markersize=4, linewidth=0.6)
    low, high = np.median(rewards_PK[chosen[[0, -1]]], axis=1)
    return Picture(
        "calibration",
        figure,
        f"The same raw reward ranks high for one prompt and low for another: {len(chosen)} training prompts, evenly "
        f" spaced by median reward (dark: low) among {len(order)}, {recipe.rollout.k} responses each.",
        f"One rising curve a prompt; the curves lie apart. Their medians reach from {low:.2f} to {high:.2f}.",
    )


def rank_histogram(recipe: Recipe, root: Path, results: Numbers) -> Picture:
    """Draw how the calibrated rewards of fresh base samples are spread, next to the uniform they should follow.

    A rank among K references is one of K + 1 equally likely ones, so each is spread over its 1/(K + 1) of [0, 1].
    """
    base_PM = samples_of(recipe, root, "reference", "reward")
    prompts, samples = base_PM.shape
    half = samples // 2
    u_PM = calibrate(base_PM[:, half:], np.sort(base_PM[:, :half], axis=1))
    bins = min(16, half + 1)
    edges = np.linspace(0, 1, bins + 1)
    filled = np.clip((edges - u_PM[..., None] * half / (half + 1)) * (half + 1), 0, 1).mean(axis=1)
    relative = [estimate(column, confidence=recipe.evaluate.confidence) for column in np.diff(filled).T * bins]
    figure, axes = _axes("calibrated reward of fresh base samples", "density")
    axes.bar(
        edges[:-1], [e.mean for e in relative], 1 / bins, align="edge", color=QUIET, alpha=0.45, label="base samples"
    )
    centres = (edges[:-1] + edges[1:]) / 2
    axes.vlines(centres, [e.low for e in relative], [e.high for e in relative], color=INK, linewidth=1)
    axes.axhline(1, color=COLOURS[0], label="uniform")
    _legend(figure)
    distance = results["base"]["distance_from_uniform"]
    chance = _distance_by_chance(prompts, half, samples - half, recipe.evaluate.confidence)
    return Picture(
        "fresh-base-samples",
        figure,
        f"Fresh base samples ranked among {half} others. Kolmogorov distance from uniform {distance:.3f}; exact "
        f"calibration without ties stays below {chance:.3f} in {recipe.evaluate.confidence:.0%} of simulations. "
        f"Bars: {recipe.evaluate.confidence:.0%} intervals.",
        f"Histogram of {bins} bins between {min(e.mean for e in relative):.2f} and {max(e.mean for e in relative):.2f} "
        "of the uniform density.",
    )


def _distance_by_chance(prompts: int, references: int, fresh: int, confidence: float) -> float:
    """Return what the distance from uniform stays below, with ``confidence``, if all samples are exchangeable."""
    rng = np.random.default_rng(0)
    distances = []
    for _ in range(CHANCE_DRAWS):
        is_reference = np.argsort(rng.random((prompts, references + fresh)), axis=1) < references
        distances.append(uniformity(np.cumsum(is_reference, axis=1)[~is_reference] / references))
    return float(np.quantile(distances, confidence))


def training_curves(name: str, history: list[Numbers], look: Look | None) -> Picture:
    """Draw what the trainer logged: the losses, or win rate, KL and reward of an on-policy solver."""
    color = look.color if look else QUIET
    if any("win_rate" in row for row in history):
        panels = [{"win_rate": "standard win rate"}, {"kl": "KL, nats a token"}, {"reward": "Φ of the rank"}]
    else:
        panels = [{"loss": "training", "eval_loss": "held out"}]
    figure, grid = _axes("optimiser step", "loss", rows=len(panels))
    last = []
    for axes, panel in zip(np.atleast_1d(grid), panels, strict=True):
        for key, label in panel.items():
            logged = [(row["step"], row[key]) for row in history if key in row]
            if not logged:
                continue
            steps, values = zip(*logged, strict=True)
            held_out = key == "eval_loss"
            axes.plot(
                steps, values, "o-" if held_out else "-", color=INK if held_out else color, markersize=4, label=label
            )
            last.append(f"{label} from {values[0]:.3g} to {values[-1]:.3g}")
        if len(panels) > 1:
            axes.set_ylabel(next(iter(panel.values())))
    if len(panels) == 1:
        _legend(figure)
    title = {"sft": "Supervised fine-tuning of the reference", "reward": "The reward model", "judge": "The judge"}.get(
        name, f"Policy {name.removeprefix('train-')}"
    )
    return Picture(
        f"training-{name.removeprefix('train-')}", figure, f"{title}: as logged.", f"{title}: {', '.join(last)}."
    )


def _axes(x: str, y: str, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.4 if rows == 1 else 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, sharex=True)
    np.atleast_1d(axes)[-1].set_xlabel(x)
    if rows == 1:
        axes.set_ylabel(y)
    return figure, axes


def _legend(figure: Any) -> None:
    figure.legend(loc="outside upper left", ncols=2)


def _nowhere() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _shade(position: float) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.25 + 0.6 * position)


def _save(picture: Picture, folder: Path) -> Numbers:
    """Write the figure as SVG and PNG and return what the template needs, the SVG without what only files need."""
    import matplotlib
    from markupsafe import Markup

    folder.mkdir(exist_ok=True)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": picture.name}), atomic_path(folder / f"{picture.name}.svg") as path:
        picture.figure.savefig(path, metadata=nothing)
        svg = path.read_text(encoding="utf-8")
    with atomic_path(folder / f"{picture.name}.png") as path:
        picture.figure.savefig(path, dpi=200)
    svg = re.sub(r"<g id=\"[^\"]*\">", "<g>", svg[svg.index("<svg") :])  # every figure has its axes_1
    svg = re.sub(r"(<svg [^>]*?)(?: (?:width|height)=\"[^\"]*\")", r"\1", svg)
    svg = svg.replace(PAPER, "var(--paper)").replace(INK, "var(--ink)")
    return {"name": picture.name, "svg": Markup(svg), "caption": picture.caption, "alt": picture.alt}


# Tables


def saturated(recipe: Recipe, root: Path) -> dict[str, dict[str, float]]:
    """Return the share of each model's samples that beat every base sample of the half that calibrates.

    Above them all ranks are equal, so the estimate cannot tell how good these samples are. Of fresh base samples it is
    1/(K + 1) for K calibrating ones without ties.
    """
    base_PM = samples_of(recipe, root, "reference", "reward")
    half = base_PM.shape[1] // 2
    fresh: dict[str, Array] = {"reference": base_PM[:, half:]}
    fresh |= {name: samples_of(recipe, root, name, "reward") for name in recipe.policies}
    return {
        name: estimate(
            saturation(own, base_PM[:, :half]), confidence=recipe.evaluate.confidence, seed=recipe.seed
        ).as_dict()
        for name, own in fresh.items()
    }


def examples(recipe: Recipe, root: Path) -> list[Numbers]:
    """Return the first test prompts, each with the response that every model would serve from its first N samples."""
    procedure = parse_procedure(recipe.procedure)
    n = procedure.n if isinstance(procedure, (BestOfN, WorstOfN)) else 1
    pick = np.argmin if isinstance(procedure, WorstOfN) else np.argmax
    count = min(SHOWN_EXAMPLES, recipe.evaluate.prompts)
    table = read_table(Layout(root).data / "test_prompts.parquet", ["prompt_id", "prompt"]).slice(0, count)
    prompt_ids = [str(prompt_id) for prompt_id in table["prompt_id"].to_pylist()]
    shown: list[Numbers] = [{"prompt": prompt, "responses": []} for prompt in table["prompt"].to_pylist()]
    for name in ("reference", *recipe.policies):
        rewards = {source: samples_of(recipe, root, name, source) for source in reward_names(recipe)}
        said = _responses(Layout(root).evaluation(name) / "samples", prompt_ids)
        for p, example in enumerate(shown):
            served = int(pick(rewards["reward"][p, :n]))
            text, finish = said[prompt_ids[p], served]
            scores = {source: float(values[p, served]) for source, values in rewards.items()}
            example["responses"].append({"model": name, "text": text, "cut_off": finish == "length", "rewards": scores})
    return shown


def _responses(folder: Path, prompt_ids: list[str]) -> dict[tuple[str, int], tuple[str, str]]:
    tables = [
        read_table(shard, ["prompt_id", "index", "text", "finish"]) for shard in sorted(folder.glob("part-*.parquet"))
    ]
    table = pa.concat_tables(tables)
    rows = table.filter(pc.is_in(table["prompt_id"], value_set=pa.array(prompt_ids))).to_pylist()
    return {(row["prompt_id"], row["index"]): (row["text"], row["finish"]) for row in rows}


def facts(recipe: Recipe, made: Mapping[str, Numbers]) -> dict[str, dict[str, str]]:
    """Return what else a reader needs to judge or repeat the run: counts of the data stage, sampling, versions."""
    rollout, test = recipe.rollout, recipe.evaluate
    summaries = {name: record["summary"] for name, record in made.items()}
    cut_off = {
        name.removeprefix("evaluate-"): f"{summary['cut_off']:.1%} of {summary['samples']:,}"
        for name, summary in summaries.items()
        if name.startswith("evaluate-")
    }
    test_prompts = summaries["evaluate-reference"]["samples"] // test.samples
    rollouts = [summary for name, summary in summaries.items() if name.startswith("score-")]
    if total := sum(summary["responses"] for summary in rollouts):
        share_cut = sum(summary["cut_off"] * summary["responses"] for summary in rollouts) / total
        cut_off = {"training rollouts": f"{share_cut:.1%} of {total:,}"} | cut_off
    return {
        "Rows of the data stage": {k.replace("_", " "): f"{v:,}" for k, v in summaries.get("data", {}).items()},
        "Sampling": {
            "temperature": "1, nothing truncated",
            "engine": rollout.engine.kind,
            "training": f"{summaries['calibrate']['prompts']} prompts × {rollout.k} rollouts",
            "evaluation": f"{test_prompts} prompts × {test.samples} samples",
            "seed": str(recipe.seed),
        },
        f"Responses cut off at {rollout.max_new_tokens} tokens": cut_off,
        "Versions": _versions(made),
    }


def _made(recipe: Recipe, root: Path) -> dict[str, Numbers]:
    """Return the records that belong to the recipe: not the report's own, nor those of what it no longer has."""
    models = {"reference", *recipe.policies}
    fitted = {name for name in reward_names(recipe) if reward_source(recipe, name).fit is not None}
    numbers = {str(part) for part in range(parts(recipe))}

    def belongs(name: str, stage: str) -> bool:
        work, _, model = name.partition("-")
        if work in ("train", "evaluate"):
            return model in models
        if work in ("rollout", "score"):
            return model in numbers
        return work in fitted if stage == "reward-model" else name != "report"

    return {name: record for name, record in records(root).items() if belongs(name, record["stage"])}


def _seconds(made: Mapping[str, Numbers]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in made.values():
        total[record["stage"]] = total.get(record["stage"], 0.0) + record["seconds"]
    return total


def _versions(made: Mapping[str, Numbers]) -> dict[str, str]:
    """Return the version of each library, or all of them where stages were run with different ones."""
    found: dict[str, list[str]] = {}
    for record in made.values():
        for library, version in record["versions"].items():
            if version not in found.setdefault(library, []):
                found[library].append(version)
    return {library: ", ".join(versions) for library, versions in found.items()}
