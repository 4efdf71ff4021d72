"""The stage report: one HTML file with the figures."""

from collections.abc import Iterator
from functools import partial

from infalign.core.progress import OnProgress
from infalign.recipe.settings import Recipe
from infalign.runs.layout import Layout, Summary
from infalign.runs.report.page import write
from infalign.runs.run import Run
from infalign.runs.units import Unit


def units(run: Run) -> Iterator[Unit]:
    """Yield the writing of the report."""
    yield Unit(
        "report",
        "report",
        inputs=(run.layout.results,),
        settings={},
        output=run.layout.report,
        work=partial(write_report, run.recipe, run.layout),
    )


def write_report(recipe: Recipe, layout: Layout, *, on_progress: OnProgress) -> Summary:
    """Write the report of a run whose evaluation is done."""
    write(recipe, layout)
    return {}
