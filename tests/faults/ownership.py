"""The run directory holds what is not the run's: projects, notes, inputs, recipes, links."""

from collections.abc import Callable
from pathlib import Path

import micro

from faults.lab import KILLED, Lab, Seen, again, infalign, refused, told, undo, untouched
from faults.registry import fault
from faults.storage import death, everywhere
from infalign.core.storage import remove
from infalign.pipeline.ownership import MARKER
from infalign.recipe.reading import load_recipe
from infalign.steps import whole_run

OWN = ("stages", "digests.json", ".holder", ".lock", MARKER, "recipe.yaml", "again.yaml")  # notes of what happened
CHANGE = "policies.aware.kl_budget=0.7"


def mine(file: Path) -> None:
    """Write a file of the user."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")


def project(root: Path) -> None:
    """Make a folder with somebody's work under the names that a run uses."""
    folders = ("data/train.jsonl", "rollouts/part-0/mine.txt", "evaluation/notes.txt", "checkpoints/aware/a.txt")
    for name in (*folders, "results.json", "report.html", "recipe.yaml", "models/aware/model.safetensors"):
        mine(root / name)


def linked_project(root: Path) -> None:
    """Make a link to such a folder."""
    project(root.with_name("project"))
    root.symlink_to(root.with_name("project"))


@fault(
    2,
    {
        "a link to a project": linked_project,
        "a file among stages": lambda root: mine(root / "stages/plan.json"),
        "an empty folder": lambda root: (root / "data").mkdir(parents=True),
    },
    brief=True,
)
def not_ours(lab: Lab, make: Callable[[Path], object]) -> Seen:
    """The run directory is something that no run made → It is not a run's directory; choose another."""
    root = lab.folder / "run"
    make(root)
    recipe = lab.recipe()
    with untouched(root.resolve()):
        return [refused(*words, recipe) for words in (["run", "--dry-run"], ["run"])][-1]


@fault(2, brief=True)
def here(lab: Lab) -> Seen:
    """The run directory is `.`, with the recipe in it → The recipe is in it; choose another."""
    root = lab.folder / "run"
    root.mkdir()
    recipe = micro.write(root / "recipe.yaml", micro.settings(root))
    with untouched(root):
        return refused("run", recipe)


@fault(0, brief=True)
def hidden(lab: Lab) -> Seen:
    """The run directory holds nothing but hidden files → Nothing; they stay."""
    root = lab.folder / "run"
    root.mkdir()
    (root / ".gitkeep").touch()
    code, _, said = infalign("run", lab.recipe(), "--until", "data")
    assert (root / ".gitkeep").exists()
    return Seen(code, said)


@fault(KILLED, brief=True)
def begun_and_killed(lab: Lab) -> Seen:
    """SIGKILL at any call while a run begins its directory → Nothing; the next start takes it over."""
    root = lab.folder / "run"
    recipe = load_recipe(lab.recipe())

    def begin() -> None:
        with whole_run.open_run(recipe):
            whole_run.write_recipe(recipe, root)

    def after() -> None:
        visible = [path for path in root.glob("*") if not path.name.startswith(".")]
        assert not visible or (root / MARKER).exists()
        begin()

    everywhere(death, begin, before=lambda: remove(root), after=after)
    return Seen(KILLED)


def link(path: Path) -> None:
    """Put a link of the user in place of a folder."""
    remove(path)
    path.symlink_to("large-disk")


@fault(
    2,
    {
        "in a model": ("models/aware/notes.txt", mine, "train-aware"),
        "among rollouts": ("rollouts/part-0/mine.txt", mine, "rollout-0"),
        "a link": ("rollouts/part-0", link, "rollout-0"),
        "for results": ("results.json", mine, "results"),
    },
)
def in_the_way(lab: Lab, name: str, put: Callable[[Path], None], unit: str) -> Seen:
    """A file of the user lies where a step will write → Its name, before any step starts; move it and rerun."""
    root = lab.copy()
    undo(root, unit)
    put(root / name)
    with untouched(root, *OWN):
        seen = told(lambda: again(root, until="evaluate"))
    (root / name).rename(lab.folder / "mine")
    lab.ends_well(root)
    return seen


def link_out(path: Path) -> None:
    """Make a link to a folder of the user."""
    mine(path.parents[3] / "rows" / "rows.jsonl")
    path.symlink_to(path.parents[3] / "rows")


@fault(
    2,
    {
        "model": ("models/aware/model.gguf", mine, CHANGE),
        "notes": ("rollouts/part-0/notes.txt", mine, "rollout.max_new_tokens=11"),
        "link to data": ("models/aware/data", link_out, CHANGE),
    },
    brief=True,
)
def beside(lab: Lab, name: str, put: Callable[[Path], None], change: str) -> Seen:
    """A file of the user lies beside outputs that a changed recipe makes stale → Its name; move it and rerun."""
    root = lab.copy()
    (root / "models" / "aware" / ".DS_Store").write_text("")
    put(root / name)
    with untouched(lab.folder, *(f"run/{own}" for own in OWN)):
        return told(lambda: again(root, change, until="train"))


@fault(
    2,
    {
        "data behind a link": "data={folder: LINK/data, sources: [{path: train.jsonl}], max_prompt_tokens: 180}",
        "reward model": "reward={model: RUN/models/reward, fit: {batch_size: 32}}",
    },
    brief=True,
)
def own_input(lab: Lab, change: str) -> Seen:
    """What the recipe reads lies where the run writes → What to move; a dry run says the same."""
    root, link = lab.copy(), lab.folder / "elsewhere"
    link.symlink_to(root)
    (root / "data" / "train.jsonl").write_text("{}\n")
    change = change.replace("RUN", str(root)).replace("LINK", str(link))
    with untouched(root, *OWN):
        seen = told(lambda: again(root, change))
        assert refused("run", lab.recipe(), "--dry-run", "--set", change) == seen
    assert "the recipe reads" in seen.said
    return seen


@fault(0, brief=True)
def linked_model(lab: Lab) -> None:
    """A trained model is a link to a larger disk, and is trained again → Nothing; only the link is replaced."""
    root = lab.copy()
    disk = lab.folder / "disk"
    (root / "models" / "aware").rename(disk)
    (root / "models" / "aware").symlink_to(disk)
    with untouched(disk):
        assert again(root, until="evaluate") == []
        assert again(root, CHANGE, until="train") == ["law-aware", "train-aware"]
    assert not (root / "models" / "aware").is_symlink()


@fault(0, brief=True)
def beside_records(lab: Lab) -> None:
    """A file of the user lies beside the records → Nothing; it stays."""
    root = lab.copy()
    mine(root / "stages" / "notes.txt")
    assert "train-aware" in again(root, CHANGE, until="train")
    assert (root / "stages" / "notes.txt").read_text() == "mine"
