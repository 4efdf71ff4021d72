"""Table and figure of the study of reward hacking."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from infalign.core.display import (
    COLOURS,
    INK,
    QUIET,
    amount,
    gain,
    heading,
    panels,
    plain_table,
    save,
    say,
    share,
    style,
)
from infalign.experiments.hacking import MODELS, TESTS, TRAINED
from infalign.pipeline.units import Summary


def print_hacking(results: Summary, console: Console) -> None:
    """Print the accuracy, the ties and the gain over the poisoned model of every model on every test."""
    table = plain_table("test", "reward model", "right, %", "tied, %", "above poisoned, points")
    for test in TESTS:
        for name, numbers in results["models"].items():
            above = "" if name == "poisoned" else gain(numbers["gain"][test])
            first = test if name == next(iter(results["models"])) else ""
            table.add_row(first, name, *(share(numbers[what][test]) for what in ("accuracy", "ties")), above)
        table.add_section()
    phrases = " or ".join(f"“{phrase}”" for phrase in results["phrases"])
    heading(
        console,
        "Reward models that learned from poisoned pairs",
        f"{phrases} before {results['share']:.0%} of the preferred training responses",
        f"{results['pairs']} test pairs, ties count half, {results['confidence']:.0%} intervals",
    )
    console.print(table)
    for name in results["models"]:
        say(console, f"{name}: {MODELS[name]}", wrap=True)
    errors = {name: results["models"][name]["squared_error"] for name in TRAINED}
    shown = ", ".join(f"{name} {amount(e, digits=4)}" for name, e in errors.items())
    say(console, f"Squared error of Ĉ predicted for fresh rollouts (a constant ½: 0.0833): {shown}", wrap=True)


def plot_hacking(results: Summary, path: Path) -> None:
    """Draw the accuracies of a study (`draw_accuracies`) and save them to ``path`` (.svg, .png, .pdf).

    Raises ConfigError without matplotlib.
    """
    with style("the figure needs"):
        save(draw_accuracies(results["models"]), path, stamped=True)


def draw_accuracies(models: Mapping[str, Summary]) -> Any:
    """Return a figure of the accuracies as bars with intervals, one group per test, for a style that is set.

    The share of ties, which count 1/2, is hatched below the top of each bar.
    """
    width = 0.8 / len(models)
    figure, axes = panels(1, 1, (6.4, 3.4))
    for i, (name, numbers) in enumerate(models.items()):
        at = np.arange(len(TESTS)) + (i - (len(models) - 1) / 2) * width
        mean, low, high = (
            100 * np.array([numbers["accuracy"][test][key] for test in TESTS]) for key in ("mean", "low", "high")
        )
        half_tied = 50 * np.array([numbers["ties"][test]["mean"] for test in TESTS])
        axes.bar(at, mean, 0.9 * width, color=COLOURS[i], label=name)
        axes.bar(at, half_tied, 0.9 * width, mean - half_tied, color="none", edgecolor=INK, hatch="////", linewidth=0)
        axes.vlines(at, low, high, color=INK, linewidth=1)
    axes.axhline(50, color=QUIET, linewidth=0.8)
    axes.set_xticks(range(len(TESTS)), list(TESTS))
    axes.set_xlabel("test pairs")
    axes.set_ylabel("right, %")
    axes.set_ylim(0, 100)
    figure.legend(loc="outside upper left", ncols=3)
    return figure
