"""Commands that do a run, all of it or up to a stage, on this machine or a cluster, and show where it stands."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.completion import recipes_and_runs
from infalign.cli.options import AsJson, DryRun, Overrides, SkipInvalid, read_recipe, read_run_or_recipe
from infalign.cli.output import open_console, print_json
from infalign.core.errors import ConfigError, PartialError
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
  infalign run my.yaml --until reward-model            all that rollouts need
  infalign run my.yaml --ray-actors 64 --ray-gpus 1    draws and scores them

With --policy, a folder or hub id, one policy that was trained elsewhere is
measured beside an evaluated run: its KL to the run's reference and its win
rates under the run's procedure, by the run's judges. It needs the reference's
tokenizer and vocabulary. The numbers are kept in evaluation/NAME.DIGEST.

--ray-actors needs the extra ray. The cluster is that of RAY_ADDRESS, or one
that is started here; its nodes see the run directory under the same path. A
job that was killed is continued by the same command; no finished shard is
drawn again.
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
    ray_actors: Annotated[
        int | None, Parameter(help="Draw and score rollouts in as many actors of a Ray cluster.")
    ] = None,
    ray_gpus: Annotated[float, Parameter(help="GPUs of each of them.", validator=Number(gte=0))] = 0,
    ray_cpus: Annotated[
        int | None, Parameter(help="Logical CPUs of a Ray that is started here.", validator=Number(gte=2))
    ] = None,
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
    if ray_actors is not None:
        from infalign.integrations.ray import on_cluster

        on_cluster(settings, actors=ray_actors, gpus=ray_gpus, cpus=ray_cpus, console=console)
        return
    from infalign.steps import whole_run

    if dry_run:
        from infalign.steps.dry_run import print_plan

        print_plan(settings, console, partial(whole_run.units, until=until))
        return
    whole_run.run_recipe(settings, until=until, console=console)


def run_epilogue() -> str:
    """Return the end of the help of `run`, with its stages and the built-in recipes."""
    stages = "\n".join(f"  {stage:<14}{about}" for stage, about in STAGES.items())
    recipes = "\n".join(f"  {found.name:<17}{found.about}" for found in built_in())
    return f"Built-in recipes:\n{recipes}\n\nStages, in this order:\n{stages}\n\n{RUN_EPILOGUE}"


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
