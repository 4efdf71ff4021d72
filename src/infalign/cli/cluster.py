"""The command that draws rollouts on a cluster."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from infalign.cli.options import Overrides, RecipePath, read_recipe
from infalign.cli.output import open_console

RAY_EPILOGUE = """\
Examples:
  infalign run my-recipe.yaml --until reward-model            all that rollouts need
  infalign ray my-recipe.yaml --actors 64 --gpus 1
  infalign run my-recipe.yaml                     goes on from there

Ray is the cluster of RAY_ADDRESS, or one that is started here. All its nodes
see the run directory under the same path. A job that was killed is continued
by the same command; no finished shard is drawn again.
"""


def ray(
    recipe: RecipePath,
    /,
    *,
    actors: Annotated[int, Parameter(help="How many engines draw at once.", validator=Number(gte=1))] = 1,
    gpus: Annotated[float, Parameter(help="GPUs of each of them.", validator=Number(gte=0))] = 0,
    cpus: Annotated[
        int | None, Parameter(help="Logical CPUs of a Ray that is started here.", validator=Number(gte=2))
    ] = None,
    set_: Overrides = None,
) -> None:
    """Draw and score the rollouts on a Ray cluster (the extra ray)."""
    from infalign.integrations.ray import on_cluster

    on_cluster(read_recipe(recipe, set_), actors=actors, gpus=gpus, cpus=cpus, console=open_console())
