"""Commands that do a run, all of it or up to a stage, on this machine or a cluster, and show where it stands."""

import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import WHOLE, AsJson, Overrides, open_console, print_json, read_recipe, read_run_or_recipe
from infalign.core.errors import ConfigError, PartialError
from infalign.recipe.built_in import built_in
from infalign.steps import STAGES

if TYPE_CHECKING:
    Stage = str
else:
    Stage = Literal[tuple(STAGES)]

RUN_EPILOGUE = """\
Examples:
  infalign run demo --dry-run           check the data and show the plan
  infalign run demo                     the whole run, from data to report
  infalign run my.yaml --until train    stop after training
  infalign run demo --set rollout.k=128    more rollouts; keeps the old ones
  infalign run runs/demo --policy ~/models/dpo
  infalign run my.yaml --until reward-model            what rollouts need
  infalign run my.yaml --ray-actors 64 --ray-gpus 1    sample and score them

--policy takes a folder or hub id of a policy trained elsewhere, and measures its
KL to the run's reference and its win rates by the run's judges. It needs the
reference's tokenizer and vocabulary. Results go to evaluation/NAME.DIGEST.

--ray-actors needs the extra ray. It uses the cluster at RAY_ADDRESS, or starts
one here; all nodes must see the run directory under the same path. Rerun the
same command to resume; finished shards are kept.
"""


def run(
    recipe: Annotated[
        str, Parameter(help="A YAML file or the name of a built-in recipe, such as demo; with --policy also a run.")
    ],
    /,
    *,
    until: Annotated[Stage, Parameter(help="The last stage to run.")] = "report",
    policy: Annotated[str | None, Parameter(help="Measure this policy, trained elsewhere.")] = None,
    set_: Overrides = None,
    skip_invalid: Annotated[bool, Parameter(help="Skip invalid rows; count and list them.")] = False,
    dry_run: Annotated[bool, Parameter(help="Check recipe and data, print the plan and its cost, and stop.")] = False,
    ray_actors: Annotated[
        int | None,
        WHOLE,
        Parameter(help="Sample and score rollouts with this many actors on a Ray cluster.", validator=Number(gte=1)),
    ] = None,
    ray_gpus: Annotated[float, Parameter(help="GPUs per actor.", validator=Number(gte=0))] = 0,
    ray_cpus: Annotated[
        int | None, WHOLE, Parameter(help="Logical CPUs of a Ray that is started here.", validator=Number(gte=2))
    ] = None,
) -> None:
    """Run a recipe from data to report; finished work is not repeated."""
    if ray_actors is None and (ray_gpus or ray_cpus is not None):
        raise ConfigError("--ray-gpus and --ray-cpus are for the actors of --ray-actors; add it")
    if ray_actors is not None and (dry_run or policy is not None or until not in ("score", "report")):
        raise ConfigError("--ray-actors only samples and scores rollouts; leave out --dry-run, --policy and --until")
    if ray_gpus > 1 and ray_gpus % 1:
        raise ConfigError(f"--ray-gpus is a fraction below 1 or a whole number; found {ray_gpus:g}")
    if policy is not None:
        if dry_run or until != "report":
            raise ConfigError("--policy only measures one policy beside a run; leave out --dry-run and --until")
        from infalign.steps.external_policy import evaluate_external_policy, print_external_policy

        measured, console = read_run_or_recipe(recipe, set_, skip_invalid), open_console()
        print_external_policy(evaluate_external_policy(measured, policy, console=console), console)
        return
    settings, console = read_recipe(recipe, set_, skip_invalid), open_console()
    from infalign.steps import whole_run

    if ray_actors is not None:
        from infalign.integrations.ray import on_cluster

        on_cluster(settings, actors=ray_actors, gpus=ray_gpus, cpus=ray_cpus, console=console)
    elif dry_run:
        from infalign.steps.dry_run import print_plan

        print_plan(settings, console, partial(whole_run.units, until=until))
    else:
        whole_run.run_recipe(settings, until=until, console=console)


def run_epilogue() -> str:
    """Return the end of the help of `run`, with its stages and the built-in recipes."""
    stages = "\n".join(f"  {stage:<14}{about}" for stage, about in STAGES.items())
    recipes = "\n".join(f"  {name:<17}{about}" for name, (about, *_) in built_in().items())
    return f"Built-in recipes:\n{recipes}\n\nStages, in this order:\n{stages}\n\n{RUN_EPILOGUE}"


STATUS_EPILOGUE = """\
Examples:
  infalign status runs/demo
  infalign status demo --set rollout.k=128
  infalign status runs/demo || infalign run demo

done: made with the current settings and inputs. stale: made with others; the
reason is shown. partial: unfinished; rerun to resume. missing: not begun.
damaged: a file changed since; delete it and rerun.
Changed library versions do not make anything stale; the report lists them.

Exit codes: 0 if all is done, 4 if not. Only reads; safe during a run.
"""


def status(
    run: Annotated[str, Parameter(help="A run directory or a recipe; the directory takes precedence.")],
    /,
    *,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what is done, what is not and why; exit code 4 if work is left."""
    from infalign.steps.status import print_status
    from infalign.steps.status import status as status_of

    run_status = status_of(read_run_or_recipe(run, set_))
    if as_json:
        print_json(asdict(run_status) | {"done": run_status.done})
    else:
        print_status(run_status, open_console())
    if not run_status.done:
        sys.exit(PartialError.exit_code)
