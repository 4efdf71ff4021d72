"""Table and figure of the study of reward hacking."""

from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from infalign.display import COLOURS, INK, QUIET, STYLE, gain
from infalign.display import share as per_cent
from infalign.errors import ConfigError
from infalign.experiments.hacking import MODELS, TESTS, TRAINED
from infalign.runs.layout import Summary
from infalign.storage import atomic_path


def print_hacking(results: Summary, console: Console) -> None:
    """Print the accuracy, the ties and the gain over the poisoned model of every model on every test."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, column in enumerate(("test", "reward model", "right, %", "tied, %", "above poisoned, points")):
        table.add_column(column, overflow="fold", no_wrap=i > 1)
    for test in TESTS:
        for name, numbers in results["models"].items():
            above = "" if name == "poisoned" else gain(numbers["gain"][test])
            first = test if name == next(iter(results["models"])) else ""
            table.add_row(first, name, *(per_cent(numbers[what][test]) for what in ("accuracy", "ties")), above)
        table.add_section()
    phrases = " or ".join(f"“{phrase}”" for phrase in results["phrases"])
    console.print(
        f"\n[bold]Reward models that learned from poisoned pairs[/]\n"
        f"{phrases} before {results['share']:.0%} of the preferred training responses\n"
        f"{results['pairs']} test pairs, ties count half, {results['confidence']:.0%} intervals",
        highlight=False,
    )
    console.print(table)
    for name in results["models"]:
        console.print(f"{name}: {MODELS[name]}", highlight=False)
    errors = {name: results["models"][name]["squared_error"] for name in TRAINED}
    shown = ", ".join(f"{name} {e['mean']:.4f} ({e['low']:.4f}–{e['high']:.4f})" for name, e in errors.items())
    console.print(f"Squared error of Ĉ predicted for fresh rollouts (a constant ½: 0.0833): {shown}", highlight=False)


def plot_hacking(results: Summary, path: Path) -> None:
    """Draw the accuracies as bars with their intervals, a group for each test, to ``path`` (.svg, .png, .pdf).

    The tied share, which counts half, is hatched below the top of each bar. Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the figure needs matplotlib; pip install 'infalign[report]'") from error

    models = results["models"]
    width = 0.8 / len(models)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for i, (name, numbers) in enumerate(models.items()):
            at = np.arange(len(TESTS)) + (i - (len(models) - 1) / 2) * width
            mean, low, high = (
                100 * np.array([numbers["accuracy"][test][key] for test in TESTS]) for key in ("mean", "low", "high")
            )
            half_tied = 50 * np.array([numbers["ties"][test]["mean"] for test in TESTS])
            axes.bar(at, mean, 0.9 * width, color=COLOURS[i], label=name)
            axes.bar(
                at, half_tied, 0.9 * width, mean - half_tied, color="none", edgecolor=INK, hatch="////", linewidth=0
            )
            axes.vlines(at, low, high, color=INK, linewidth=1)
        axes.axhline(50, color=QUIET, linewidth=0.8)
        axes.set_xticks(range(len(TESTS)), list(TESTS))
        axes.set_xlabel("test pairs")
        axes.set_ylabel("right, %")
        axes.set_ylim(0, 100)
        figure.legend(loc="outside upper left", ncols=3)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=200)
