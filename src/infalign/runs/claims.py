"""Folders of a run directory that no unit's record lists, such as figures: what of them is the run's own."""

from collections.abc import Iterable
from pathlib import Path

from infalign.core.errors import ConfigError
from infalign.core.storage import read_record, write_record


def claim(folder: Path, names: Iterable[str]) -> None:
    """Make a folder, if it is absent, and list the files that are to be written to it as the run's own, beside it.

    Raises ConfigError if one of them is there and was never listed, or a file is in the place of the folder: somebody
    else made it.
    """
    wanted, listed = set(names), folder.with_name(f".{folder.name}.json")
    made = set(read_record(listed)["files"]) if listed.is_file() else set[str]()
    places = sorted(folder / name for name in wanted - made) if folder.is_dir() else [folder]
    for path in places:
        if path.exists() or path.is_symlink():
            raise ConfigError(
                f"{path} was not made by this run, and it would be replaced; move it elsewhere, and run the same "
                "command again"
            )
    folder.mkdir(exist_ok=True)
    write_record(listed, {"files": sorted(made | wanted)})
