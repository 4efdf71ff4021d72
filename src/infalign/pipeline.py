"""Which work a run still has to do: units with a key of all that made them, run as soon as their inputs are done."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from infalign import stages
from infalign.config import Recipe, dump_recipe
from infalign.data import write_text
from infalign.errors import ConfigError
from infalign.jobs import Display, Job, Report, run_jobs
from infalign.report import write
from infalign.results import summarise
from infalign.stages import STAGES, Layout


@dataclass(frozen=True)
class Unit:
    """A piece of work with its own output and its own record of what made it."""

    stage: str
    name: str
    needs: tuple[str, ...]
    settings: dict[str, Any]  # the part of the recipe that its output depends on
    extent: dict[str, int]  # how much of it is wanted; when only this changes, what is there is kept and extended
    output: Path
    workspace: Path | None  # what an unfinished attempt leaves to continue from
    function: Callable[..., dict[str, Any]]


def units(recipe: Recipe, root: Path, splits: Sequence[str] = ("test",)) -> list[Unit]:
    """Return the units of a recipe, each after those it needs; models are evaluated on the prompts of ``splits``."""
    layout, settings = Layout(root), recipe.model_dump(mode="json")
    found: list[Unit] = []

    def add(
        stage: str,
        name: str,
        needs: list[str],
        keys: dict[str, Any],
        output: Path,
        function: Callable[..., dict[str, Any]],
        *arguments: Any,
        extent: dict[str, int] | None = None,
        workspace: Path | None = None,
    ) -> str:
        work = partial(function, recipe, root, *arguments)
        found.append(Unit(stage, name, tuple(needs), keys, extent or {}, output, workspace, work))
        return name

    def add_model(
        stage: str, name: str, needs: list[str], keys: dict[str, Any], model: str, function: Any, *arguments: Any
    ) -> str:
        workspace = layout.checkpoints(model)
        return add(stage, name, needs, keys, layout.model(model), function, *arguments, workspace=workspace)

    def part_of(*keys: str) -> dict[str, Any]:
        return {"seed": recipe.seed, **{key: settings[key] for key in keys}}

    folder = Path(settings["data"].pop("folder"))  # what the files hold counts, not where they lie
    files = [_digest(folder / source.path) for source in (*recipe.data.sources, *recipe.data.test) if source.path]
    tokenizer = settings["policy"]["model"] or settings["policy"]["scratch"]
    learns = recipe.judge.fit is not None  # a ready judge leaves its share of the rows to the reward model
    keys = part_of("data") | {"tokenizer": tokenizer, "files": files, "judge_learns": learns}
    data = add("data", "data", [], keys, layout.data, stages.prepare_data)
    policy = [data]
    if recipe.policy.fit is not None:
        policy += [add_model("sft", "sft", [data], part_of("policy"), "reference", stages.fine_tune_policy)]
    sources: dict[str, list[str]] = {}
    for name in stages.reward_names(recipe):
        source = stages.reward_source(recipe, name)
        needs = [data] if source.model or source.scratch else policy
        if source.fit is None:
            sources[name] = []
        else:
            sources[name] = [add_model("reward-model", name, needs, part_of(name), name, stages.fit_reward, name)]

    sampling = part_of("policy")
    sampling |= {"engine": settings["rollout"]["engine"], "max_new_tokens": recipe.rollout.max_new_tokens}
    extent = {"prompts": recipe.rollout.prompts, "k": recipe.rollout.k}
    scores = []
    for part in range(stages.parts(recipe)):
        output = layout.rollouts(part)
        name = f"rollout-{part}"
        rollouts = add("rollout", name, policy, sampling, output, stages.draw_rollouts, part, extent=extent)
        needs = [rollouts, *sources["reward"]]
        output = layout.scores(part)
        scores += [add("score", f"score-{part}", needs, part_of("reward"), output, stages.score_rollouts, part)]
    calibrated = add("calibrate", "calibrate", scores, {}, layout.calibrated, stages.calibrate_prompts)
    if recipe.rank_model is not None:
        add_model("calibrate", "rank-model", [calibrated], part_of("rank_model"), "rank", stages.fit_rank_model)

    judges = [name for needed in sources.values() for name in needed]
    judging, climbed = sampling | part_of(*stages.reward_names(recipe)), sampling | part_of("reward")
    extent = {"prompts": recipe.evaluate.prompts, "samples": recipe.evaluate.samples}

    def evaluate(model: str, needs: list[str]) -> list[str]:
        found = []
        for split in splits:
            name = f"evaluate-{model}" if split == "test" else f"evaluate-{model}.{split}"
            scored, keys = (judges, judging) if split == "test" else (sources["reward"], climbed)
            output, work = layout.evaluation(model, split), stages.evaluate_model
            found += [add("evaluate", name, [*needs, *scored], keys, output, work, model, split, extent=extent)]
        return found

    evaluated = evaluate("reference", policy)
    for name in recipe.policies:
        keys = part_of() | {"policy": settings["policies"][name]}
        ranks = "rank-model" if keys["policy"].pop("ranks") == "model" else calibrated  # what it needs is in its key
        if recipe.policies[name].transform.endswith(".json"):  # what the file holds counts, not where it lies
            keys["policy"] |= {"transform": _digest(Path(recipe.policies[name].transform))}
        if recipe.policies[name].solver == "maxk":  # which climbs it
            keys |= part_of("procedure")
        trained = add_model("train", f"train-{name}", [ranks], keys, name, stages.train_policy, name)
        evaluated += evaluate(name, [trained])
    keys = part_of("evaluate", "procedure")
    results = add("evaluate", "results", evaluated, keys, layout.results, summarise)
    add("report", "report", [results], {}, root / "report.html", _write_report)
    return found


def _write_report(recipe: Recipe, root: Path, *, report: Report) -> dict[str, Any]:
    write(recipe, root)
    return {}


def _digest(path: Path) -> str | None:
    """Return the hash of a file's content; a missing file is the data stage's error."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def pending(wanted: list[Unit], root: Path) -> dict[str, str]:
    """Return the units still to be done, each with the key that its record will carry.

    A unit is done when its output is there with a record of the same settings, extent and keys of what it needs, and
    what it needs is done.
    """
    keys = _keys(wanted)
    records = stages.records(root)
    done = set[str]()
    for unit in wanted:
        recorded = unit.output.exists() and records.get(unit.name, {}).get("key") == keys[unit.name]
        if recorded and done.issuperset(unit.needs):
            done.add(unit.name)
    return {name: key for name, key in keys.items() if name not in done}


def run(recipe: Recipe, *, until: str = "report", console: Console) -> Path:
    """Do everything up to stage ``until`` that is not done yet, and return the run directory.

    What an earlier attempt left is continued if only its extent differs from what is wanted, and removed otherwise.
    """
    root = _run_directory(recipe)
    write_text(root / "recipe.yaml", dump_recipe(recipe))
    wanted = [unit for unit in units(recipe, root) if STAGES.index(unit.stage) <= STAGES.index(until)]
    _do(recipe, root, wanted, until=until, console=console)
    return root


def evaluate_policies(recipe: Recipe, *, console: Console) -> Path:
    """Train the recipe's policies and evaluate them on test and training prompts, as far as that is not done yet.

    Results, report and recorded recipe stay as they are: they may be those of other policies in the same directory.
    """
    root = _run_directory(recipe)
    wanted = [unit for unit in units(recipe, root, ("test", "train")) if unit.name not in ("results", "report")]
    _do(recipe, root, wanted, until="evaluate", console=console)
    return root


def _run_directory(recipe: Recipe) -> Path:
    root = Path(recipe.run_dir)
    try:
        (root / "stages").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run directory {root} cannot be made: {error.strerror}; change run_dir") from error
    return root


def _do(recipe: Recipe, root: Path, wanted: list[Unit], *, until: str, console: Console) -> None:
    """Do the units that are not done yet, and record each; a distributed run does those of stage ``until`` only."""
    by_name = {unit.name: unit for unit in wanted}
    todo = pending(wanted, root)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed and (waiting := [name for name in todo if by_name[name].stage != until]):
        raise ConfigError(f"{', '.join(waiting)} must be done before a distributed {until}; run them without it first")
    if done := len(wanted) - len(todo):
        console.print(f"{done} of {len(wanted)} steps are done already", highlight=False)
    if any(by_name[name].stage == "train" for name in todo):
        for warning in stages.coarse_ranks(recipe):
            console.print(f"[yellow]![/] {warning}", highlight=False, soft_wrap=True)

    def finish(name: str, summary: dict[str, Any], seconds: float) -> None:
        record = {"key": todo[name], "stage": by_name[name].stage, "seconds": round(seconds, 2), "summary": summary}
        write_text(_record_path(root, name), json.dumps(record | {"versions": _versions()}, indent=1))
        console.print(
            f"[green]✓[/] {name:<24} {seconds:6.1f} s   {_headline(summary)}", highlight=False, soft_wrap=True
        )

    keys = _keys(wanted)
    jobs = [
        Job(name, partial(_begin, root, by_name[name], _key(by_name[name], keys, {})), frozenset(by_name[name].needs))
        for name in todo
    ]
    with Display(console) as display:
        processes = 1 if distributed else recipe.compute.processes
        run_jobs(jobs, processes=processes, threads=recipe.compute.threads, display=display, on_done=finish)


def _begin(root: Path, unit: Unit, key: str, *, report: Report) -> dict[str, Any]:
    """Run a unit; what an earlier attempt with another ``key``, which leaves out the extent, made is removed first."""
    started = root / "stages" / f"{unit.name}.started"
    if int(os.environ.get("RANK", "0")):
        while not _holds(started, key):  # the first process tidies up
            time.sleep(0.1)
    elif not _holds(started, key):
        _record_path(root, unit.name).unlink(missing_ok=True)
        for left in (unit.output, unit.workspace):
            if left is not None:
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        write_text(started, key)
    unit.output.parent.mkdir(parents=True, exist_ok=True)
    return unit.function(report=report)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def _record_path(root: Path, name: str) -> Path:
    return root / "stages" / f"{name}.json"


def _keys(wanted: list[Unit]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for unit in wanted:
        keys[unit.name] = _key(unit, keys, unit.extent)
    return keys


def _key(unit: Unit, keys: dict[str, str], extent: dict[str, int]) -> str:
    content = json.dumps([unit.name, unit.settings, extent, [keys[name] for name in unit.needs]], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _versions() -> dict[str, str]:
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
