"""Commands that run a recipe, all of it or up to a stage, and show where a run stands."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from infalign.cli.completion import recipes_and_runs
from infalign.cli.options import AsJson, DryRun, Overrides, RecipePath, SkipInvalid, read_recipe
from infalign.cli.output import open_console, print_json
from infalign.core.display import counted, say
from infalign.core.errors import ConfigError, PartialError
from infalign.core.spelling import nearest
from infalign.recipe.built_in import ENDINGS, built_in

if TYPE_CHECKING:
    from infalign.recipe.settings import Recipe

STATUS_EPILOGUE = """\
Examples:
  infalign status runs/demo
  infalign status demo --set rollout.k=128
  infalign status runs/demo || infalign run demo

done: a record says that it was made with these settings and inputs. stale: it
was made with others, and the reason is shown. partial: it was begun, and the
same command continues. missing: nothing is there. Another version of a
library is shown and undoes nothing.

Exit codes: 0 if all is done, 4 if not. Nothing is written and nobody is held
up; a run in progress may be looked at.
"""


EVALUATE_EPILOGUE = """\
Examples:
  infalign evaluate demo
  infalign evaluate runs/demo --policy ~/models/dpo
  infalign evaluate runs/demo --policy org/name

A policy from elsewhere needs the reference's tokenizer and vocabulary; what
does not fit is named. Its samples and all numbers (results.json) stay in the
run, in evaluation/NAME.DIGEST, and the same command continues.
"""


def run(
    recipe: RecipePath,
    /,
    *,
    set_: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe from data to report; done work is not repeated."""
    if dry_run:
        _plan("report", recipe, set_, skip_invalid)
        return
    root = _run_until("report", recipe, set_, skip_invalid)
    from infalign.runs.report.tables import print_table
    from infalign.runs.status import print_findings, recorded_recipe
    from infalign.runs.status import status as status_of

    console = open_console()
    print_findings(status_of(recorded_recipe(root)).findings, console)
    print_table(root, console)


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
    from infalign.runs.status import print_status
    from infalign.runs.status import status as status_of

    found = status_of(_of_run_or_recipe(run, set_))
    if as_json:
        print_json(found.as_dict())
    else:
        print_status(found, open_console())
    if not found.done:
        sys.exit(PartialError.exit_code)


def evaluate(
    recipe: Annotated[
        str, Parameter(help="A recipe (YAML); with --policy also a run directory.", completer=recipes_and_runs)
    ],
    /,
    *,
    policy: Annotated[
        str | None,
        Parameter(help="Measure this policy instead, a folder or hub id, trained anywhere.", show_default=False),
    ] = None,
    set_: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
) -> None:
    """Measure win rates and KL on fresh samples.

    Stages before it that are not done yet are done first. With --policy, one other policy is measured beside an
    evaluated run: its KL to the run's reference and its win rates under the run's procedure, by the run's judges.
    """
    if policy is None:
        (_plan if dry_run else _run_until)("evaluate", recipe, set_, skip_invalid)
        return
    if dry_run:
        raise ConfigError("a dry run is of the recipe's own policies: leave out --policy or --dry-run")
    from infalign.runs.guest import evaluate_guest, print_guest

    read, console = _of_run_or_recipe(recipe, set_, skip_invalid), open_console()
    print_guest(evaluate_guest(read, policy, console=console), console)


def up_to(stage: str, about: str) -> Callable[..., None]:
    """Return the command that runs a recipe up to ``stage``; its help begins with ``about``."""

    def command(
        recipe: RecipePath,
        /,
        *,
        set_: Overrides = None,
        skip_invalid: SkipInvalid = False,
        dry_run: DryRun = False,
    ) -> None:
        (_plan if dry_run else _run_until)(stage, recipe, set_, skip_invalid)

    command.__doc__ = f"{about}\n\nStages before it that are not done yet are done first."
    return command


def _of_run_or_recipe(name: str, overrides: list[str] | None, skip_invalid: bool = False) -> "Recipe":
    """Return the recipe of the last run in a folder, or else the recipe itself."""
    from infalign.runs.status import recorded_recipe

    path, names = Path(name), [found.name for found in built_in()]
    if path.is_dir():
        return recorded_recipe(path, overrides)
    if path.suffix in ENDINGS or name in names or path.is_file():
        return read_recipe(name, overrides, skip_invalid)
    runs = {folder.parent.name: str(folder.parent) for folder in path.parent.glob("*/recipe.yaml")}
    known = runs | ({found: found for found in names} if name == path.name else {})
    near = nearest(path.name, known)
    cure = f"did you mean {known[near]}?" if near else "name the run_dir of a recipe, or a recipe (`infalign recipes`)"
    raise ConfigError(f"there is no run directory {name} and no recipe of that name; {cure}")


def _plan(stage: str, path: str, overrides: list[str] | None, skip_invalid: bool) -> None:
    recipe, console = read_recipe(path, overrides, skip_invalid), open_console()
    from infalign.runs.pipeline import units
    from infalign.runs.plan import print_plan

    print_plan(recipe, console, partial(units, until=stage))


def _run_until(stage: str, path: str, overrides: list[str] | None, skip_invalid: bool) -> Path:
    recipe, console = read_recipe(path, overrides, skip_invalid), open_console()
    from infalign.runs import pipeline
    from infalign.runs.layout import Layout, records

    root = pipeline.run(recipe, until=stage, console=console)
    if skipped := records(root)["data"]["summary"]["skipped"]:
        listed = Layout(root).data / "skipped.txt"
        say(console, f"{counted(skipped, 'invalid row')} {'was' if skipped == 1 else 'were'} left out: {listed}")
    return root
