"""Tables and figure of a comparison."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from infalign.core.display import (
    INK,
    MARKERS,
    PAPER,
    QUIET,
    Estimate,
    gain,
    heading,
    panels,
    plain_table,
    plus_minus,
    ratio,
    save,
    say,
    share,
    style,
)
from infalign.evaluation.matched import FAR, NEAR
from infalign.experiments.methods import method_of
from infalign.method.procedures import parse_procedure
from infalign.report.words import SPOKEN
from infalign.theory.curve import parse_aim, sweep
from infalign.theory.figures import plot_line

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """A table with the sentences above and below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    notes: list[str]

    def print_to(self, console: Console) -> None:
        """Print the sheet; rows with an empty first cell belong to the row before."""
        table = plain_table(*self.columns)
        for before, row in pairwise([[""], *self.rows]):
            if row[0] and not before[0]:
                table.add_section()
            table.add_row(*row)
        heading(console, self.title)
        if self.rows:
            console.print(table)
        for note in self.notes:
            say(console, note, wrap=True)

    def markdown(self) -> str:
        """Return the sheet as Markdown."""
        ruled = [self.columns, ["---"] * len(self.columns), *self.rows] if self.rows else []
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)
        return "\n\n".join(filter(None, [f"## {self.title}", table, *self.notes])) + "\n"


def sheets(results: Numbers) -> list[Sheet]:
    """Return the tables of a comparison: policies, their cost, the methods and our gains at the KL of each budget."""
    found = [*(_policies(results, judge) for judge in results["judges"]), _shares(results), _costs(results)]
    for at in results["matched"]:
        found += [_at_one_kl(results, at), *_above_baselines(results, at)]
    return found


def print_methods(results: Numbers, console: Console) -> None:
    """Print the tables of a comparison."""
    for sheet in sheets(results):
        sheet.print_to(console)


def _policies(results: Numbers, judge: str) -> Sheet:
    rows = []
    for name, policy in results["policies"].items():
        shares = (share(policy["win_rates"][judge][procedure]) for procedure in results["procedures"])
        rows.append([name, plus_minus(policy["kl"]), *shares])
    columns = ("policy", "KL, nats", *(f"{procedure}, %" for procedure in results["procedures"]))
    notes = [
        f"{results['prompts']} test prompts × {results['samples']} samples, {results['confidence']:.0%} intervals."
    ]
    notes += [
        f"{name} itself: its KL is estimated from the probabilities of what it serves, and at most "
        f"{policy['kl_bound']:.2f} nats; {policy['n']} draws for each response, no training."
        for name, policy in results["policies"].items()
        if "n" in policy
    ]
    return Sheet(f"Win rate against the reference, both served alike, by {SPOKEN[judge]}", columns, rows, notes)


def _shares(results: Numbers) -> Sheet:
    rows = []
    for name, policy in results["policies"].items():
        for split, found in policy.get("captured", {}).items():
            placed = ("–" if found[key] is None else ratio(found[key]) for key in ("efficiency", "share"))
            rows.append([name if split == "train" else "", split, f"{found['kl']:.2f}", *placed])
    columns = ("policy", "prompts", "KL, nats", "efficiency", "share of the gap")
    notes = [
        "Efficiency: the gain of the standard win rate over one half, by the reward, relative to the most that this KL "
        "can buy. At small KL it is the correlation of log π/π_ref with the rank; the rest of the KL is noise.",
        f"Share: where the {results['procedure']} win rate lies between what theory gives at this KL, to a policy that "
        "is free for every prompt, for the identity (0) and for the optimum (1).",
    ]
    notes += [
        f"{name} on {split} prompts spent {found['kl']:.3g} nats, for which there is no theory: {found['none']}."
        for name, policy in results["policies"].items()
        for split, found in policy.get("captured", {}).items()
        if "none" in found
    ]
    return Sheet("How much of what theory promises arrives", columns, rows, notes)


def _costs(results: Numbers) -> Sheet:
    rows = []
    for name, policy in results["policies"].items():
        if "cost" not in policy:  # Best-of-n itself
            continue
        cost = policy["cost"]
        tokens, memory = f"{cost['generated_tokens']:,}", f"{cost['peak_memory'] / 2**20:,.0f}"
        rows.append([name, tokens, f"{cost['seconds']:,.1f}", memory])
    shared = results["shared_cost"]
    note = (
        f"Before all of them, once: {shared['responses']:,} rollouts of {shared['generated_tokens']:,} tokens, "
        f"{shared['seconds']:,.1f} s with scores and calibration."
    )
    held = "Peak memory is that of the training process with its libraries, on a GPU that of its tensors."
    columns = ("policy", "generated tokens", "seconds", "peak memory, MiB")
    return Sheet("What training cost, besides the shared rollouts", columns, rows, [note, held])


def _at_one_kl(results: Numbers, at: Numbers) -> Sheet:
    procedures, reached = results["procedures"], (f"{m} ({kl:.2f} nats)" for m, kl in at["left_out"].items())
    missing = f"Left out, for spending less than 1/{FAR:g} of this: {', '.join(reached)}."
    notes = [f"Half of the methods spent more than {at['median']:.2f} nats for this budget."]
    notes += [missing] if at["left_out"] else []
    if any(at["theory"].values()):
        notes.append(
            "Theory: the method's transformation at this KL, by the reward, if every prompt's policy were free."
        )
    columns = ("method", "judged by", *(f"{procedure}, %" for procedure in procedures))
    if at["kl"] is None:
        return Sheet(f"Budget {at['budget']:g} nats", columns, [], notes)
    rows = []
    compared = at["win_rates"][results["judges"][0]][procedures[0]]
    for method, least in at["not_bracketed"].items():
        if method not in compared:
            rows.append([method, f"not bracketed: spent at least {least:.2f} nats", *["–"] * len(procedures)])
    near = [f"{method} (at least {kl:.2f} nats)" for method, kl in at["not_bracketed"].items() if method in compared]
    notes += [f"Not bracketed, but compared by extrapolation over less than {NEAR:g}: {', '.join(near)}."] * bool(near)
    for method in compared:
        for judge, wins in at["win_rates"].items():
            first = method if judge == results["judges"][0] else ""
            rows.append([first, judge, *(share(wins[procedure][method]) for procedure in procedures)])
        if method in at["theory"][procedures[0]]:
            rows.append(["", "theory", *(f"{100 * at['theory'][procedure][method]:.1f}" for procedure in procedures)])
    return Sheet(f"Budget {at['budget']:g} nats: the methods at {at['kl']:.2f} nats", columns, rows, notes)


def _above_baselines(results: Numbers, at: Numbers) -> list[Sheet]:
    """Return a table per judge of our gains over the best trained baseline, if the comparison has both."""
    note = (
        "The baseline is the trained one that came out best on these prompts, which favours it a little; the intervals "
        "do not allow for that choice."
    )
    found = []
    for judge, gains in at["gains"].items():
        by_procedure = [gains[procedure] for procedure in results["procedures"]]
        rows = [["baseline", *(str(one["baseline"]) for one in by_procedure)]]
        rows += [[method, *(gain(one["gain"][method]) for one in by_procedure)] for method in by_procedure[0]["gain"]]
        title = f"Points above the best baseline at {at['kl']:.2f} nats by {SPOKEN[judge]}"
        if len(rows) > 1:
            found.append(Sheet(title, ("method", *results["procedures"]), rows, []))
    return [*found[:-1], *(replace(last, notes=[note]) for last in found[-1:])]


def as_csv(results: Numbers) -> str:
    """Return KL, win rates and cost of every policy as CSV, a row for each judge and procedure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    three = ("", "_low", "_high")
    numbers = [f"{name}{end}" for name in ("kl", "win_rate") for end in three]
    writer.writerow(["policy", "method", "judge", "procedure", *numbers, "generated_tokens", "seconds", "peak_memory"])
    for name, policy in results["policies"].items():
        for judge, wins in policy["win_rates"].items():
            for procedure, e in wins.items():
                row = [name, policy["method"], judge, procedure, *policy["kl"].values(), *e.values()]
                writer.writerow([*row, *policy.get("cost", {}).values()])
    return text.getvalue()


def plot_win_rates(results: Numbers, judge: str, folder: Path) -> None:
    """Draw win rate against KL by ``judge`` as win-rate-by-kl-JUDGE.svg and .png, a panel for each procedure.

    Colours mark solvers; our methods have filled markers. With the reward as judge, theory's curves of identity and
    optimum are drawn. The axis ends at four times the median KL; the legend gives larger KLs. Raises ConfigError
    without matplotlib.
    """
    policies = results["policies"].values()
    end = FAR * float(np.median([policy["kl"]["mean"] for policy in policies]))
    most = 1.06 * max(policy["kl"]["high"] for policy in policies if policy["kl"]["mean"] <= end)
    with style():
        figure, grid = panels(1, 3, (10.0, 4.2))
        for axes, procedure in zip(grid, results["procedures"], strict=True):
            if judge == "reward":
                for aim, colour in {"identity": QUIET, "optimal": INK}.items():
                    points = sweep(parse_procedure(procedure), parse_aim(aim))[0]
                    plot_line(axes, points, colour, label=f"theory, {aim}")
                    axes.lines[-1].set(linestyle="--", linewidth=1)
            for method in results["methods"]:
                own = sorted((p for p in policies if p["method"] == method), key=lambda p: float(p["kl"]["mean"]))
                kl, wins = [p["kl"] for p in own], [p["win_rates"][judge][procedure] for p in own]
                draw_line(axes, method, kl, wins, most=most, methods=list(results["methods"]))
            axes.set(title=procedure, xlabel="KL to the reference, nats", xlim=(0, most))
            axes.autoscale_view(scalex=False)
        grid[0].set(ylabel=f"win rate by {SPOKEN[judge]}, %")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", labelspacing=0.2)
        for ending in (".svg", ".png"):
            save(figure, folder / f"win-rate-by-kl-{judge}{ending}")


def draw_line(
    axes: Any,
    method: str,
    kl: Sequence[Estimate],
    values: Sequence[Estimate],
    *,
    most: float,
    methods: Sequence[str],
    scale: float = 100.0,
) -> None:
    """Draw a method's policies with both intervals, joined in order of KL; the legend gives KLs over ``most``.

    ``methods`` are all that the figure has: those of one colour have markers of their own.
    """
    colour = method_of(method).colour
    alike = [name for name in methods if method_of(name).colour == colour]
    marker = MARKERS[alike.index(method) % len(MARKERS)]
    for x, y in zip(kl, values, strict=True):
        axes.plot([x["low"], x["high"]], [scale * y["mean"]] * 2, color=colour, linewidth=0.8)
        axes.plot([x["mean"]] * 2, [scale * y["low"], scale * y["high"]], color=colour, linewidth=0.8)
    axes.plot(
        [x["mean"] for x in kl],
        [scale * y["mean"] for y in values],
        color=colour,
        marker=marker,
        markersize=4,
        markerfacecolor=colour if method_of(method).ours else PAPER,
        linewidth=1,
        label=", ".join([method, *(f"{x['mean']:.3g} nats" for x in kl if x["mean"] > most)]),
        zorder=3,
    )
