"""The command that fetches public data sets."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from infalign.cli.output import open_console
from infalign.core.display import say
from infalign.core.errors import ConfigError

GET_EPILOGUE = """\
Examples:
  infalign data get hh-helpful
  infalign data get tldr --part demonstrations --to data
  infalign data get hh-helpful --from FOLDER

hh-helpful   Anthropic's helpfulness comparisons, for Best-of-N
hh-harmless  Anthropic's harmlessness comparisons, for Worst-of-N; upsetting
tldr         Reddit TL;DR: comparisons of summaries, and demonstrations

Each part is a file, FOLDER/SET/PART.jsonl.gz, which a recipe names as
  data: {folder: data, sources: [{set: hh-helpful, split: train}]}
A part that is there already is kept; remove its file to fetch it again.

--from takes the rows from copies of the hub's repositories, each in a folder
below FOLDER that is called as on the hub: FOLDER/hh-rlhf/helpful-base/...
"""


def get(
    name: Annotated[Literal["hh-helpful", "hh-harmless", "tldr"], Parameter(help="The set.")],
    /,
    *,
    part: Annotated[list[str] | None, Parameter(help="Only this part. Repeatable.")] = None,
    to: Annotated[Path, Parameter(help="The folder of data.")] = Path("data"),
    from_: Annotated[Path | None, Parameter(name="--from", help="Copies of the hub's repositories.")] = None,
) -> None:
    """Fetch a public data set from the hub, or from a folder of its files."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # how often it tries again is not our one sentence
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from infalign.core.progress import ProgressDisplay
    from infalign.data.sets import SETS, fetch, part_file

    chosen, console = SETS[name], open_console()
    parts = part or chosen.parts
    if unknown := [split for split in parts if split not in chosen.parts]:
        raise ConfigError(f"{name} has the parts {', '.join(chosen.parts)}, found {unknown[0]}")
    say(console, f"{chosen.about}\nLicense: {chosen.license}", markup=False)
    for split in parts:
        file = part_file(to, name, split)
        if file.is_file():
            say(console, f"{file} is there already", markup=False)
            continue
        with ProgressDisplay(console) as display:
            display.start(split)
            rows = fetch(name, split, to, source=from_, on_progress=partial(display.update, split))
        say(console, f"{file}: {rows:,} rows", markup=False)
        if rows != (expected := chosen.parts[split].rows):
            say(console, f"[yellow]![/] the public part has {expected:,} rows, this one {rows:,}")
