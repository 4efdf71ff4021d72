"""What tables, numbers and figures look like: one set of helpers for terminal, report and plots."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from infalign.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Interval = Mapping[str, Any]  # mean, low and high
MARKERS = "osD^vP"


def say(console: "Console", text: str, *, mark: str = "", style: str = "", wrap: bool = False) -> None:
    """Print a ``mark`` and a text without markup or escapes; a long line is not broken: a path in it can be copied."""
    console.print(Text.assemble((mark, style), printable(text, "\n\t")), soft_wrap=not wrap)


warn = partial(say, mark="! ", style="yellow")


def printable(text: str, also: str = "") -> str:
    r"""Return a text that spells its escapes and changes of direction, such as ``\x1b``; the letters ``also`` stay."""
    return "".join(c if c.isprintable() or c in also else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, thing: str) -> str:
    """Return a number of things.

    >>> counted(1, "job"), counted(2000, "job")
    ('1 job', '2,000 jobs')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def heading(console: "Console", title: str, *below: str) -> None:
    """Print an empty line, a title in bold and the lines below it."""
    say(console, "".join(f"\n{line}" for line in below), mark=f"\n{printable(title)}", style="bold", wrap=True)


class _Table(Table):
    """A table whose cells, which may hold a user's words, are shown as `say` shows a text."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(printable(cell, "\n\t")) for cell in cells), **options)


def plain_table(*columns: str, breaking: Collection[int] = (0, 1)) -> Table:
    """Return an empty table; in a narrow terminal the columns ``breaking`` wrap, none below its heading."""
    table = _Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        heading = max(map(len, column.splitlines()), default=0)
        table.add_column(Text(printable(column, "\n")), overflow="fold", no_wrap=i not in breaking, min_width=heading)
    return table


def number(value: float, form: str = ".2f") -> str:
    """Return a number as it is shown, with a minus sign where a hyphen would be written: ``−0.30``."""
    return f"{value:{form}}".replace("-", "−")


def amount(e: Interval, digits: int = 2, between: str = "–") -> str:
    """Return an estimate with its interval: ``0.93 (0.88–0.98)``."""
    return _with_interval(e, lambda value: number(value, f".{digits}f"), between)


ratio = partial(amount, between=" to ")  # of an estimate that can be negative: 0.12 (−0.05 to 0.29)


def share(e: Interval) -> str:
    """Return an estimated share in per cent with its interval: ``71.2 (69.5–72.9)``."""
    return _with_interval(e, lambda value: number(100 * value, ".1f"))


def percent(share: float) -> str:
    """Return a share known to many digits in per cent: ``97.36``, and ``100 − 4.4e-06`` where that would round to 100.

    >>> percent(0.97364), percent(1 - 4.4e-8), percent(1.0)
    ('97.36', '100 − 4.4e-06', '100.00')
    """
    rounded = f"{100 * share:.2f}"
    return f"100 − {100 * (1 - share):.1e}" if rounded == "100.00" and share < 1 else rounded


def gain(e: Interval) -> str:
    """Return a difference of shares in percentage points with its interval: ``+1.2 (−0.4 to +2.8)``."""
    return _with_interval(e, in_points, " to ")


def in_percent(e: Interval) -> str:
    """Return an estimated share for a sentence: ``71.2% (69.5–72.9)``."""
    return share(e).replace(" ", "% ", 1)


def gain_in_points(e: Interval) -> str:
    """Return a difference of shares for a sentence: ``+1.2 points (−0.4 to +2.8)``."""
    return gain(e).replace(" ", " points ", 1)


def _with_interval(e: Interval, write: Callable[[float], str], between: str = "–") -> str:
    mean, low, high = (write(e[key]) for key in ("mean", "low", "high"))
    return f"{mean} ({low}{' to ' if '−' in low else between}{high})"


def in_points(difference: float) -> str:
    """Return a difference of shares in percentage points: ``+1.2``."""
    return number(100 * difference, "+.1f")


def duration(seconds: float) -> str:
    """Return a time in the unit that fits.

    >>> duration(0.04), duration(42.3), duration(500.0), duration(9000.0)
    ('0 s', '42 s', '8.3 min', '2.5 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


PAPER, INK = "#ffffff", "#1c2024"  # in a report they become CSS variables, which follow the light or dark scheme
QUIET = "#85898f"  # legible on both
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, for every color vision
LOOKS = [(COLORS[i % 6], MARKERS[(i + i // 6) % 6]) for i in range(12)]  # no two alike
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
    "svg.hashsalt": "infalign",  # the same curves give the same bytes
    "savefig.dpi": 200,
}


def style(what: str = "figures need") -> Any:
    """Return the context in which figures are drawn. Raises ConfigError, which says ``what``, without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{what} matplotlib; pip install 'infalign[report]'") from error
    return matplotlib.rc_context(STYLE)


def panels(rows: int, columns: int, size: tuple[float, float], *, sharex: bool = False) -> tuple[Any, Any]:
    """Return a figure of ``size`` inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=sharex)


def save(figure: Any, path: Path, *, salt: str = "infalign", stamped: bool = False) -> None:
    """Write the figure in the format of its ending, without dates or versions unless ``stamped``.

    SVG files that are shown on one page need different salts: the ids in a file are hashed with it.
    """
    import matplotlib

    from infalign.core.storage import atomic_path  # which imports NumPy

    absent = {".png": ["Software"], ".svg": ["Creator", "Date", "Format", "Type"]}
    with matplotlib.rc_context({"svg.hashsalt": salt}), atomic_path(path) as temporary:
        figure.savefig(temporary, metadata={} if stamped else dict.fromkeys(absent[path.suffix]))
