"""What a shell offers behind TAB where a type does not say it: recipes, runs, keys and rows."""

from pathlib import Path

from cyclopts.completion import CompletionContext

from infalign.recipe.built_in import ENDINGS, built_in


def names(_: CompletionContext) -> dict[str, str]:
    """Return the recipes that come along, and what they are about."""
    return {found.name: found.about for found in built_in()}


def recipes(typed: CompletionContext) -> dict[str, str]:
    """Return those and the YAML files nearby."""
    return names(typed) | dict.fromkeys(_near(typed, *(f"*{ending}" for ending in ENDINGS)), "")


def runs(typed: CompletionContext) -> list[str]:
    """Return the run directories nearby."""
    from infalign.pipeline.ownership import MARKER

    return [marker.removesuffix(f"/{MARKER}") for marker in _near(typed, MARKER)]


def recipes_and_runs(typed: CompletionContext) -> dict[str, str]:
    """Return recipes and run directories."""
    return recipes(typed) | dict.fromkeys(runs(typed), "")


def keys(_: CompletionContext) -> dict[str, str]:
    """Return every key of a recipe, and what it means."""
    from infalign.recipe.schema import all_keys

    return {key.name: key.meaning for key in all_keys()}


def sets(_: CompletionContext) -> dict[str, str]:
    """Return the public data sets, and what they are."""
    from infalign.data.sets import SETS

    return {name: found.about for name, found in SETS.items()}


def rows(typed: CompletionContext) -> dict[str, str]:
    """Return those, the world of the demo, and the files of rows nearby."""
    from infalign.data.files import READERS

    files = dict.fromkeys(_near(typed, *(f"*{ending}" for ending in READERS)), "")
    return sets(typed) | {"world": "the small text world of the demo"} | files


def _near(typed: CompletionContext, *patterns: str) -> list[str]:
    """Return the files like these in the folder that is typed so far, and up to two folders below it."""
    said = "".join(typed.incomplete.rpartition("/")[:2])
    folder = Path(said).expanduser()
    found = [
        path for depth in ("", "[!.]*/", "[!.]*/[!.]*/") for name in patterns for path in folder.glob(depth + name)
    ]
    return sorted(f"{said}{path.relative_to(folder)}" for path in found)
