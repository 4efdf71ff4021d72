"""The command that shows where a run stands."""

import sys
from typing import Annotated

from cyclopts import Parameter

from infalign.cli.completion import recipes_and_runs
from infalign.cli.options import AsJson, Overrides, read_run_or_recipe
from infalign.cli.output import open_console, print_json
from infalign.core.errors import PartialError

STATUS_EPILOGUE = """\
Examples:
  infalign status runs/demo
  infalign status demo --set rollout.k=128
  infalign status runs/demo || infalign run demo

done: its record has these settings and inputs. stale: it was made with other
ones; the reason is shown. partial: it was begun, and rerunning the command
resumes it. missing: nothing is there. Another version of a library is shown
and undoes nothing.

Exit codes: 0 if all is done, 4 if not. Nothing is written, and a run in
progress is not disturbed.
"""


def status(
    run: Annotated[
        str,
        Parameter(help="A run directory, or a recipe; a folder of that name goes first.", completer=recipes_and_runs),
    ],
    /,
    *,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what is done, what is not and why; exit code 4 if work is left."""
    from infalign.steps.status import print_status
    from infalign.steps.status import status as status_of

    found = status_of(read_run_or_recipe(run, set_))
    if as_json:
        print_json(found.as_dict())
    else:
        print_status(found, open_console())
    if not found.done:
        sys.exit(PartialError.exit_code)
