"""Figures of the analytic curves: win rate against KL, the laws behind a point, and the paper's figures 2 and 11."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from infalign.core.display import COLOURS, INK, QUIET, panels, save, style
from infalign.method.procedures import parse_procedure
from infalign.theory.curve import Point, parse_aim, sweep

OWN = {  # the same transformation has the same colour in every figure
    "identity": COLOURS[0],
    "log": COLOURS[4],
    "exp:5": COLOURS[2],
    "exp:10": COLOURS[1],
    "exp:-5": COLOURS[5],
    "exp:-10": COLOURS[3],
    "optimal": INK,
}
DASHES = ("-", "--", "-.", ":")
ANALYTIC_PROCEDURES = ("standard", "best-of-2", "best-of-4", "worst-of-2", "worst-of-4")
ANALYTIC_TRANSFORMS = ("identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10", "optimal")
ANALYTIC_COLUMNS = ("procedure", "transform", "kl", "beta", "win_rate", "standard_win_rate")


def write_curves(path: Path, points: Sequence[Point]) -> None:
    """Draw the win rate against KL, a line through the points of each transformation, labelled at its end."""
    with style():
        figure, axes = panels(1, 1, (5.6, 3.6))
        first, lines = points[0], _by_transform(points)
        colours = _colours(lines)
        for name, line in lines.items():
            plot_line(axes, line, colours[name])
        against = "" if first.base == first.procedure else f" against {first.base}"
        axes.set(xlabel="KL to the base policy, nats", ylabel=f"win rate as {first.procedure}{against}, %")
        axes.set(xlim=(0, max(point.kl for point in points)))
        _label_ends(axes, {name: line[-1] for name, line in lines.items()}, colours)
        save(figure, path)


def write_laws(path: Path, points: Sequence[Point]) -> None:
    """Draw the density and the CDF of the calibrated reward under the aligned policy of each point."""
    with style():
        figure, (density, cdf) = panels(1, 2, (7.2, 3.4))
        colours = _colours(point.transform for point in points)
        budgets = list(dict.fromkeys(round(point.kl, 6) for point in points))
        for point in points:
            label = point.transform if len(budgets) == 1 else f"{point.transform}, {point.kl:.3g} nats"
            dash = DASHES[budgets.index(round(point.kl, 6)) % len(DASHES)]
            density.plot(point.law.u, point.law.density, dash, color=colours[point.transform], label=label)
            cdf.plot(point.law.u, point.law.cdf, dash, color=colours[point.transform])
        highest = max(float(point.law.density.max()) for point in points)
        density.set(yscale="log", ylabel="density of the aligned policy", ylim=(1e-3, 2 * highest))
        cdf.plot([0, 1], [0, 1], color=QUIET, linewidth=0.8)
        density.axhline(1, color=QUIET, linewidth=0.8, label="base policy")
        cdf.set(ylabel="CDF", ylim=(0, 1))
        for axes in (density, cdf):
            axes.set(xlabel="calibrated reward u", xlim=(0, 1))
        figure.legend(loc="outside upper left", ncols=4)
        save(figure, path)


def analytic_points() -> list[Point]:
    """Return the points of five procedures, six transformations and the optimum of each, 0.01 to 5 nats."""
    return [
        point
        for procedure in map(parse_procedure, ANALYTIC_PROCEDURES)
        for name in ANALYTIC_TRANSFORMS
        for point in sweep(procedure, parse_aim(name))[0]
    ]


def draw_analytic(points: Sequence[Point]) -> Any:
    """Return a figure of `analytic_points`, a panel for each procedure, for a style that is set."""
    figure, grid = panels(2, 3, (8.4, 5.0))
    for axes, procedure in zip([*grid[0], *grid[1, 1:]], ANALYTIC_PROCEDURES, strict=True):
        for name, line in _by_transform(point for point in points if point.procedure == procedure).items():
            plot_line(axes, line, OWN[name], label=name)
        axes.set(title=procedure, xlim=(0, 3), ylim=(50, 100))
    for axes in (grid[0, 0], grid[1, 1]):
        axes.set(ylabel="win rate, %")
    for axes in (grid[0, 0], *grid[1, 1:]):
        axes.set(xlabel="KL to the base policy, nats")
    grid[1, 0].set_axis_off()
    lines = grid[0, 0].get_legend_handles_labels()
    grid[1, 0].legend(*lines, loc="center", title="Transformation", alignment="left")
    return figure


def _by_transform(points: Iterable[Point]) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.transform, []).append(point)
    return lines


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each transformation: its own, or one that is left over."""
    found = {name: OWN.get(name, "") for name in names}
    free = [colour for colour in COLOURS if colour not in found.values()] or list(COLOURS)
    others = [name for name, colour in found.items() if not colour]
    return found | {name: free[i % len(free)] for i, name in enumerate(others)}


def plot_line(axes: Any, line: Sequence[Point], colour: str, label: str | None = None) -> None:
    """Draw one transformation's win rate, from 50 % at 0 nats if both are served alike; the optimum dashed, on top."""
    start = [(0.0, 0.5)] if line[0].base == line[0].procedure else []
    kl, win_rate = np.array([*start, *((point.kl, point.win_rate) for point in line)]).T
    root = np.sqrt(kl)  # win rates are smooth in √KL
    fine = np.linspace(root[0], root[-1], 200)
    dash, above = ((0, (4, 2)), 3) if line[0].transform == "optimal" else ("-", 2)
    wins = 100 * PchipInterpolator(root, win_rate)(fine)
    axes.plot(fine**2, wins, linestyle=dash, color=colour, zorder=above, label=label)


def _label_ends(axes: Any, ends: dict[str, Point], colours: dict[str, str]) -> None:
    """Write each line's name beside its last point, moved apart where lines meet."""
    bottom, top = axes.get_ylim()
    gap = 0.065  # as a share of the height of the axes
    names = sorted(ends, key=lambda name: ends[name].win_rate)
    steps = gap * np.arange(len(names))
    wanted = np.array([(100 * ends[name].win_rate - bottom) / (top - bottom) for name in names])
    placed = np.clip(isotonic_regression(wanted - steps).x, 0.0, max(0.0, 1.0 - steps[-1])) + steps
    line = {"arrowstyle": "-", "linewidth": 0.7, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0}
    for name, height in zip(names, placed, strict=True):
        axes.annotate(
            name,
            xy=(ends[name].kl, 100 * ends[name].win_rate),
            xytext=(1.07, height),
            textcoords="axes fraction",
            va="center",
            arrowprops=line | {"color": colours[name]},
        )
