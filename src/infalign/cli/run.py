"""The command that runs a recipe, all of it or up to a stage, or measures one policy from elsewhere beside a run."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from infalign.cli.completion import recipes_and_runs
from infalign.cli.options import DryRun, Overrides, SkipInvalid, read_recipe, read_run_or_recipe
from infalign.cli.output import open_console
from infalign.core.display import counted, say
from infalign.core.errors import ConfigError
from infalign.recipe.built_in import built_in
from infalign.steps import STAGES

if TYPE_CHECKING:
    Stage = str
else:
    Stage = Literal[tuple(STAGES)]

RUN_EPILOGUE = """\
Examples:
  infalign run demo --dry-run           check the data, show the plan
  infalign run demo                     everything, from data to report
  infalign run my.yaml --until train    up to the policies, no evaluation
  infalign run demo --set rollout.k=128    more rollouts, none lost
  infalign run runs/demo --policy ~/models/dpo

With --policy, a folder or hub id, one policy that was trained elsewhere is
measured beside an evaluated run: its KL to the run's reference and its win
rates under the run's procedure, by the run's judges. It needs the reference's
tokenizer and vocabulary. The numbers are kept in evaluation/NAME.DIGEST.
"""


def run(
    recipe: Annotated[
        str,
        Parameter(
            help="A YAML file, or the name of a built-in recipe, such as demo; with --policy also a run directory.",
            completer=recipes_and_runs,
        ),
    ],
    /,
    *,
    until: Annotated[Stage, Parameter(help="The last stage to do.")] = "report",
    policy: Annotated[str | None, Parameter(help="Measure this policy instead, trained anywhere.")] = None,
    set_: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe from data to report; done work is not repeated."""
    if policy is not None:
        if dry_run or until != "report":
            raise ConfigError("--policy measures one policy beside a run: leave out --dry-run and --until")
        from infalign.steps.external_policy import evaluate_external_policy, print_external_policy

        measured, console = read_run_or_recipe(recipe, set_, skip_invalid), open_console()
        print_external_policy(evaluate_external_policy(measured, policy, console=console), console)
        return
    settings, console = read_recipe(recipe, set_, skip_invalid), open_console()
    from infalign.steps import whole_run

    if dry_run:
        from infalign.steps.dry_run import print_plan

        print_plan(settings, console, partial(whole_run.units, until=until))
        return
    root = whole_run.run_recipe(settings, until=until, console=console)
    from infalign.pipeline.records import records
    from infalign.recipe.layout import Layout

    if skipped := records(root)["data"]["summary"]["skipped"]:
        listed = Layout(root).data / "skipped.txt"
        say(console, f"{counted(skipped, 'invalid row')} {'was' if skipped == 1 else 'were'} left out: {listed}")
    if until == "report":
        from infalign.report.tables import print_table
        from infalign.steps.status import print_findings, recorded_recipe, status

        print_findings(status(recorded_recipe(root)).findings, console)
        print_table(root, console)


def run_epilogue() -> str:
    """Return the end of the help of `run`, with its stages and the built-in recipes."""
    stages = "\n".join(f"  {stage:<14}{about}" for stage, about in STAGES.items())
    recipes = "\n".join(f"  {found.name:<17}{found.about}" for found in built_in())
    return f"Built-in recipes:\n{recipes}\n\nStages, in this order:\n{stages}\n\n{RUN_EPILOGUE}"
