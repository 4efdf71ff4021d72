"""The look of all figures here: colors for every color vision, and files that are the same for the same data."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

PAPER, INK, QUIET, MARKERS = "#ffffff", "#1c2024", "#85898f", "osD^vP"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito
LOOKS = [(COLORS[i % 6], MARKERS[(i + i // 6) % 6]) for i in range(12)]  # no two alike
STYLE = {
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "infalign",  # the same curves give the same bytes
    "savefig.dpi": 200,
}


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure of ``size`` inches and its axes."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of its ending, without dates or versions."""
    absent = {".png": ["Software"], ".svg": ["Creator", "Date", "Format", "Type"]}
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata=dict.fromkeys(absent[path.suffix]))
