"""Tables and figures of a comparison."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from infalign.compare.methods import read_method
from infalign.core import display
from infalign.core.display import Estimate
from infalign.method.procedures import parse_procedure
from infalign.report.curve_figures import plot_line
from infalign.report.equal_kl import MAX_EXTRAPOLATION, MAX_KL_RATIO
from infalign.report.verdict_text import SPOKEN
from infalign.theory.curve import parse_transform_or_optimum, sweep

Numbers = dict[str, Any]
CAPTURED = {"efficiency": "efficiency", "share": "share of the gap"}


@dataclass(frozen=True)
class Sheet:
    """A table with a title and notes below; a row with an empty first cell belongs to the row before."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def print_to(self, console: Console) -> None:
        """Print the sheet."""
        table = display.plain_table(*self.columns)
        for before, row in pairwise([[""], *self.rows]):
            if row[0] and not before[0]:
                table.add_section()
            table.add_row(*row)
        display.heading(console, self.title)
        if self.rows:
            console.print(table)
        for note in self.notes:
            display.say(console, note, wrap=True)

    def to_markdown(self) -> str:
        """Return the sheet as Markdown."""
        ruled = [self.columns, ["---"] * len(self.columns), *self.rows] if self.rows else []
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)
        return "\n\n".join(filter(None, [f"## {self.title}", table, *self.notes])) + "\n"


def make_sheets(results: Numbers) -> list[Sheet]:
    """Return the tables of a comparison: policies, what training reached and cost, methods and gains at each budget."""
    sheets = [*(_policies(results, judge) for judge in results["judges"]), _training(results)]
    for at in results["matched"]:
        sheets += [_at_one_kl(results, at), *_gains(results, at)]
    return sheets


def print_comparison(results: Numbers, console: Console) -> None:
    """Print the tables of a comparison."""
    for sheet in make_sheets(results):
        sheet.print_to(console)


def _policies(results: Numbers, judge: str) -> Sheet:
    policies, procedures = results["policies"], results["procedures"]
    rows = [
        [name, display.plus_minus(policy["kl"]), *(display.share(policy["win_rates"][judge][p]) for p in procedures)]
        for name, policy in policies.items()
    ]
    notes = [
        f"{results['prompts']} test prompts × {results['samples']} samples, {results['confidence']:.0%} intervals.",
        *(
            f"{name} itself: its KL is estimated from the probabilities of what it serves, and at most "
            f"{policy['kl_bound']:.2f} nats; {policy['n']} draws per response, no training."
            for name, policy in policies.items()
            if "n" in policy
        ),
    ]
    title = f"Win rate against the reference, both served alike, by {SPOKEN[judge]}"
    return Sheet(title, ("policy", "KL, nats", *_in_percent(procedures)), rows, notes)


def _training(results: Numbers) -> Sheet:
    trained = {name: policy for name, policy in results["policies"].items() if "cost" in policy}
    rows = [
        [
            name,
            *("–" if (part := policy["captured"][key]) is None else display.ratio(part) for key in CAPTURED),
            f"{policy['cost']['generated_tokens']:,}",
            f"{policy['cost']['seconds']:,.1f}",
            f"{policy['cost']['peak_memory'] / 2**20:,.0f}",
        ]
        for name, policy in trained.items()
    ]
    shared = results["shared_cost"]
    notes = [
        "Efficiency: the gain of the standard win rate over one half, by the reward, relative to the most that this KL "
        "can buy. At small KL it is the correlation of log π/π_ref with the rank; the rest of the KL is noise.",
        f"Share: where the {results['procedure']} win rate lies between what theory gives at this KL, to a policy that "
        "is free for every prompt, for the identity (0) and for the optimum (1).",
        *(
            f"{name} spent {policy['kl']['mean']:.3g} nats, for which there is no theory: {policy['captured']['none']}."
            for name, policy in trained.items()
            if "none" in policy["captured"]
        ),
        f"Before all of them, once: {shared['responses']:,} rollouts of {shared['generated_tokens']:,} tokens, "
        f"{shared['seconds']:,.1f} s with scores and calibration.",
        "Peak memory is that of the training process with its libraries, on a GPU that of its tensors.",
    ]
    columns = ("policy", *CAPTURED.values(), "generated tokens", "seconds", "peak memory, MiB")
    return Sheet("What training reached of theory's gain, and what it cost", columns, rows, notes)


def _at_one_kl(results: Numbers, at: Numbers) -> Sheet:
    procedures, outside = results["procedures"], at["not_bracketed"]
    columns = ("method", "judged by", *_in_percent(procedures))
    notes = [f"Half of the methods spent more than {at['median']:.2f} nats for this budget."]
    if at["left_out"]:
        spent = (f"{method} ({kl:.2f} nats)" for method, kl in at["left_out"].items())
        notes.append(f"Left out, for spending less than 1/{MAX_KL_RATIO:g} of this: {', '.join(spent)}.")
    if at["kl"] is None:
        return Sheet(f"Budget {at['budget']:g} nats", columns, [], notes)
    theory = at["theory"]
    if any(theory.values()):
        notes.append(
            "Theory: the method's transformation at this KL, by the reward, if every prompt's policy were free."
        )
    compared = at["win_rates"][results["judges"][0]][procedures[0]]
    if near := [f"{method} (at least {kl:.2f} nats)" for method, kl in outside.items() if method in compared]:
        notes.append(
            f"Not bracketed, but compared by extrapolation over less than {MAX_EXTRAPOLATION:g}: {', '.join(near)}."
        )
    rows = [
        [method, f"not bracketed: spent at least {kl:.2f} nats", *["–"] * len(procedures)]
        for method, kl in outside.items()
        if method not in compared
    ]
    for method in compared:
        of_method = [
            [judge, *(display.share(wins[p][method]) for p in procedures)] for judge, wins in at["win_rates"].items()
        ]
        if method in theory[procedures[0]]:
            of_method.append(["theory", *(f"{100 * theory[p][method]:.1f}" for p in procedures)])
        rows += [[method if i == 0 else "", *row] for i, row in enumerate(of_method)]
    return Sheet(f"Budget {at['budget']:g} nats: the methods at {at['kl']:.2f} nats", columns, rows, notes)


def _gains(results: Numbers, at: Numbers) -> list[Sheet]:
    """Return a table per judge of our gains over the best trained baseline, if the comparison has both."""
    note = (
        "The baseline is the trained one that came out best on these prompts, which favors it a little; the intervals "
        "do not allow for that choice."
    )
    sheets = []
    for judge, gains in at["gains"].items():
        by_procedure = [gains[procedure] for procedure in results["procedures"]]
        rows = [["baseline", *(one["baseline"] for one in by_procedure)]]
        rows += [[m, *(display.gain(one["gain"][m]) for one in by_procedure)] for m in by_procedure[0]["gain"]]
        title = f"Points above the best baseline at {at['kl']:.2f} nats by {SPOKEN[judge]}"
        if len(rows) > 1:
            sheets.append(Sheet(title, ("method", *results["procedures"]), rows, [note]))
    return sheets


def _in_percent(procedures: Sequence[str]) -> list[str]:
    return [f"{procedure}, %" for procedure in procedures]


def draw_win_rates(results: Numbers, judge: str, folder: Path) -> None:
    """Draw win rate against KL by ``judge`` as win-rate-by-kl-JUDGE.svg and .png, a panel for each procedure.

    With the reward as judge, theory's curves of identity and optimum are drawn. The axis ends at four times the median
    KL; the legend gives larger KLs. Raises ConfigError without matplotlib.
    """
    policies = results["policies"].values()
    end = MAX_KL_RATIO * float(np.median([policy["kl"]["mean"] for policy in policies]))
    max_kl = 1.06 * max(policy["kl"]["high"] for policy in policies if policy["kl"]["mean"] <= end)
    with display.style():
        figure, grid = display.panels(1, 3, (10.0, 4.2))
        for axes, procedure in zip(grid, results["procedures"], strict=True):
            if judge == "reward":
                draw_theory(axes, procedure)
            lines: dict[str, list[tuple[Estimate, Estimate]]] = defaultdict(list)
            for policy in sorted(policies, key=lambda policy: float(policy["kl"]["mean"])):
                lines[policy["method"]].append((policy["kl"], policy["win_rates"][judge][procedure]))
            draw_methods(axes, {method: lines[method] for method in results["methods"]}, max_kl)
            axes.set(title=procedure, xlabel="KL to the reference, nats", xlim=(0, max_kl))
            axes.autoscale_view(scalex=False)
        grid[0].set(ylabel=f"win rate by {SPOKEN[judge]}, %")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", labelspacing=0.2)
        for ending in (".svg", ".png"):
            display.save(figure, folder / f"win-rate-by-kl-{judge}{ending}")


def draw_theory(axes: Any, procedure: str) -> None:
    """Draw theory's win rates of the identity and the optimum under a procedure against KL, in per cent, dashed."""
    for name, color in {"identity": display.QUIET, "optimal": display.INK}.items():
        points, _ = sweep(parse_procedure(procedure), parse_transform_or_optimum(name))
        plot_line(axes, points, color, label=f"theory, {name}")
        axes.lines[-1].set(linestyle="--", linewidth=1)


def draw_methods(
    axes: Any, lines: dict[str, list[tuple[Estimate, Estimate]]], max_kl: float, *, scale: float = 100.0
) -> None:
    """Draw each method's policies, (KL, value) in order of KL, with both intervals, and join them.

    Colors mark solvers; methods of one color have markers of their own, ours filled. Values are multiplied by
    ``scale``; the legend gives KLs over ``max_kl``.
    """
    markers: dict[str, Iterator[str]] = {}
    for name, policies in lines.items():
        method = read_method(name)
        color = method.color
        marker = next(markers.setdefault(color, cycle(display.MARKERS)))
        for kl, value in policies:
            axes.plot([kl["low"], kl["high"]], [scale * value["mean"]] * 2, color=color, linewidth=0.8)
            axes.plot([kl["mean"]] * 2, [scale * value["low"], scale * value["high"]], color=color, linewidth=0.8)
        axes.plot(
            [kl["mean"] for kl, _ in policies],
            [scale * value["mean"] for _, value in policies],
            color=color,
            marker=marker,
            markersize=4,
            markerfacecolor=color if method.ours else display.PAPER,
            linewidth=1,
            label=", ".join([name, *(f"{kl['mean']:.3g} nats" for kl, _ in policies if kl["mean"] > max_kl)]),
            zorder=3,
        )
