"""What tables, numbers and figures look like: one set of helpers for terminal, report and plots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from infalign.errors import ConfigError
from infalign.storage import atomic_path

MARKERS = "osD^vP"


def plain_table(*columns: str) -> Table:
    """Return an empty table of two columns of names, which break where space is short, the others unbroken."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i > 1)
    return table


def share(e: Mapping[str, float]) -> str:
    """Return an estimated share in per cent with its interval: ``71.2 (69.5–72.9)``."""
    return amount({key: 100 * value for key, value in e.items()}, digits=1)


def amount(e: Mapping[str, float], digits: int = 2) -> str:
    """Return an estimate with its interval: ``0.93 (0.88–0.98)``."""
    return f"{e['mean']:.{digits}f} ({e['low']:.{digits}f}–{e['high']:.{digits}f})"


def gain(e: Mapping[str, float]) -> str:
    """Return a difference of shares in percentage points with its interval: ``+1.2 (−0.4 to +2.8)``."""
    return "{} ({} to {})".format(*(in_points(e[key]) for key in ("mean", "low", "high")))


def in_points(difference: float) -> str:
    """Return a difference of shares in percentage points: ``+1.2``."""
    return f"{100 * difference:+.1f}".replace("-", "−")


PAPER, INK = "#ffffff", "#1c2024"  # in a report they become CSS variables, which follow the light or dark scheme
QUIET = "#85898f"  # legible on both
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, for every colour vision
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "infalign",  # the same curves are the same bytes
    "savefig.dpi": 200,
}


def style() -> Any:
    """Return the context in which figures are drawn. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib; pip install 'infalign[report]'") from error
    return matplotlib.rc_context(STYLE)


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure of ``size`` inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def save(figure: Any, path: Path) -> None:
    """Write the figure in the format of its ending, without dates or versions."""
    absent = {
        ".png": ["Software"],
        ".svg": ["Creator", "Date", "Format", "Type"],
        ".pdf": ["Creator", "Producer", "CreationDate"],
    }
    with atomic_path(path) as temporary:
        figure.savefig(temporary, metadata=dict.fromkeys(absent[path.suffix]))
