"""What a shell offers behind TAB where a type does not say it: recipes, runs, keys and rows."""

from collections.abc import Iterable
from pathlib import Path

from cyclopts.completion import CompletionContext

from infalign.recipe.built_in import ENDINGS, built_in


def names(_: CompletionContext) -> dict[str, str]:
    """Return the built-in recipes and what they are about."""
    return {found.name: found.about for found in built_in()}


def recipes(typed: CompletionContext) -> dict[str, str]:
    """Return those and the YAML files nearby."""
    return names(typed) | _near(typed, ENDINGS)


def runs(typed: CompletionContext) -> dict[str, str]:
    """Return the run directories nearby."""
    from infalign.pipeline.ownership import MARKER

    return {marker.removesuffix(f"/{MARKER}"): "" for marker in _near(typed, [f"/{MARKER}"])}


def recipes_and_runs(typed: CompletionContext) -> dict[str, str]:
    """Return recipes and run directories."""
    return recipes(typed) | runs(typed)


def keys(_: CompletionContext) -> dict[str, str]:
    """Return every key of a recipe, and what it means."""
    from infalign.recipe.schema import all_keys

    return {key.name: key.meaning for key in all_keys()}


def rows(typed: CompletionContext) -> dict[str, str]:
    """Return the built-in world, and the files of rows nearby."""
    from infalign.data.files import READERS

    return {"world": "a small synthetic world of preferences"} | _near(typed, READERS)


def _near(typed: CompletionContext, endings: Iterable[str]) -> dict[str, str]:
    """Return the files with these endings in the folder that is typed so far, and up to two folders below it."""
    said = "".join(typed.incomplete.rpartition("/")[:2])
    folder = Path(said).expanduser()
    paths = [path for depth in ("*", "[!.]*/*", "[!.]*/[!.]*/*") for path in folder.glob(depth)]
    found = sorted(f"{said}{path.relative_to(folder)}" for path in paths)
    return {name: "" for name in found if f"/{name}".endswith(tuple(endings))}
