"""Metrics of tables of rewards: as tables in the terminal, as a figure, and as a page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from infalign.core.display import (
    LOOKS,
    QUIET,
    amount,
    gain,
    heading,
    panels,
    plain_table,
    ratio,
    save,
    say,
    share,
    style,
)
from infalign.core.storage import write_text
from infalign.report.templates import html_template

Numbers = Mapping[str, Any]
PER_TABLE = 3  # columns with intervals that fit a terminal of 80 characters
ENDINGS = ".png", ".svg", ".html"


@dataclass(frozen=True, slots=True)
class Shown:
    """A table: its title, a line about it, its columns, and its rows of texts."""

    title: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def shown_tables(found: Numbers) -> Iterator[Shown]:
    """Yield the tables of what was measured, each at most three columns of numbers wide."""
    metrics, apart = found["metrics"], found["differences"]
    shares = metrics[0]["unit"] == "share"
    about = f"{_range(metrics, 'prompts')} prompts × {_range(metrics, 'fewest', 'most')} samples"
    yield from _grids(
        "How often a response is right, %" if shares else "Mean reward",
        about,
        metrics,
        share if shares else amount,
        PER_TABLE,
    )
    if apart:
        about = f"{_range(apart, 'prompts')} shared prompts"
        if alone := max(record["alone"] for record in apart):
            about += f"; up to {alone:,} that only one of two models has are left out"
        yield from _grids(
            f"Paired differences{', points' * shares}", about, apart, gain if shares else ratio, PER_TABLE - 1
        )


def _range(records: Sequence[Numbers], least: str, most: str | None = None) -> str:
    ends = min(record[least] for record in records), max(record[most or least] for record in records)
    return " to ".join(f"{end:,}" for end in dict.fromkeys(ends))


def row_name(record: Numbers) -> str:
    """Return the model of a record, or the two that are compared, with the value of the column that splits the rows."""
    models = [record["model"], *([record["against"]] if "against" in record else [])]
    return " − ".join(models) + (f", {record['part']}" if record["part"] else "")


def _grids(
    title: str, about: str, records: Sequence[Numbers], cell: Callable[[Numbers], str], width: int
) -> Iterator[Shown]:
    names = list(dict.fromkeys(record["metric"] for record in records))
    rows = list(dict.fromkeys(map(row_name, records)))
    cells = {(row_name(record), record["metric"]): cell(record) for record in records}
    if len(rows) == 1 and len(names) > width:  # one model: a row for each metric
        yield Shown(f"{title}: {rows[0]}", about, ("metric", ""), [(name, cells[rows[0], name]) for name in names])
        return
    for start in range(0, len(names), width):
        some = names[start : start + width]
        texts = [(row, *(cells.get((row, name), "–") for name in some)) for row in rows]
        yield Shown(*(("", "") if start else (title, about)), ("model", *some), texts)


def print_measured(found: Numbers, console: Console) -> None:
    """Print the tables and notes."""
    for shown in shown_tables(found):
        if shown.title:
            heading(console, shown.title, f"{shown.about}, {found['confidence']:.0%} intervals over prompts")
        table = plain_table(*shown.columns, breaking=[0])
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)
    for note in found["notes"]:
        say(console, note, wrap=True)


def write_measured(found: Numbers, curve: Numbers, path: Path) -> None:
    """Write the figure as PNG or SVG, or as a page with the tables, as the ending of ``path`` says."""
    with style("figures and pages need"):
        figure = draw_measured(curve)
        if path.suffix != ".html":
            save(figure, path)
            return
        with TemporaryDirectory() as folder:
            save(figure, image := Path(folder) / "figure.svg")
            svg = image.read_text(encoding="utf-8")
    page = html_template("measured.html.j2")
    write_text(path, page.render(found=found, tables=shown_tables(found), svg=svg[svg.index("<svg") :]))


def draw_measured(curve: Numbers) -> Any:
    """Return the figure of a metric of k over k, and of the paired differences if there are any."""
    parts = [(title, curve[title]) for title in ("metrics", "differences") if curve[title]]
    figure, grid = panels(1, len(parts), (5.2 * len(parts), 3.8))
    for (title, records), axes in zip(parts, [grid] if len(parts) == 1 else grid, strict=True):
        names = list(dict.fromkeys(map(row_name, records)))
        for name, (color, marker) in zip(names, cycle(LOOKS), strict=False):
            own = [record for record in records if row_name(record) == name]
            scale = 100 if own[0]["unit"] == "share" else 1
            mean, low, high = ([scale * record[key] for record in own] for key in ("mean", "low", "high"))
            ks = [record["k"] for record in own]
            axes.fill_between(ks, low, high, color=color, alpha=0.15, linewidth=0)
            label = " " + name.replace("$", r"\$")  # not read as mathematics, nor hidden for an underscore in front
            axes.plot(ks, mean, color=color, marker=marker, markersize=3.5, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        first = records[0]
        kind, unit = first["metric"].removesuffix(str(first["k"])), {"share": ", %"}.get(first["unit"], "")
        axes.set(xlabel="k", ylabel=f"{kind}k{unit}" if title == "metrics" else f"paired difference of {kind}k")
        if title == "differences":
            axes.axhline(0, color=QUIET, linewidth=0.8)
        axes.legend()
    return figure
