"""The command that lists built-in recipes, prints one, and explains keys."""

import sys
from typing import Annotated

from cyclopts import Parameter

from infalign.cli import completion
from infalign.recipe.built_in import built_in, named

RECIPES_EPILOGUE = """\
Examples:
  infalign recipes                               the built-in recipes
  infalign recipes demo > my.yaml                a copy to start from
  infalign recipes --explain policies.NAME       keys of a policy
  infalign recipes --explain rollout.k           one key

Commands take the name of a built-in recipe (demo) or the path of a file, which
ends in .yaml or .yml or has a folder in front (my.yaml, ./demo). docs/recipe.md
lists all keys.
"""


def recipes(
    name: Annotated[str | None, Parameter(help="Print this recipe.", completer=completion.names)] = None,
    /,
    *,
    explain: Annotated[
        str | None,
        Parameter(help="Explain a recipe key: its meaning, type and default.", completer=completion.keys),
    ] = None,
) -> None:
    """List the built-in recipes, print one, or explain a key."""
    if explain is not None:
        from infalign.recipe.schema import explained

        for key in explained(explain):
            print(f"{key.name}\n  {key.facts}\n  {key.meaning}")
    elif name is not None:
        sys.stdout.write(named(name).read_text(encoding="utf-8"))
    else:
        for found in built_in():
            print(f"{found.name}\n  {found.about}\n  Takes: {found.takes}\n  Needs: {found.needs}")
