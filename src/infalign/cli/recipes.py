"""The commands with which a recipe of your own begins."""

import sys
from typing import Annotated

from cyclopts import Parameter

from infalign.recipes import built_in, named

RECIPES_EPILOGUE = """\
Examples:
  infalign recipes                     what comes along
  infalign recipes demo > my.yaml      start from one

Commands take the name of a recipe that comes along, or the path of yours: a
word is a name (demo), and what ends in .yaml or .yml or has a folder in front
is a path (my.yaml, ./demo).
"""


def recipes(
    name: Annotated[str | None, Parameter(help="Print this one.", show_default=False)] = None,
    /,
) -> None:
    """List the recipes that come along, or print one."""
    if name is not None:
        sys.stdout.write(named(name).read_text(encoding="utf-8"))
        return
    for found in built_in():
        print(f"{found.name}\n  {found.about}\n  Takes: {found.takes}\n  Needs: {found.needs}")


def list_recipes() -> str:
    """Return the recipes that come along, a line each."""
    return "\n".join(["Recipes that come along:", *(f"  {found.name:<17}{found.about}" for found in built_in())])
