"""Figures of the analytic curves: win rate against KL, and the laws behind a point."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from infalign.core.display import COLORS, INK, QUIET, panels, save, style
from infalign.theory.curve import Point

COLOR_OF_TRANSFORM = {  # the same in every figure
    "identity": COLORS[0],
    "log": COLORS[4],
    "exp:5": COLORS[2],
    "exp:10": COLORS[1],
    "exp:-5": COLORS[5],
    "exp:-10": COLORS[3],
    "optimal": INK,
}
DASHES = ("-", "--", "-.", ":")


def write_curves(path: Path, points: Sequence[Point]) -> None:
    """Draw the win rate against KL, a line through the points of each transformation."""
    with style():
        figure, axes = panels(1, 1, (5.6, 3.6))
        first, lines = points[0], by_transform(points)
        colors = _colors(lines)
        for name, line in lines.items():
            plot_line(axes, line, colors[name], label=name)
        against = "" if first.base == first.procedure else f" against {first.base}"
        axes.set(xlabel="KL to the base policy, nats", ylabel=f"win rate as {first.procedure}{against}, %")
        axes.set(xlim=(0, max(point.kl for point in points)))
        figure.legend(loc="outside right center", reverse=True)
        save(figure, path)


def write_laws(path: Path, points: Sequence[Point]) -> None:
    """Draw the density and the CDF of the calibrated reward under the aligned policy of each point."""
    with style():
        figure, (density, cdf) = panels(1, 2, (7.2, 3.4))
        colors = _colors(point.transform for point in points)
        budgets = list(dict.fromkeys(round(point.kl, 6) for point in points))
        for point in points:
            label = point.transform if len(budgets) == 1 else f"{point.transform}, {point.kl:.3g} nats"
            dash = DASHES[budgets.index(round(point.kl, 6)) % len(DASHES)]
            density.plot(point.law.u, point.law.density, dash, color=colors[point.transform], label=label)
            cdf.plot(point.law.u, point.law.cdf, dash, color=colors[point.transform])
        highest = max(float(point.law.density.max()) for point in points)
        density.set(yscale="log", ylabel="density of the aligned policy", ylim=(1e-3, 2 * highest))
        cdf.plot([0, 1], [0, 1], color=QUIET, linewidth=0.8)
        density.axhline(1, color=QUIET, linewidth=0.8, label="base policy")
        cdf.set(ylabel="CDF", ylim=(0, 1))
        for axes in (density, cdf):
            axes.set(xlabel="calibrated reward u", xlim=(0, 1))
        figure.legend(loc="outside upper left", ncols=4)
        save(figure, path)


def by_transform(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Return the points of each transformation, in their order."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.transform, []).append(point)
    return lines


def _colors(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each transformation: its own, or one that is left over."""
    found = {name: COLOR_OF_TRANSFORM.get(name, "") for name in names}
    free = [color for color in COLORS if color not in found.values()] or list(COLORS)
    others = [name for name, color in found.items() if not color]
    return found | {name: free[i % len(free)] for i, name in enumerate(others)}


def plot_line(axes: Any, line: Sequence[Point], color: str, label: str | None = None) -> None:
    """Draw one transformation's win rate, from 50 % at 0 nats if both are served alike; the optimum dashed, on top."""
    start = [(0.0, 0.5)] if line[0].base == line[0].procedure else []
    kl, win_rate = np.array([*start, *((point.kl, point.win_rate) for point in line)]).T
    root = np.sqrt(kl)  # win rates are smooth in √KL
    fine = np.linspace(root[0], root[-1], 200)
    dash, above = ((0, (4, 2)), 3) if line[0].transform == "optimal" else ("-", 2)
    wins = 100 * PchipInterpolator(root, win_rate)(fine)
    axes.plot(fine**2, wins, linestyle=dash, color=color, zorder=above, label=label)
