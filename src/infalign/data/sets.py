"""Public data sets by name, fetched from the hub, or from a folder of its repositories, to files that recipes name."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infalign.core.errors import ConfigError, DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import atomic_path, write_text, writing
from infalign.data.hub import Hub, hub_rows

REPORT_EVERY = 1000  # rows


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a set: where the hub has its rows, and how many there are."""

    hub: str
    split: str
    rows: int
    data_dir: str | None = None

    def repository_in(self, folder: str | Path) -> Path:
        """Return where ``folder`` has a copy of the repository: below it, called as on the hub."""
        return Path(folder) / self.hub.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class PublicSet:
    """A public data set: its parts by the names that recipes give them, and under which license it is there."""

    about: str
    license: str
    parts: Mapping[str, Part]


HH = "Anthropic/hh-rlhf"
HH_LICENSE = (
    "MIT, Copyright (c) 2022 Anthropic (Bai et al. 2022, arXiv:2204.05862). Offensive and upsetting texts are among "
    "them; they are meant for research on harmlessness and helpfulness, not for the training of dialogue agents."
)
SETS = {
    "hh-helpful": PublicSet(
        f"Anthropic's helpfulness comparisons ({HH})",
        HH_LICENSE,
        {
            "train": Part(HH, "train", 43_835, "helpful-base"),
            "test": Part(HH, "test", 2_354, "helpful-base"),
            "online": Part(HH, "test", 1_137, "helpful-online"),
            "rejection-sampled": Part(HH, "test", 2_749, "helpful-rejection-sampled"),
        },
    ),
    "hh-harmless": PublicSet(
        f"Anthropic's harmlessness comparisons ({HH})",
        HH_LICENSE,
        {
            "train": Part(HH, "train", 42_537, "harmless-base"),
            "test": Part(HH, "test", 2_312, "harmless-base"),
        },
    ),
    "tldr": PublicSet(
        "Reddit TL;DR: comparisons of summaries (trl-lib/tldr-preference), demonstrations (trl-lib/tldr)",
        "Comparisons and summaries: OpenAI's modified MIT license (Stiennon et al. 2020, arXiv:2009.01325). Posts by "
        "real people: CC BY 4.0 (Webis-TLDR-17, Völske et al. 2017).",
        {
            "train": Part("trl-lib/tldr-preference", "train", 92_858),
            "test": Part("trl-lib/tldr-preference", "validation", 86_086),
            "demonstrations": Part("trl-lib/tldr", "train", 116_722),
        },
    ),
}


def part_file(folder: str | Path, name: str, split: str) -> Path:
    """Return the file of a part of the set ``name`` below ``folder``."""
    return Path(folder) / name / f"{split}.jsonl.gz"


def find_part(folder: str | Path, name: str, split: str) -> Path:
    """Return the file of a part. Raises DataError, with the command that fetches it, if it is not there."""
    path = part_file(folder, name, split)
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; `infalign data get {name} --to {folder}` fetches the data, and without a network "
            "says how to bring it"
        )
    return path


def fetch(
    name: str, split: str, folder: str | Path, *, source: str | Path | None = None, on_progress: OnProgress
) -> int:
    """Write the rows of one part to its file in ``folder``, whole or not at all, and return their number.

    They come from the hub, or from copies of the hub's repositories below the folder ``source``. Raises ConfigError
    if they cannot be had, with the way to bring them, and DataError if they cannot be read.
    """
    chosen, file = SETS[name], part_file(folder, name, split)
    part = chosen.parts[split]
    origin = part.hub if source is None else str(part.repository_in(source))
    if source is not None and not Path(origin).is_dir():  # the hub would be asked for it
        raise ConfigError(f"there is no folder {origin}; {_remedy(name, part, source)}")
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    try:
        with (
            atomic_path(file) as temporary,
            temporary.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,  # no name and no time: equal rows, equal file
        ):
            rows = hub_rows(Hub(id=origin, split=part.split, data_dir=part.data_dir))
            for number, (_, row) in enumerate(rows, 1):
                packed.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
                if number % REPORT_EVERY == 0:
                    on_progress(number, max(number, part.rows), "rows")
    except ConfigError as error:
        raise ConfigError(f"{error}; {_remedy(name, part, source)}") from error
    write_text(file.parent / "LICENSE.txt", f"{chosen.about}\n{chosen.license}\n")
    return number


def _remedy(name: str, part: Part, source: str | Path | None) -> str:
    repository = part.repository_in("FOLDER" if source is None else source)
    download = f"`hf download {part.hub} --repo-type dataset --local-dir {repository}`"
    if source is not None:
        return f"{download} brings it there"
    return (
        f"without a network here, use {download} on a machine that has one, bring the folder here and say "
        f"`infalign data get {name} --from FOLDER`"
    )
