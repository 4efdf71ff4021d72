"""The step report: one HTML file with the figures."""

from collections.abc import Sequence
from functools import partial

from infalign.core.progress import OnProgress
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.page import write
from infalign.steps.run import Run


def unit(run: Run, finished: Sequence[str]) -> Unit:
    """Return the writing of the report; ``finished`` names the units whose records it shows."""
    return Unit(
        "report",
        "report",
        inputs=(run.layout.results,),
        settings={},
        output=run.layout.report,
        work=partial(write_report, run.recipe, run.layout, tuple(finished)),
    )


def write_report(recipe: Recipe, layout: Layout, finished: Sequence[str], *, on_progress: OnProgress) -> Summary:
    """Write the report of a run whose evaluation is done."""
    write(recipe, layout, finished)
    return {}
