"""Which work a run still has to do: units with a key of all that made them, run as soon as their inputs are done."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from infalign.errors import ConfigError, DataError
from infalign.progress import OnProgress, ProgressDisplay
from infalign.runs.fingerprints import Digests, changes, settings_of
from infalign.runs.layout import FORMAT, STAGES, Layout, parts, records
from infalign.runs.lock import held
from infalign.runs.reading import dump_recipe
from infalign.runs.recipe import Recipe
from infalign.runs.report.page import write
from infalign.runs.results import write_results
from infalign.runs.stages.calibrate import calibrate_prompts
from infalign.runs.stages.evaluate import evaluate_model, samples_so_far
from infalign.runs.stages.laws import coarse_ranks
from infalign.runs.stages.models import fine_tune_policy, fit_reward, reward_names, reward_source, training_so_far
from infalign.runs.stages.prepare import prepare_data
from infalign.runs.stages.rank_model import fit_rank_model
from infalign.runs.stages.sampling import draw_rollouts, rollouts_so_far, score_rollouts, scores_so_far
from infalign.runs.stages.train import train_policy
from infalign.runs.workers import Task, run_tasks
from infalign.storage import flaws, inventory, write_record, write_text, writing


@dataclass(frozen=True)
class Unit:
    """A piece of work with its own output and its own record of what made it."""

    stage: str
    name: str
    needs: tuple[str, ...]
    settings: dict[str, Any]  # the part of the recipe that its output depends on, with the content of what it names
    extent: dict[str, dict[str, int]]  # how much is wanted; when only this changes, what is there is kept and extended
    output: Path
    workspace: Path | None  # what an unfinished attempt leaves to continue from
    function: Callable[..., dict[str, Any]]
    so_far: Callable[[], str]  # what an unfinished attempt has, in words, "" for nothing


@dataclass(frozen=True)
class Pending:
    """What is there of a unit that is to be done, and why that is not enough; nothing of a missing one."""

    state: Literal["missing", "partial", "stale"]
    because: str


def units(
    recipe: Recipe, root: Path, splits: Sequence[str] = ("test",), *, digests: Digests | None = None
) -> list[Unit]:
    """Return the units of a recipe, each after those it needs; models are evaluated on the prompts of ``splits``.

    ``digests`` are those of the run directory unless given.
    """
    layout, settings = Layout(root), settings_of(recipe, digests or _digests(root))
    found: list[Unit] = []

    def add(
        stage: str,
        name: str,
        needs: list[str],
        keys: dict[str, Any],
        output: Path,
        function: Callable[..., dict[str, Any]],
        *arguments: Any,
        extent: dict[str, dict[str, int]] | None = None,
        workspace: Path | None = None,
        so_far: Callable[[], str] = str,  # of units that begin anew: ""
    ) -> str:
        work = partial(function, recipe, root, *arguments)
        found.append(Unit(stage, name, tuple(needs), keys, extent or {}, output, workspace, work, so_far))
        return name

    def add_model(
        stage: str, name: str, needs: list[str], keys: dict[str, Any], model: str, function: Any, *arguments: Any
    ) -> str:
        workspace = layout.checkpoints(model)
        so_far = partial(training_so_far, workspace)
        output = layout.model(model)
        return add(stage, name, needs, keys, output, function, *arguments, workspace=workspace, so_far=so_far)

    def part_of(*keys: str) -> dict[str, Any]:
        return {"seed": recipe.seed, **{key: settings[key] for key in keys}}

    tokenizer = {key: settings["policy"][key] for key in ("model", "scratch")}
    learns = recipe.judge.fit is not None  # a ready judge leaves its share of the rows to the reward model
    keys = part_of("data") | {"policy": tokenizer, "judge": {"fit": learns}}
    data = add("data", "data", [], keys, layout.data, prepare_data)
    policy = [data]
    if recipe.policy.fit is not None:
        policy += [add_model("sft", "sft", [data], part_of("policy"), "reference", fine_tune_policy)]
    sources: dict[str, list[str]] = {}
    for name in reward_names(recipe):
        source = reward_source(recipe, name)
        needs = [data] if source.model or source.scratch else policy
        if source.fit is None:
            sources[name] = []
        else:
            sources[name] = [add_model("reward-model", name, needs, part_of(name), name, fit_reward, name)]

    sampling = part_of("policy")
    sampling |= {"rollout": {key: settings["rollout"][key] for key in ("engine", "max_new_tokens")}}
    extent = {"rollout": {"prompts": recipe.rollout.prompts, "k": recipe.rollout.k}}
    scores = []
    for part in range(parts(recipe)):
        output = layout.rollouts(part)
        work, so_far = draw_rollouts, partial(rollouts_so_far, recipe, root, part)
        rollouts = add("rollout", f"rollout-{part}", policy, sampling, output, work, part, extent=extent, so_far=so_far)
        needs = [rollouts, *sources["reward"]]
        output = layout.scores(part)
        name, work, kept = f"score-{part}", score_rollouts, output.with_suffix("")
        so_far, keys = partial(scores_so_far, kept), part_of("reward")
        scores += [add("score", name, needs, keys, output, work, part, extent=extent, workspace=kept, so_far=so_far)]
    calibrated = add("calibrate", "calibrate", scores, {}, layout.calibrated, calibrate_prompts)
    if recipe.rank_model is not None:
        add_model("calibrate", "rank-model", [calibrated], part_of("rank_model"), "rank", fit_rank_model)

    judges = [name for needed in sources.values() for name in needed]
    judging, climbed = sampling | part_of(*reward_names(recipe)), sampling | part_of("reward")
    extent = {"evaluate": {"prompts": recipe.evaluate.prompts, "samples": recipe.evaluate.samples}}

    def evaluate(model: str, needs: list[str]) -> list[str]:
        found = []
        for split in splits:
            name = f"evaluate-{model}" if split == "test" else f"evaluate-{model}.{split}"
            scored, keys = (judges, judging) if split == "test" else (sources["reward"], climbed)
            work, so_far = evaluate_model, partial(samples_so_far, recipe, root, model, split)
            output, needed = layout.evaluation(model, split), [*needs, *scored]
            found += [add("evaluate", name, needed, keys, output, work, model, split, extent=extent, so_far=so_far)]
        return found

    evaluated = evaluate("reference", policy)
    for name in recipe.policies:
        policy_settings = settings["policies"][name]
        ranks = "rank-model" if policy_settings.pop("ranks") == "model" else calibrated  # what it needs is in its key
        keys = part_of() | {"policies": {name: policy_settings}}
        if recipe.policies[name].solver == "maxk":  # which climbs it
            keys |= part_of("procedure")
        trained = add_model("train", f"train-{name}", [ranks], keys, name, train_policy, name)
        evaluated += evaluate(name, [trained])
    keys = part_of("evaluate", "procedure")
    results = add("evaluate", "results", evaluated, keys, layout.results, write_results)
    add("report", "report", [results], {}, root / "report.html", _write_report)
    return found


def _write_report(recipe: Recipe, root: Path, *, on_progress: OnProgress) -> dict[str, Any]:
    write(recipe, root)
    return {}


def _digests(root: Path) -> Digests:
    return Digests(root / "digests.json")


def pending(wanted: list[Unit], root: Path) -> dict[str, Pending]:
    """Return the units still to be done, each with what is there of it and why that is not enough.

    A unit is done when its output is there with a record of the same settings, extent and keys of what it needs, and
    what it needs is done.
    """
    keys, made = _keys(wanted), records(root)
    bases = _bases(wanted, keys)
    todo: dict[str, Pending] = {}
    for unit in wanted:
        why, grown = list[str](), list[str]()
        if (record := made.get(unit.name)) is not None:
            why = list(_reasons(unit, record, root, keys, todo))
            grown = list(changes(record["extent"], unit.extent))
            if not why and not grown:
                continue
        ready = not why and todo.keys().isdisjoint(unit.needs)
        begun = ready and _holds(_started_path(root, unit.name), bases[unit.name])
        if so_far := unit.so_far() if begun else "":
            todo[unit.name] = Pending("partial", "; ".join([*grown, so_far]))
        elif record is None:
            todo[unit.name] = Pending("missing", "")
        else:
            todo[unit.name] = Pending("stale", "; ".join([*why, *grown]))
    return todo


def _reasons(
    unit: Unit, record: dict[str, Any], root: Path, keys: Mapping[str, str], todo: Mapping[str, Pending]
) -> Iterator[str]:
    """Yield why a record does not hold, but for its extent."""
    yield from changes(record["settings"], unit.settings)
    before, now = record["needs"], {name: keys[name] for name in unit.needs}
    if waiting := [name for name in now if name in todo]:
        yield f"follows {listed_names(waiting)}"
    if again := [name for name in now if name not in todo and before.get(name, now[name]) != now[name]]:
        yield f"{listed_names(again)} was done again"
    if new := [name for name in now if name not in todo and name not in before]:
        yield f"now needs {listed_names(new)}"
    if gone := [name for name in before if name not in now]:
        yield f"no longer needs {listed_names(gone)}"
    if not unit.output.exists():
        yield "its output is missing"
    elif lost := [name for name in record["output"] if not (root / name).exists()]:
        yield f"{listed_names(lost)} is missing"


def check_outputs(wanted: list[Unit], todo: Mapping[str, Pending], root: Path) -> None:
    """Raise DataError if something that the units to be done build on is not as its own unit left it.

    Models and other folders that they do not need are not read; single files are, since they are small.
    """
    made, built_on = records(root), set(todo)
    for unit in reversed(wanted):
        if unit.name in built_on:
            built_on |= set(unit.needs)
    for unit in wanted:
        if unit.name not in todo and (unit.name in built_on or unit.output.is_file()):
            for flaw in flaws(made[unit.name]["output"], root):
                raise DataError(
                    f"{root}: {flaw}, so it is not what {unit.name} made; delete it and run the same command again, "
                    "which makes it again, or put it back from a copy"
                )


def listed_names(names: Sequence[str]) -> str:
    """Return the first three names and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def reasons(todo: Mapping[str, Pending]) -> list[str]:
    """Return a line for each reason to do units again or to go on with them: ``again: train-aware (…)``."""
    names: dict[Pending, list[str]] = {}
    for name, found in todo.items():
        if found.state != "missing":
            names.setdefault(found, []).append(name)
    words = {"stale": "again", "partial": "continued"}
    return [f"{words[found.state]}: {', '.join(units)} ({found.because})" for found, units in names.items()]


def run(recipe: Recipe, *, until: str = "report", console: Console) -> Path:
    """Do everything up to stage ``until`` that is not done yet, and return the run directory.

    What an earlier attempt left is continued if only its extent differs from what is wanted, and removed otherwise.
    """
    with _run_directory(recipe) as root:
        write_text(root / "recipe.yaml", dump_recipe(recipe))
        wanted = [unit for unit in _units(recipe, root) if STAGES.index(unit.stage) <= STAGES.index(until)]
        _do(recipe, root, wanted, until=until, console=console)
    return root


def evaluate_policies(recipe: Recipe, *, console: Console) -> Path:
    """Train the recipe's policies and evaluate them on test and training prompts, as far as that is not done yet.

    Results, report and recorded recipe stay as they are: they may be those of other policies in the same directory.
    """
    with _run_directory(recipe) as root:
        wanted = [unit for unit in _units(recipe, root, "train") if unit.name not in ("results", "report")]
        _do(recipe, root, wanted, until="evaluate", console=console)
    return root


@contextmanager
def _run_directory(recipe: Recipe) -> Iterator[Path]:
    root = Path(recipe.run_dir)
    with held(root):
        records(root)  # raises for what this version cannot read, before anything is written
        with writing(root / "stages"):
            (root / "stages").mkdir(parents=True, exist_ok=True)
        yield root


def _units(recipe: Recipe, root: Path, *splits: str) -> list[Unit]:
    """Return the units, with the ``splits`` besides the test, and keep the digests that they took."""
    digests = _digests(root)
    found = units(recipe, root, ("test", *splits), digests=digests)
    if not int(os.environ.get("RANK", "0")):
        digests.save()
    return found


def _do(recipe: Recipe, root: Path, wanted: list[Unit], *, until: str, console: Console) -> None:
    """Do the units that are not done yet, and record each; a distributed run does those of stage ``until`` only."""
    by_name, keys = {unit.name: unit for unit in wanted}, _keys(wanted)
    bases = _bases(wanted, keys)
    todo = pending(wanted, root)
    check_outputs(wanted, todo, root)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed and (waiting := [name for name in todo if by_name[name].stage != until]):
        raise ConfigError(f"{', '.join(waiting)} must be done before a distributed {until}; run them without it first")
    if done := len(wanted) - len(todo):
        console.print(f"{done} of {len(wanted)} steps are done already", highlight=False)
    for line in reasons(todo):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if any(by_name[name].stage == "train" for name in todo):
        for warning in coarse_ranks(recipe):
            console.print(f"[yellow]![/] {warning}", highlight=False, soft_wrap=True)

    def finish(name: str, summary: dict[str, Any], seconds: float) -> None:
        unit = by_name[name]
        record: dict[str, Any] = {
            "format": FORMAT,
            "key": keys[name],
            "stage": unit.stage,
            "settings": unit.settings,
            "extent": unit.extent,
        }
        record |= {"needs": {need: keys[need] for need in unit.needs}, "seconds": round(seconds, 2)}
        record |= {"summary": summary, "versions": versions(), "output": inventory(unit.output, root)}
        write_record(_record_path(root, name), record)
        console.print(
            f"[green]✓[/] {name:<24} {seconds:6.1f} s   {_headline(summary)}", highlight=False, soft_wrap=True
        )

    jobs = [
        Task(name, partial(_begin, root, by_name[name], bases[name]), frozenset(by_name[name].needs)) for name in todo
    ]
    with ProgressDisplay(console) as display:
        processes = 1 if distributed else recipe.compute.processes
        run_tasks(jobs, processes=processes, threads=recipe.compute.threads, display=display, on_done=finish)


def _begin(root: Path, unit: Unit, base: str, *, on_progress: OnProgress) -> dict[str, Any]:
    """Run a unit; what an earlier attempt with another ``base`` made is removed first."""
    started = _started_path(root, unit.name)
    if int(os.environ.get("RANK", "0")):
        while not _holds(started, base):  # the first process tidies up
            time.sleep(0.1)
    else:
        continued = _holds(started, base)
        if unit.stage != "data":  # which removes its own, and only when it has read all rows
            if not (continued and unit.stage == "rollout"):  # which only adds files; others replace what they recorded
                _record_path(root, unit.name).unlink(missing_ok=True)
            if not continued:
                for left in (unit.output, unit.workspace):
                    if left is not None:
                        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        if not continued:
            write_text(started, base)
    with writing(unit.output.parent):
        unit.output.parent.mkdir(parents=True, exist_ok=True)
    return unit.function(on_progress=on_progress)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def _record_path(root: Path, name: str) -> Path:
    return root / "stages" / f"{name}.json"


def _started_path(root: Path, name: str) -> Path:
    return root / "stages" / f"{name}.started"


def _keys(wanted: list[Unit]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for unit in wanted:
        keys[unit.name] = _key(unit, keys, unit.extent)
    return keys


def _bases(wanted: list[Unit], keys: Mapping[str, str]) -> dict[str, str]:
    """Return what must stay the same for what is there to be continued: the keys, without what may be extended."""
    bases = dict(keys)
    for unit in wanted:
        if unit.extent:
            bases[unit.name] = _key(unit, bases, {})
    return bases


def _key(unit: Unit, keys: Mapping[str, str], extent: Mapping[str, Any]) -> str:
    content = json.dumps([unit.name, unit.settings, extent, [keys[name] for name in unit.needs]], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of infalign and of the libraries that make numbers, as far as they are installed."""
    names = ("infalign", "numpy", "pyarrow", "torch", "transformers", "trl", "peft", "datasets")
    return {name: importlib.metadata.version(name) for name in names if _installed(name)}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _headline(summary: dict[str, Any]) -> str:
    """Return the plain numbers of a summary, a few words."""
    shown = []
    for name, value in summary.items():
        if isinstance(value, dict) and "mean" in value:
            shown.append(f"{name} {value['mean']:.3f} ({value['low']:.3f}–{value['high']:.3f})")
        elif isinstance(value, (int, float)) and value:
            shown.append(f"{name} {value:.4g}")
    return "  ".join(shown[:5])
