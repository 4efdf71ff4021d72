"""The command that sends a trained policy to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from infalign.cli.completion import runs
from infalign.cli.output import open_console
from infalign.core.display import say

PUSH_EPILOGUE = """\
Examples:
  infalign push runs/demo --policy aware --to me/aware --dry-run
  infalign push runs/demo --policy aware --to me/aware --private

The policy goes with its model card: procedure, transformation, KL and win
rates with intervals, and who judged. One that was trained with LoRA on a model
of the hub goes as its adapter, --merged as a whole model. A policy with a
guide is loaded by infalign only, so its student goes instead. You are who
`hf auth login` or HF_TOKEN says.
"""


def push(
    run: Annotated[Path, Parameter(help="A run directory that is evaluated.", completer=runs)],
    /,
    *,
    policy: Annotated[str, Parameter(help="The name of one of its policies.")],
    to: Annotated[str, Parameter(help="The repository on the hub: owner/name; made if it is not there.")],
    merged: Annotated[
        bool, Parameter(help="Send the whole model, not its adapter.", negative=(), show_default=False)
    ] = False,
    private: Annotated[bool, Parameter(help="Make the repository private.", negative=(), show_default=False)] = False,
    dry_run: Annotated[
        bool, Parameter(help="Show the files and the card, send nothing.", negative=(), show_default=False)
    ] = False,
) -> None:
    """Send an evaluated policy and its model card to the Hugging Face hub."""
    from infalign.runs.publish import print_publication, publication
    from infalign.runs.publish import push as pushed

    console = open_console()
    found = publication(run, policy, merged=merged)
    if dry_run:
        print_publication(found, to, console)
    else:
        say(console, f"{pushed(found, to, private=private)}: {found.what}", markup=False)
