"""What of a directory is the run's own: nothing else is ever overwritten or removed."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import yaml

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import is_temporary, read_record, write_text
from infalign.recipe.reading import YAML_ERRORS, dump_recipe
from infalign.recipe.settings import Recipe
from infalign.runs.layout import Layout
from infalign.runs.units import Unit

MARKER = ".infalign"
MARKED = "The directory of a run of infalign, which replaces and removes what it made here.\n"
RECIPE = "recipe.yaml"
SHARDS = "part-[0-9]*.parquet"  # what a unit that only adds may have written since its record


def check_run_dir(root: Path) -> None:
    """Raise ConfigError unless ``root`` is a run's directory or can become one: absent, empty, or with hidden files.

    A run's directory has the `MARKER`, or a record of a finished unit from before there were markers.
    """
    if not root.is_dir():
        return
    found = min(_visible(root.iterdir()), default=None)
    # In this order: another process that starts here now writes the marker before anything visible.
    if found is not None and not (root / MARKER).is_file() and not any(map(_is_record, root.glob("stages/*.json"))):
        raise ConfigError(
            f"run_dir is {root}, which no run made: it holds {found.name}, and a run replaces and removes files in its "
            "directory; choose a new or an empty one"
        )


def mark(root: Path) -> bool:
    """Make ``root`` a run's directory, as `check_run_dir` allows, and return whether it was none before."""
    check_run_dir(root)
    if (root / MARKER).is_file():
        return False
    write_text(root / MARKER, MARKED)
    return True


def check_inputs(inputs: Iterable[Path], wanted: Sequence[Unit]) -> None:
    """Raise ConfigError if one of the files that a recipe names lies where a unit writes, links resolved."""
    places = {place.resolve(): place for unit in wanted for place in _places(unit)}
    for file in inputs:
        for folder in (file, *file.parents):
            if folder in places:
                raise ConfigError(
                    f"the recipe reads {file}, and the run itself writes and removes {places[folder]}; name a copy of "
                    "it elsewhere, or choose another run_dir"
                )


def check_outputs_free(wanted: Iterable[Unit], layout: Layout) -> None:
    """Raise ConfigError if a file that the run did not make lies where one of the units will write."""
    for unit in wanted:
        for file in _strangers(unit, layout):
            raise ConfigError(
                f"{file} was not made by this run, and {unit.name} would replace it; move it elsewhere, or choose "
                "another run_dir"
            )


def write_recipe(recipe: Recipe, root: Path) -> None:
    """Write the recipe with every default spelled out to the run directory.

    Raises ConfigError if there is one that a run did not write, or that was changed since.
    """
    path, text = root / RECIPE, dump_recipe(recipe)
    if (path.exists() or path.is_symlink()) and not _is_recorded(path):
        raise ConfigError(
            f"{path} was written or changed by hand, and the run records its recipe there; move it out of {root} and "
            "run it from there"
        )
    write_text(path, f"{_seal(text)}\n{text}")


def _visible(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if not path.name.startswith("."))


def _somebodys(path: Path) -> bool:
    """Return whether a file is not one that a killed process, a desktop or a network file system left."""
    return not (is_temporary(path) or path.name == ".DS_Store" or path.name.startswith(".nfs"))


def _is_record(path: Path) -> bool:
    try:
        return "stage" in read_record(path)
    except (OSError, DataError):
        return False


def _places(unit: Unit) -> list[Path]:
    return [unit.output] if unit.workspace is None else [unit.output, unit.workspace]


def _strangers(unit: Unit, layout: Layout) -> Iterator[Path]:
    """Yield the files in the places of a unit that the run did not make.

    Records list what finished units made, some of them in another's folder, as a policy's card is. What an unfinished
    one left is the run's: it starts in an empty place.
    """
    found: list[Path] = []
    if layout.record(unit.name).is_file():
        found = [file for file in _files(unit.output) if not (unit.only_adds and file.match(SHARDS))]
    elif not layout.started(unit.name).is_file():
        found = [file for place in _places(unit) for file in _files(place)]
    finished = map(read_record, layout.root.glob("stages/*.json"))
    made = {layout.root / name for record in finished for name in record["output"]} if found else set()
    return (file for file in found if file not in made)


def _files(place: Path) -> list[Path]:
    found = place.rglob("*") if place.is_dir() else [place]
    return sorted(path for path in found if (path.is_file() or path.is_symlink()) and _somebodys(path))


def _is_recorded(path: Path) -> bool:
    """Return whether a run wrote a recipe: it has its seal, or, from before there was one, the form of a dump."""
    try:
        text = path.read_text(encoding="utf-8")
        first, _, rest = text.partition("\n")
        return first == _seal(rest) or text == yaml.safe_dump(yaml.safe_load(text), sort_keys=False, allow_unicode=True)
    except (OSError, *YAML_ERRORS):
        return False


def _seal(text: str) -> str:
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"# The recipe of this run as infalign read it. To change it, copy it elsewhere. {digest}"
