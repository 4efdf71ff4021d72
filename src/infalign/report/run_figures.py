"""The figures of a report."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from infalign.core.display import INK, PAPER, QUIET, Interval, amount, gain, number, panels, save, share
from infalign.core.display import STYLE as ANY_STYLE
from infalign.method.calibration import Array, calibrate
from infalign.method.procedures import BestOfN, Served, WorstOfN
from infalign.pipeline.records import Record
from infalign.report.results import Results
from infalign.report.templates import embedded
from infalign.report.verdict_text import SPOKEN
from infalign.theory.law import RankLaw

STYLE = ANY_STYLE | {"lines.linewidth": 1.3, "lines.markersize": 5, "axes.facecolor": "none"}
SHOWN_PROMPTS = 10  # number of curves in the calibration figure
LEGEND_ROW = 0.2  # inches
STEPS = np.linspace(0.01, 1, 25)  # of theory's curves, in the root of the KL, since they bend near 0
CURVED = 20.0  # nats: theory's curves end there, where a win rate is within 1e-8 of the largest


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with its caption and its alternative text."""

    name: str
    figure: Any  # matplotlib.figure.Figure
    caption: str
    alt: str


@dataclass(frozen=True, slots=True)
class Look:
    """A policy's color and marker in every figure and table, its transformation, and theory's law of it at a KL."""

    color: str
    marker: str
    transformation: str
    law: Callable[[float], RankLaw | None]


def pass_at_k_by_kl(results: Results, k: str, looks: Mapping[str, Look]) -> Picture:
    """Draw each policy's KL and pass@k with both intervals."""
    figure, axes = axes_of("KL to the reference, nats per response", f"pass@{k}, %")
    said, at = list[str](), dict[str, Interval](reference=dict.fromkeys(("low", "mean", "high"), 0.0))
    at |= {name: policy["kl"] for name, policy in results["policies"].items()}
    for name, kl in at.items():
        color, marker = (looks[name].color, looks[name].marker) if name in looks else (QUIET, "o")
        _point(axes, kl, results["pass_at_k"][name][k], marker, color=color, label=name)
        said.append(f"{name}: KL {amount(kl)}, {share(results['pass_at_k'][name][k])} percent")
    axes.margins(0.08, 0.14)
    legend(figure)
    caption = f"pass@{k} against KL. Bars: {results['confidence']:.0%} intervals."
    return Picture("pass-at-k-by-kl", figure, caption, f"Points of pass@{k} against KL. {'; '.join(said)}.")


def win_rate_by_kl(results: Results, served: Served, judges: list[str], looks: Mapping[str, Look]) -> Picture:
    """Draw each policy's KL and win rate with both intervals; with the reward as judge, also the theory's curves."""
    policies, procedure = results["policies"], served.name
    figure, axes = axes_of("KL to the reference, nats per response", f"win rate as {procedure}, %")
    most = min(1.15 * max(0.1, *(policy["kl"]["high"] for policy in policies.values())), CURVED)
    curves = set[str]()  # transformations: policies with the same one share a curve
    for look in looks.values() if judges == ["reward"] else ():
        aim = look.transformation
        laws = {kl: law for kl in most * STEPS**2 if aim not in curves and (law := look.law(kl)) is not None}
        if laws:
            curves.add(aim)
            expected = [100 * law.win_rate(served) for law in laws.values()]
            axes.plot([0, *laws], [50, *expected], linestyle="--", color=look.color, label=f"theory, {aim}")
    for name, policy in policies.items():
        color, kl = looks[name].color, policy["kl"]
        for judge, fill in zip(judges, (color, PAPER), strict=False):  # a second judge gets open markers
            label = name if len(judges) == 1 else f"{name}, {judge}"
            style = {"color": color, "markerfacecolor": fill, "label": label}
            _point(axes, kl, policy["win_rates"][judge][procedure], looks[name].marker, **style)
    axes.plot(0, 50, "o", color=QUIET)
    axes.annotate("reference", (0, 50), (7, -3), textcoords="offset points", color=QUIET, va="top")
    axes.margins(0.08, 0.14)
    legend(figure)
    seen_by = " and ".join(SPOKEN[judge] for judge in judges)
    points = "; ".join(
        f"{name}: KL {amount(policy['kl'])}, "
        + ", ".join(f"{share(policy['win_rates'][judge][procedure])} percent by {SPOKEN[judge]}" for judge in judges)
        for name, policy in policies.items()
    )
    theory = " Dashed: an unrestricted policy." if curves else ""
    return Picture(
        "-".join(["win-rate-by-kl", *([] if procedure == results["procedure"] else procedure.split(":")), judges[0]]),
        figure,
        f"Win rate as {procedure} against KL, by {seen_by}. Bars: {results['confidence']:.0%} intervals.{theory}",
        f"Points of win rate against KL, by {seen_by}. {points}.",
    )


def win_rate_by_n(results: Results, judge: str, kind: str, looks: Mapping[str, Look]) -> Picture:
    """Draw each policy's win rate under best-of-N or worst-of-N (``kind``) for every N that was evaluated."""
    title = f"{kind}-of-N"
    figure, axes = axes_of("N", f"win rate as {title}, %")
    ends = []
    for name, policy in results["policies"].items():
        wins = policy["win_rates"][judge]
        spelled = {n: f"{kind}-of-{n}" for n in range(2, results["samples"] + 1)}
        names = {1: "standard"} | {n: procedure for n, procedure in spelled.items() if procedure in wins}
        _band(axes, {n: wins[p] for n, p in names.items()}, looks[name].color, looks[name].marker, name)
        law = looks[name].law(policy["kl"]["mean"]) if judge == "reward" else None
        if law is not None:
            expected = [100 * law.win_rate(BestOfN(n) if kind == "best" else WorstOfN(n)) for n in names]
            axes.plot(list(names), expected, "--", color=looks[name].color, label=f"theory, {name}")
        last = max(names)
        ends.append(f"{name} {share(wins['standard'])} percent at N = 1, {share(wins[names[last]])} at N = {last}")
    axes.axhline(50, color=QUIET, linewidth=0.8)
    legend(figure)
    drawn = judge == "reward" and any(look.law(1.0) for look in looks.values())
    theory = " Dashed: theory at the policy's mean KL." if drawn else ""
    return Picture(
        f"{kind}-of-n-{judge}",
        figure,
        f"{kind.capitalize()}-of-N, by {SPOKEN[judge]}. {_bands(results)}{theory}",
        f"Win rate as {title} against N, by {SPOKEN[judge]}: {'; '.join(ends)}.",
    )


def pass_at_k(results: Results, looks: Mapping[str, Look]) -> Picture:
    """Draw pass@k of the reference and of every policy."""
    figure, axes = axes_of("k", "pass@k, %")
    ends = []
    for name, by_k in results["pass_at_k"].items():
        look = looks.get(name)
        color, marker = (QUIET, ".") if look is None else (look.color, look.marker)
        _band(axes, {int(k): rate for k, rate in by_k.items()}, color, marker, name)
        (_, first), *_, (k, last) = by_k.items()
        ends.append(f"{name} {100 * first['mean']:.1f} percent at k = 1, {100 * last['mean']:.1f} at k = {k}")
    _mark_served(axes, results)
    legend(figure)
    caption = "pass@k: the probability that at least one of k responses is right."
    return Picture("pass-at-k", figure, f"{caption} {_bands(results)}", f"pass@k against k: {'; '.join(ends)}.")


def leads_by_k(results: Results, looks: Mapping[str, Look]) -> list[Picture]:
    """Draw by how much pass@k differs between every two policies at one KL; nothing where no two are comparable."""
    pairs = {
        f"{first} − {other}": (looks[first], {int(k): rate["over"][other] for k, rate in by_k.items()})
        for first, other in combinations(looks, 2)
        if (by_k := results["pass_at_k"][first])["1"]["over"][other] is not None
    }
    if not pairs:
        return []
    figure, axes = axes_of("k", "difference in pass@k, points")
    for pair, (look, leads) in pairs.items():
        _band(axes, leads, look.color, look.marker, pair)
    axes.axhline(0, color=QUIET, linewidth=0.8)
    _mark_served(axes, results)
    legend(figure)
    said = (f"{pair} {gain(e)} at k = {k}" for pair, (_, leads) in pairs.items() for k, e in leads.items())
    caption = f"The difference between two policies at the same KL. {_bands(results)}"
    return [Picture("leads-by-k", figure, caption, f"Points of pass@k: {', '.join(said)}.")]


def _mark_served(axes: Any, results: Results) -> None:
    if served := results["truth"]["served"]:
        axes.axvline(served, color=QUIET, linewidth=0.8, linestyle=":")


def _bands(results: Results) -> str:
    return f"Bands: {results['confidence']:.0%} intervals."


def _point(axes: Any, kl: Interval, rate: Interval, marker: str, **style: Any) -> None:
    """Draw a share against KL, and both intervals."""
    mean, low, high = (100.0 * rate[key] for key in ("mean", "low", "high"))
    axes.plot([kl["low"], kl["high"]], [mean, mean], color=style["color"])
    axes.plot([kl["mean"], kl["mean"]], [low, high], color=style["color"])
    axes.plot(kl["mean"], mean, marker, zorder=3, **style)


def _band(axes: Any, by_n: Mapping[int, Interval], color: str, marker: str, label: str) -> None:
    """Draw shares against N, spaced by its logarithm, and the band of their intervals."""
    mean, low, high = (100 * np.array([rate[key] for rate in by_n.values()]) for key in ("mean", "low", "high"))
    axes.fill_between([*by_n], low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot([*by_n], mean, color=color, marker=marker, markersize=3.5, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def reward_by_rank(rewards_PK: Array) -> Picture:
    """Draw calibrated against raw reward for ten training prompts, evenly spaced by their median reward."""
    from matplotlib import colormaps

    figure, axes = axes_of("raw reward", "calibrated reward")
    order = np.argsort(np.median(rewards_PK, axis=1), kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, SHOWN_PROMPTS).astype(int))]
    shown = np.unique(np.linspace(0, rewards_PK.shape[1] - 1, 100).astype(int))  # enough for a smooth curve
    shades = colormaps["viridis"](0.25 + 0.6 * np.arange(len(chosen)) / max(len(chosen) - 1, 1))
    for rewards, color in zip(rewards_PK[chosen], shades, strict=True):
        axes.plot(rewards[shown], calibrate(rewards, rewards)[shown], ".-", color=color, markersize=4, linewidth=0.6)
    low, high = np.median(rewards_PK[chosen[[0, -1]]], axis=1)
    return Picture(
        "calibration",
        figure,
        f"The same raw reward ranks high for one prompt and low for another. {len(chosen)} of {len(order)} training "
        f"prompts, evenly spaced by median reward (dark: low), {rewards_PK.shape[1]} responses each.",
        f"One rising curve per prompt. Their medians range from {number(low)} to {number(high)}.",
    )


def training_curves(record: Record, looks: Mapping[str, Look]) -> Picture:
    """Draw what the trainer logged: the losses, or win rate, KL and reward of an on-policy solver."""
    name, history = record["subject"] or record["kind"], record["summary"]["history"]
    color = looks[record["subject"]].color if record["subject"] in looks else QUIET
    if any("win_rate" in row for row in history):
        shown = [{"win_rate": "standard win rate"}, {"kl": "KL, nats per token"}, {"reward": "Φ of the rank"}]
    else:
        shown = [{"loss": "training", "eval_loss": "held out"}]
    figure, grid = axes_of("optimizer step", "loss", rows=len(shown))
    last = []
    for axes, panel in zip(np.atleast_1d(grid), shown, strict=True):
        for key, label in panel.items():
            logged = [(row["step"], row[key]) for row in history if key in row]
            if not logged:
                continue
            steps, values = zip(*logged, strict=True)
            line, shade = ("o-", INK) if key == "eval_loss" else ("-", color)
            axes.plot(steps, values, line, color=shade, markersize=4, label=label)
            last.append(f"{label} from {number(values[0], '.3g')} to {number(values[-1], '.3g')}")
        if len(shown) > 1:
            axes.set_ylabel(next(iter(panel.values())))
    if len(shown) == 1:
        legend(figure)
    titles = {"sft": "Supervised fine-tuning of the reference", "reward": "The reward model", "judge": "The judge"}
    title = (titles | {"gold": "The gold reward"}).get(name, f"Policy {name}")
    end, chosen = history[-1], ""
    if "tuned" in end:
        chosen = f": learning rate {end['tuned']['learning_rate']:.2g}, passes {end['tuned']['passes']:.2g}, "
        chosen += f"then log-ratios × {end['strength']:.2g}" if end["strength"] else "the reference is kept"
    return Picture(f"training-{name}", figure, f"{title}{chosen}.", f"{title}: {', '.join(last)}.")


def axes_of(x: str, y: str, rows: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes: ``rows`` panels below each other that share the label of the x axis."""
    figure, axes = panels(rows, 1, (4.8, 3.4 if rows == 1 else 1.7 * rows), sharex=True)
    np.atleast_1d(axes)[-1].set_xlabel(x)
    if rows == 1:
        axes.set_ylabel(y)
    return figure, axes


def legend(figure: Any) -> None:
    """Put the legend above the axes, which keep their size: the figure grows by the rows beyond the fourth."""
    labels = [label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]]
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(0, len(labels) // 2 - 4))
    figure.legend(loc="outside upper left", ncols=3 if len(labels) == 3 and len("".join(labels)) < 36 else 2)


def save_picture(picture: Picture, folder: Path) -> dict[str, str]:
    """Write the figure as SVG and PNG; return the template's values, with the SVG stripped for embedding in HTML."""
    from markupsafe import Markup

    path, image = folder / f"{picture.name}.svg", folder / f"{picture.name}.png"
    save(picture.figure, path, salt=picture.name)
    picture.figure.set_layout_engine("none")  # it is laid out now, which takes as long as drawing it
    save(picture.figure, image, stamped=True)
    svg = path.read_text(encoding="utf-8")
    svg = re.sub(r"<g id=\"[^\"]*\">", "<g>", svg[svg.index("<svg") :])  # makes ids unique on the page
    svg = re.sub(r"(<svg [^>]*?)(?: (?:width|height)=\"[^\"]*\")", r"\1", svg)
    svg = svg.replace(PAPER, "var(--paper)").replace(INK, "var(--ink)")
    png = embedded(image, "image/png")
    return {"name": picture.name, "svg": Markup(svg), "png": png, "caption": picture.caption, "alt": picture.alt}
