"""The command that writes the explorer."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from infalign.cli.completion import runs
from infalign.cli.options import new_file
from infalign.cli.output import open_console
from infalign.core.display import say

EXPLORE_EPILOGUE = """\
Examples:
  infalign explore
  infalign explore runs/demo --output demo.html

Choose N, KL, K, what the policy knows of ranks and the price of a draw, and see
what each transformation wins, which Φ and density are best, and what N is
worth. The page needs no network and can be mailed. With a run, its policies are
points; its report has the same page.
"""


def explore(
    run: Annotated[
        Path | None, Parameter(help="A run directory with results.", show_default=False, completer=runs)
    ] = None,
    /,
    *,
    output: Annotated[Path, Parameter(help="The page to write.")] = Path("explorer.html"),
) -> None:
    """Write a page on which to explore what each transformation wins."""
    from infalign.core.errors import ConfigError
    from infalign.core.storage import write_text
    from infalign.runs.layout import Layout
    from infalign.runs.results import explored, read_results
    from infalign.theory.explorer import explorer_page

    file = new_file(output, ".html")
    if run is not None and not Layout(run).results.is_file():
        raise ConfigError(f"{run} has no results.json; finish it with `infalign run`")
    write_text(file, explorer_page() if run is None else explored(read_results(run)))
    say(open_console(), f"Explorer: {file}", markup=False)
