"""The figure of the analytic curves: win rate against KL."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from infalign.core.display import COLORS, INK, panels, save, style
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
