"""Metrics of tables of rewards: as tables in the terminal, as a figure, and as a page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from infalign.core.display import (
    LOOKS,
    QUIET,
    amount,
    gain,
    heading,
    number,
    panels,
    plain_table,
    printable,
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


class Shown(NamedTuple):
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
    title = "How often a response is right, %" if shares else "Mean reward"
    yield from _grids(title, about, metrics, _share if shares else amount, PER_TABLE)
    if apart:
        about = f"{_range(apart, 'prompts')} shared prompts"
        if alone := max(record["alone"] for record in apart):
            about += f"; up to {alone:,} that only one of two models has are left out"
        title = f"Paired differences{', points' * shares}"
        yield from _grids(title, about, apart, gain if shares else ratio, PER_TABLE - 1)
    for (row, name), records in _by_model(found["worth"]):
        columns = ("KL, nats", "ordinary RLHF", f"for {name}", "difference")
        rows = [(f"{r['kl']:g}", share(r["ordinary"]), share(r["law"]), gain(r["difference"])) for r in records]
        about = f"today {share(records[0]['today'])}; most that a policy trained on these responses can have"
        yield Shown(f"What training for {name} is worth, %: {row}", about, columns, rows)


def _by_model(records: Sequence[Numbers]) -> Iterator[tuple[tuple[str, str], list[Numbers]]]:
    yield from ((key, list(own)) for key, own in groupby(records, lambda record: (row_name(record), record["metric"])))


def _share(record: Numbers) -> str:
    """Return a share; one that a model claims is marked, and where there are only bounds, these."""
    if record["claim"] == "bounds":
        return f"{number(100 * record['low'], '.1f')} to {number(100 * record['high'], '.1f')}"
    return ("≈" if record["claim"] == "model" else "") + share(record)


def remarks(found: Numbers) -> Iterator[str]:
    """Yield sentences on what the numbers mean."""
    yield from found["notes"]
    claims = {record["claim"] for record in found["metrics"]}
    if "model" in claims:
        yield "≈: for more responses than a prompt has, by rates that fit the counts; the interval holds for any rates."
    if "bounds" in claims:
        yield "a to b: for more than twice as many responses as a prompt has there are only bounds."
    for (row, name), records in _by_model(found["worth"]):
        if not any(record["difference"]["low"] > 0 for record in records):
            most = 100 * max(record["difference"]["high"] for record in records)
            yield f"{row}: no gain over ordinary RLHF is shown for {name}; at most {most:.1f} points are possible."


def _range(records: Sequence[Numbers], least: str, most: str | None = None) -> str:
    ends = min(record[least] for record in records), max(record[most or least] for record in records)
    return " to ".join(f"{end:,}" for end in dict.fromkeys(ends))


def row_name(record: Numbers) -> str:
    """Return the model of a record, or the two that are compared, with the value of the column that splits the rows."""
    models = [record["model"], *([record["against"]] if "against" in record else [])]
    return printable(" − ".join(models) + (f", {record['part']}" if record["part"] else ""))


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
            heading(console, shown.title, f"{shown.about}, {100 * found['confidence']:g}% intervals over prompts")
        table = plain_table(*shown.columns, breaking=[0])
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)
    for sentence in remarks(found):
        say(console, sentence, wrap=True)


def write_measured(found: Numbers, curve: Numbers, path: Path) -> None:
    """Write the figure as PNG or SVG, or as a page with the tables, as the ending of ``path`` says."""
    with style("figures and pages need"):
        figure = draw_measured(curve, found["worth"])
        if path.suffix != ".html":
            save(figure, path)
            return
        with TemporaryDirectory() as folder:
            save(figure, image := Path(folder) / "figure.svg")
            svg = image.read_text(encoding="utf-8")
    page = html_template("measured.html.j2")
    html = page.render(found=found, tables=shown_tables(found), remarks=remarks(found), svg=svg[svg.index("<svg") :])
    write_text(path, html)


def draw_measured(curve: Numbers, worth: Sequence[Numbers] = ()) -> Any:
    """Return the figure of a metric of k over k, of the paired differences, and of pass@k over KL, if there are any."""
    parts = [(what, curve[what]) for what in ("metrics", "differences") if curve[what]]
    count, lines = len(parts) + bool(worth), max(len(list(_looks(records))) for _, records in (*parts, ("", worth)))
    figure, grid = panels(1, count, (4.8 * count, 3.6 + 0.2 * lines))
    row = np.atleast_1d(grid)
    for (what, records), axes in zip(parts, row, strict=False):
        first = records[0]
        scale, unit = (100, ", %" if what == "metrics" else ", points") if first["unit"] == "share" else (1, "")
        kind, about = first["metric"].removesuffix(str(first["k"])), ""
        for name, (color, marker) in _looks(records):
            own = [record for record in records if row_name(record) == name]
            ks = np.array([record["k"] for record in own])
            mean, low, high = (scale * np.array([r[key] for r in own], float) for key in ("mean", "low", "high"))
            sure = np.array([record.get("claim", "unbiased") == "unbiased" for record in own])
            about = about if sure.all() else " (dotted, or only a band: claims for more responses than there are)"
            axes.fill_between(ks, low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(ks, mean, ":", color=color)
            axes.plot(ks[sure], mean[sure], color=color, marker=marker, markersize=3.5, label=_label(name))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        of = f"{kind}k{unit}"
        axes.set(xlabel=f"k{about}", ylabel=of if what == "metrics" else f"paired difference of {of}")
        if what == "differences":
            axes.axhline(0, color=QUIET, linewidth=0.8)
    for name, (color, marker) in _looks(worth):
        own = [record for record in worth if row_name(record) == name]
        kls = [0.0, *(record["kl"] for record in own)]
        for what, line, label in (("ordinary", "--", "ordinary RLHF"), ("law", "-", f"for {own[0]['metric']}")):
            ends = [own[0]["today"], *(record[what] for record in own)]
            mean, low, high = (100 * np.array([end[key] for end in ends]) for key in ("mean", "low", "high"))
            row[-1].plot(kls, mean, line, color=color, marker=marker, markersize=3.5, label=_label(f"{name}, {label}"))
            row[-1].fill_between(kls, low, high, color=color, alpha=0.08, linewidth=0)
        row[-1].set(xlabel="KL to the model, nats", ylabel=f"{own[0]['metric']} after training at best, %")
    for axes in row:  # above the lines, not over them
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return figure


def _looks(records: Sequence[Numbers]) -> Iterator[tuple[str, tuple[str, str]]]:
    return zip(dict.fromkeys(map(row_name, records)), cycle(LOOKS), strict=False)


def _label(name: str) -> str:
    short = name if len(name) <= 44 else f"{name[:22]}…{name[-21:]}"
    return " " + short.replace("$", r"\$")  # not read as mathematics, nor hidden for an underscore in front
