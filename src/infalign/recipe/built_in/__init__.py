"""The built-in recipes, which commands find by name: ``infalign run demo``."""

from pathlib import Path

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean, nearest

FOLDER = Path(__file__).parent
ENDINGS = (".yaml", ".yml")


def built_in() -> dict[str, list[str]]:
    """Return what each built-in recipe does, takes and needs, by its name: the three comments that open its file."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    opening = {path.stem: path.read_text(encoding="utf-8").splitlines()[:3] for path in paths}
    return {name: [line.removeprefix("# ") for line in lines] for name, lines in opening.items()}


def find(recipe: str | Path) -> Path:
    """Return the file that a command's recipe means: a word is a recipe that comes along, all else is a path.

    A path has a folder in front or ends in .yaml or .yml, so no file of the working directory hides ``demo``, and
    ``./demo`` is a file. Raises ConfigError for a word that is no such recipe.
    """
    path = Path(recipe)
    return path if path.suffix in ENDINGS or str(recipe) != path.name else named(path.name)


def meant(path: Path) -> str:
    """Return how to name the recipe that the name of a missing file suggests: one that comes along or lies beside."""
    if path.stem in built_in():
        return f"did you mean {path.stem}?"
    try:
        beside = {file.stem: str(file) for file in path.parent.iterdir() if file.suffix in ENDINGS and file != path}
    except (OSError, ValueError):  # no folder, or a name that none can have
        beside = {}
    near = nearest(path.stem, beside)
    return f"did you mean {beside[near]}?" if near else "`infalign recipes` lists the built-in recipes"


def named(name: str) -> Path:
    """Return the file of a recipe that comes along. Raises ConfigError if none has that name."""
    names = built_in()
    if name not in names:
        said = did_you_mean(name, names) or f"there are {', '.join(names)}."
        raise ConfigError(
            f"there is no built-in recipe named {name}; {said} A file is given by a path, such as ./my.yaml"
        )
    return FOLDER / f"{name}.yaml"
