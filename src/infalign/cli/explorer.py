"""The command that writes the explorer."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from infalign.cli.completion import runs
from infalign.cli.options import new_file
from infalign.cli.output import open_console
from infalign.display import say

EXPLORE_EPILOGUE = """\
Examples:
  infalign explore
  infalign explore runs/demo --output demo.html

Choose N, KL, K, what the policy knows of ranks and the price of a draw, and see
what each transformation wins, which Φ and density are best, and what N is
worth. The page needs no network and can be mailed. With a run, its policies are
points. The laws take half a minute to compute.
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
    from infalign.errors import ConfigError
    from infalign.progress import ProgressDisplay
    from infalign.runs.layout import Layout
    from infalign.runs.results import read_results
    from infalign.storage import write_text
    from infalign.theory.explorer import explorer_curves, explorer_page

    file, measured = new_file(output, ".html"), []
    if run is not None:
        if not Layout(run).results.is_file():
            raise ConfigError(f"{run} has no results.json; finish it with `infalign run`")
        measured = [
            {"name": name, "kl": policy["kl"]["mean"], "win_rates": policy["win_rates"]["reward"]}
            for name, policy in read_results(run)["policies"].items()
        ]
    console = open_console()
    with ProgressDisplay(console) as display:
        display.start("laws")
        curves = explorer_curves(on_progress=partial(display.update, "laws"))
    write_text(file, explorer_page(curves, measured))
    say(console, f"Explorer: {file}", markup=False)
