"""A trained policy for the Hugging Face hub: the files that go there, and their upload."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from infalign.core.display import say
from infalign.core.errors import ConfigError, PartialError, first_line
from infalign.core.http import passes
from infalign.models.pretrained import ADAPTER, MODEL_FILES
from infalign.recipe.settings import Recipe
from infalign.runs.card import base_of
from infalign.runs.pending import pending
from infalign.runs.pipeline import units
from infalign.runs.run import Run
from infalign.runs.status import recorded_recipe
from infalign.training.solvers.base import Offline


@dataclass(frozen=True, slots=True)
class Publication:
    """The files of a policy as the hub gets them, by their names there, and what they are."""

    files: dict[str, Path | bytes]
    what: str  # an adapter of …, or a whole model


def publication(root: Path, name: str, *, merged: bool) -> Publication:
    """Return the files of an evaluated policy of a run with its model card.

    A policy with LoRA on a model of the hub is its adapter, unless ``merged`` is asked for. Raises ConfigError for a
    policy that is not there or not evaluated, and for one with a guide, which no other library loads.
    """
    from huggingface_hub import ModelCard

    recipe = recorded_recipe(root)
    if name not in recipe.policies:
        raise ConfigError(f"{root} has no policy {name}; it has {', '.join(recipe.policies)}")
    run = Run.of(recipe)
    left = pending(units(run, until="evaluate"), run.layout)
    if waiting := [unit for unit in (f"train-{name}", f"card-{name}") if unit in left]:
        raise ConfigError(
            f"{', '.join(waiting)} is to be done before {name} can go out; run `infalign evaluate {root}/recipe.yaml`"
        )
    _check_plain(recipe, name)
    folder, base = run.layout.model(name), base_of(recipe)
    whole = _files(folder)
    if merged or base is None or recipe.policy.fit is not None or not (folder / ADAPTER).is_dir():
        return Publication(whole, "a whole model")
    card = ModelCard.load(run.layout.card(name))
    card.data["library_name"] = "peft"
    own = {"README.md": str(card).encode(), "generation_config.json": whole["generation_config.json"]}
    return Publication(_files(folder / ADAPTER) | own, f"an adapter of {base}")


def push(found: Publication, to: str, *, private: bool) -> str:
    """Upload the files to the repository ``to`` of the hub, which is made if it is not there; return its URL.

    Files of a model that are there and not among these, as of an adapter that was pushed before, are removed.
    Raises ConfigError if the hub refuses, or if the repository is there and public though it is to be ``private``, and
    PartialError if the hub does not answer, or not now.
    """
    from httpx2 import HTTPError
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        url = api.create_repo(to, private=private, exist_ok=True)
        there = api.model_info(to)
        if private and not there.private:  # one that was there is as it was
            raise ConfigError(
                f"{to} is there already, and public; make it private in its settings on the hub, or leave --private out"
            )
        additions = [CommitOperationAdd(name, file) for name, file in sorted(found.files.items())]
        before = {file.rfilename for file in there.siblings or ()} - found.files.keys()
        left = [CommitOperationDelete(name) for name in sorted(before) if Path(name).suffix in MODEL_FILES]
        api.create_commit(to, [*additions, *left], commit_message="Upload by infalign")
    except (HFValidationError, HTTPError) as error:
        never = isinstance(error, HfHubHTTPError) and not passes(error.response.status_code)
        if isinstance(error, HFValidationError) or never:
            raise ConfigError(f"the hub refused {to}: {first_line(error)}") from error
        raise PartialError(f"the hub did not answer ({first_line(error)}); run the same command again") from error
    return str(url)


def print_publication(found: Publication, to: str, console: Console) -> None:
    """Print the files that would go to the repository ``to``, and the card."""
    say(console, f"To {to}: {found.what}", markup=False)
    for name, file in sorted(found.files.items()):
        size = file.stat().st_size if isinstance(file, Path) else len(file)
        say(console, f"  {decimal(size):>10}  {name}", markup=False)
    card = found.files["README.md"]
    text = card.read_text(encoding="utf-8") if isinstance(card, Path) else card.decode()
    console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)


def _check_plain(recipe: Recipe, name: str) -> None:
    """Raise ConfigError for a policy with a guide, with the student that follows it."""
    policy = recipe.policies[name]
    if not isinstance(policy, Offline) or policy.guide is None:
        return
    student = next((other for other, found in recipe.policies.items() if name in found.needs), None)
    instead = (
        f"push its student: --policy {student}"
        if student is not None
        else f"add `{name}-student: {{solver: distil, teacher: {name}}}` to the recipe's policies and push that"
    )
    raise ConfigError(f"{name} is the reference with a guide beside it, which only infalign loads; {instead}")


def _files(folder: Path) -> dict[str, Path | bytes]:
    found = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: path for path in found}
