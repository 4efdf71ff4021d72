"""The run directory holds what is not the run's: projects, notes, inputs, recipes, links."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import micro

from faults.data import infalign
from faults.registry import Lab, Seen, again, fault, tables
from faults.storage import KILLED, death, everywhere, refused, undo
from infalign.core.storage import read_record, remove, write_record
from infalign.pipeline.ownership import MARKER, write_recipe
from infalign.recipe.reading import load_recipe
from infalign.steps import whole_run


def content(root: Path) -> dict[str, bytes]:
    """Return every file below a folder, but for the run's own notes of what happened when."""
    own = ("stages", "digests.json", "holder.json", ".lock", MARKER, "recipe.yaml", "again.yaml")
    files = (path for path in root.rglob("*") if path.is_file())
    return {name: file.read_bytes() for file in files if not (name := str(file.relative_to(root))).startswith(own)}


def project(folder: Path, finished: Path) -> Path:
    """Return a folder with somebody's work under the names that a run uses."""
    for name in ("data/train.jsonl", "rollouts/part-0/mine.txt", "evaluation/notes.txt", "checkpoints/aware/a.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")
    for name in ("results.json", "report.html", "recipe.yaml"):
        (folder / name).write_text("# mine\n")
    shutil.copytree(finished / "models" / "aware", folder / "models" / "aware")
    return folder


def told(words: list[Any], code: int) -> Seen:
    """Run a command line, which must end with ``code``, and return what it says."""
    found, _, said = infalign(*words)
    assert found == code, (found, said)
    return Seen(found, said)


def untouched(lab: Lab, folder: Path, words: list[Any]) -> Seen:
    """Run a command line that must be refused as a wrong recipe and leave every name in a folder as it is."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seen = told(words, 2)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return seen


def not_ours(lab: Lab, prepare: Callable[[Path, Path], object]) -> Seen:
    """Whatever command is given a directory that no run made, nothing in it changes, not even a lock is added."""
    root = lab.folder / "run"
    prepare(root, lab.finished)
    recipe = micro.write(lab.folder / "recipe.yaml", micro.settings(root))
    commands = (["data"], ["compare"], ["reproduce", "hacking"], ["run", "--dry-run"], ["run"])
    return [untouched(lab, root, [*words, recipe]) for words in commands][-1]


def one_file(name: str) -> Callable[[Path, Path], object]:
    """Return how a folder with one file is made."""

    def prepare(root: Path, _: Path) -> None:
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("mine")

    return prepare


for what, prepare in {
    "the run directory is a project with data, models, results and a recipe": project,
    "the run directory holds a file of another program among its stages": one_file("stages/plan.json"),
    "the run directory holds one file of the user": one_file("thesis.tex"),
    "the run directory holds an empty folder of the user": lambda root, _: (root / "data").mkdir(parents=True),
}.items():
    fault(what, brief=True)(lambda lab, prepare=prepare: not_ours(lab, prepare))  # type: ignore[misc]


@fault("the run directory is `.`, with the recipe in it", brief=True)
def here(lab: Lab) -> Seen:
    """The recipe itself is a file of the user."""
    root = lab.folder / "run"
    root.mkdir()
    recipe = micro.write(root / "recipe.yaml", micro.settings(root))
    return untouched(lab, root, ["run", recipe])


@fault("the run directory holds nothing but hidden files", brief=True)
def hidden(lab: Lab) -> Seen:
    """As a version control or a desktop leaves them; they stay."""
    root = lab.folder / "run"
    root.mkdir()
    (root / ".gitkeep").touch()
    seen = told(["data", micro.write(lab.folder / "recipe.yaml", micro.settings(root))], 0)
    assert (root / ".gitkeep").exists()
    return seen


@fault("the run directory was made before there were markers", brief=True)
def unmarked(lab: Lab) -> Seen:
    """Its records show that it is a run's; its recipe has no seal, and only a dump has this form."""
    root = lab.copy()
    (root / MARKER).unlink()
    recorded = root / "recipe.yaml"
    recorded.write_text(recorded.read_text().partition("\n")[2])
    assert again(root) == []
    assert (root / MARKER).exists()
    assert again(root) == []
    assert tables(root) == tables(lab.finished)
    return Seen(0, "")


@fault("SIGKILL at any open, fsync or rename while a run begins its directory", brief=True)
def begun_and_killed(lab: Lab) -> Seen:
    """Whatever a killed first start left is a run's directory for the next one, and only then holds anything else."""
    root = lab.folder / "run"
    recipe = load_recipe(micro.write(lab.folder / "recipe.yaml", micro.settings(root)))

    def begin() -> None:
        with whole_run.open_run(recipe):
            write_recipe(recipe, root)

    def after() -> None:
        visible = [path for path in root.glob("*") if not path.name.startswith(".")]
        assert not visible or (root / MARKER).exists()
        begin()

    return Seen(KILLED, everywhere(death, begin, before=lambda: remove(root), after=after))


# In a directory of a run


def in_the_way(lab: Lab, name: str, unit: str) -> Seen:
    """A file of the user where a unit will write is named before any unit starts; once it is gone the run ends well."""
    root = lab.copy()
    undo(root, unit)
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    before = content(root)
    seen = Seen(2, str(refused(lambda: again(root, until="evaluate"))))
    assert content(root) == before
    file.rename(lab.folder / "mine")
    again(root, until="evaluate")
    assert tables(root) == tables(lab.finished)
    return seen


for name, unit in {
    "models/aware/notes.txt": "train-aware",
    "data/notes.csv": "data",
    "rollouts/part-0/mine.txt": "rollout-0",
    "checkpoints/aware/weights.bin": "train-aware",
    "results.json": "results",
    "calibrated.parquet": "calibrate",
}.items():
    fault(f"the user's {name} lies where {unit} will write", brief=unit in ("train-aware", "results"))(
        lambda lab, name=name, unit=unit: in_the_way(lab, name, unit)  # type: ignore[misc]
    )


def beside(lab: Lab, name: str, change: str) -> Seen:
    """A file of the user beside what a unit made, which a change of the recipe makes stale, is not removed with it."""
    return beside_in(lab.copy(), name, change)


def beside_in(root: Path, name: str, change: str = "policies.aware.kl_budget=0.7") -> Seen:
    """A file of the user in a run directory is not removed with what a change of the recipe makes stale."""
    (root / name).write_text("mine")
    before = content(root)
    said = refused(lambda: again(root, change, until="train"))
    assert content(root) == before
    return Seen(said.exit_code, str(said))


fault("the user keeps a converted model beside the one that is to be trained again", brief=True)(
    lambda lab: beside(lab, "models/aware/model.gguf", "policies.aware.kl_budget=0.7")
)
fault("the user keeps notes beside rollouts that are to be drawn again", brief=True)(
    lambda lab: beside(lab, "rollouts/part-0/notes.txt", "rollout.max_new_tokens=11")
)
fault("the user keeps a table beside data that are to be made again", brief=True)(
    lambda lab: beside(lab, "data/mine.parquet", "data.max_prompt_tokens=170")
)


def own_input(lab: Lab, change: str, **files: str) -> Seen:
    """What the recipe reads lies where the run writes: the run is refused, and it is still there."""
    root = lab.copy()
    for name, text in files.items():
        (root / name.replace("__", "/").replace("_jsonl", ".jsonl")).write_text(text)
    before = content(root)
    said = refused(lambda: again(root, change.replace("RUN", str(root))))
    assert "the recipe reads" in str(said)
    assert content(root) == before
    path = micro.write(root / "again.yaml", micro.settings(root))
    assert told(["run", path, "--dry-run", "--set", change.replace("RUN", str(root))], 2).said.strip() == str(said)
    return Seen(said.exit_code, str(said))


fault("a source of data lies in the data folder of the run", brief=True)(
    lambda lab: own_input(
        lab, "data={folder: RUN, sources: [{path: data/train.jsonl}], max_prompt_tokens: 180}", data__train_jsonl="{}\n"
    )
)
fault("the reward model starts from the folder that it is saved to", brief=True)(
    lambda lab: own_input(lab, "reward={model: RUN/models/reward, fit: {batch_size: 32}}")
)
fault("the policy is one that the same run trained", brief=True)(
    lambda lab: own_input(lab, "policy={model: RUN/models/aware}")
)


@fault("a source of data lies behind a link in the data folder of the run", brief=True)
def linked_input(lab: Lab) -> Seen:
    """Links are resolved on both sides."""
    (lab.folder / "elsewhere").symlink_to(lab.folder / "run")
    return own_input(
        lab,
        f"data={{folder: {lab.folder}/elsewhere/data, sources: [{{path: mine.jsonl}}], max_prompt_tokens: 180}}",
        data__mine_jsonl="{}\n",
    )


@fault("a trained model is a link to a larger disk, and the model is trained again", brief=True)
def linked_model(lab: Lab) -> Seen:
    """The link is replaced; what it named stays."""
    root = lab.copy()
    disk = lab.folder / "disk"
    (root / "models" / "aware").rename(disk)
    (root / "models" / "aware").symlink_to(disk)
    before = content(disk)
    assert again(root, until="evaluate") == []
    assert again(root, "policies.aware.kl_budget=0.7", until="train") == ["train-aware"]
    assert content(disk) == before
    assert not (root / "models" / "aware").is_symlink()
    return Seen(0, "")


def own_recipe(lab: Lab, text: str) -> Seen:
    """A recipe in the run directory that no run wrote as it is stays as it is."""
    root = lab.copy()
    recipe = root / "recipe.yaml"
    recipe.write_text(text.replace("RECORDED", recipe.read_text()))
    return untouched(lab, root, ["run", recipe, "--set", f"run_dir={root}"])


fault("the user adds a comment to the recipe in the run directory and runs it", brief=True)(
    lambda lab: own_recipe(lab, "# Careful with the budget.\nRECORDED")
)
fault("the user changes the recipe in the run directory and runs it", brief=True)(
    lambda lab: own_recipe(lab, "RECORDED\n")
)


@fault("the user keeps a hidden folder in a model that is to be trained again", brief=True)
def hidden_in_model(lab: Lab) -> Seen:
    """Its files are the user's; what a desktop leaves is not, and goes with the model."""
    root = lab.copy()
    (root / "models" / "aware" / ".DS_Store").write_text("")
    (root / "models" / "aware" / ".git").mkdir()
    seen = beside_in(root, "models/aware/.git/HEAD")
    shutil.rmtree(root / "models" / "aware" / ".git")
    assert again(root, "policies.aware.kl_budget=0.7", until="train") == ["train-aware"]
    return seen


@fault("the user links a folder of data into a model that is to be trained again", brief=True)
def linked_folder(lab: Lab) -> Seen:
    """The link is named, and what it leads to stays."""
    root, data = lab.copy(), lab.folder / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text("mine")
    (root / "models" / "aware" / "data").symlink_to(data)
    said = refused(lambda: again(root, "policies.aware.kl_budget=0.7", until="train"))
    assert (data / "rows.jsonl").read_text() == "mine"
    return Seen(said.exit_code, str(said))


@fault("the user's link stands where rollouts will be drawn", brief=True)
def linked_rollouts(lab: Lab) -> Seen:
    """A link to nowhere too is somebody's."""
    root = lab.copy()
    undo(root, "rollout-0")
    remove(root / "rollouts" / "part-0")
    (root / "rollouts" / "part-0").symlink_to(lab.folder / "large-disk")
    said = refused(lambda: again(root, until="calibrate"))
    assert (root / "rollouts" / "part-0").is_symlink()
    return Seen(said.exit_code, str(said))


@fault("the user keeps a recipe in the data folder of the run", brief=True)
def recipe_among_data(lab: Lab) -> Seen:
    """A recipe is no data, and it is read before its folder would be removed."""
    root = lab.copy()
    recipe = micro.write(root / "data" / "mine.yaml", micro.settings(root))
    before = content(root)
    seen = told(["run", recipe, "--set", "data.max_prompt_tokens=170"], 2)
    assert content(root) == before
    return seen


@fault("a file of the user lies beside the records", brief=True)
def beside_records(lab: Lab) -> Seen:
    """Nothing there is removed that no unit wrote, whatever is done again."""
    root = lab.copy()
    (root / "stages" / "notes.txt").write_text("mine")
    assert "train-aware" in again(root, "policies.aware.kl_budget=0.7", until="train")
    assert (root / "stages" / "notes.txt").read_text() == "mine"
    return Seen(0, "")


@fault("the run directory is a link to somebody's project", brief=True)
def linked_project(lab: Lab) -> Seen:
    """The link is followed before anything is judged."""
    folder = project(lab.folder / "project", lab.finished)
    (lab.folder / "run").symlink_to(folder)
    recipe = micro.write(lab.folder / "recipe.yaml", micro.settings(lab.folder / "run"))
    return untouched(lab, folder, ["run", recipe])


@fault("a figure of the user has the name of one that the report draws")
def figure(lab: Lab) -> Seen:
    """It is named and stays; figures of other names stay too, and the run's own are drawn again."""
    root = lab.copy()
    (root / "figures" / "mine.svg").write_text("mine")
    (root / "report.html").unlink()
    assert again(root) == ["report"]
    listed = root / ".figures.json"
    own = read_record(listed)["files"]
    write_record(listed, {"files": own[1:]})
    (root / "figures" / own[0]).write_text("mine")
    (root / "report.html").unlink()
    said = refused(lambda: again(root))
    assert own[0] in str(said)
    assert [(root / "figures" / name).read_text() for name in ("mine.svg", own[0])] == ["mine", "mine"]
    (root / "figures" / own[0]).unlink()
    assert again(root) == ["report"]
    return Seen(said.exit_code, str(said))


@fault("a file of the user is where the report's figures go", brief=True)
def figures_file(lab: Lab) -> Seen:
    """It is named and stays."""
    root = lab.copy()
    shutil.rmtree(root / "figures")
    (root / "figures").write_text("mine")
    (root / "report.html").unlink()
    said = refused(lambda: again(root))
    assert (root / "figures").read_text() == "mine"
    return Seen(said.exit_code, str(said))


@fault("a comparison of the user lies in the folder of comparisons", brief=True)
def comparison(lab: Lab) -> Seen:
    """It is named and stays."""
    root = lab.copy()
    (root / "compare").mkdir()
    (root / "compare" / "comparison.csv").write_text("mine")
    recipe = micro.write(lab.folder / "recipe.yaml", micro.settings(root))
    seen = told(["compare", recipe, "--methods", "rloo", "--kl-budgets", "0.5"], 2)
    assert (root / "compare" / "comparison.csv").read_text() == "mine"
    return seen
