"""The built-in recipes, which commands find by name: ``infalign run demo``."""

from dataclasses import dataclass
from pathlib import Path

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean, nearest

FOLDER = Path(__file__).parent
ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A recipe that comes along; the comments that open its file say what it does, how long it takes, what it needs."""

    name: str
    path: Path
    about: str
    takes: str
    needs: str


def built_in() -> list[BuiltIn]:
    """Return the built-in recipes by name."""
    recipes = []
    for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem):
        about, takes, needs, *_ = (line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines())
        recipes.append(BuiltIn(path.stem, path, about, takes.removeprefix("Takes: "), needs.removeprefix("Needs: ")))
    return recipes


def find(recipe: str | Path) -> Path:
    """Return the file that a command's recipe means: a word is a recipe that comes along, all else is a path.

    A path has a folder in front or ends in .yaml or .yml, so no file of the working directory hides ``demo``, and
    ``./demo`` is a file. Raises ConfigError for a word that is no such recipe.
    """
    path = Path(recipe)
    return path if path.suffix in ENDINGS or str(recipe) != path.name else named(path.name)


def meant(path: Path) -> str:
    """Return how to name the recipe that the name of a missing file suggests: one that comes along or lies beside."""
    names = [recipe.name for recipe in built_in()]
    if path.stem in names:
        return f"did you mean {path.stem}?"
    try:
        beside = {file.stem: str(file) for file in path.parent.iterdir() if file.suffix in ENDINGS and file != path}
    except (OSError, ValueError):  # no folder, or a name that none can have
        beside = {}
    near = nearest(path.stem, beside)
    return f"did you mean {beside[near]}?" if near else "`infalign recipes` lists the built-in recipes"


def named(name: str) -> Path:
    """Return the file of a recipe that comes along. Raises ConfigError if none has that name."""
    names = [recipe.name for recipe in built_in()]
    if name not in names:
        said = did_you_mean(name, names) or f"there are {', '.join(names)}."
        raise ConfigError(
            f"there is no built-in recipe named {name}; {said} A file is given by a path, such as ./my.yaml"
        )
    return FOLDER / f"{name}.yaml"
