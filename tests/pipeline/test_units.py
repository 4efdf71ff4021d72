"""Toy units of work, which know no language model: what is done, done again, continued, refused and stopped."""

import io
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infalign.core.errors import DataError, InfalignError
from infalign.core.progress import OnProgress, SoFar
from infalign.pipeline.records import Record, record_path, records
from infalign.pipeline.scheduler import Remaining, begin, run_units
from infalign.pipeline.units import Summary, Unit, identify
from infalign.pipeline.workers import Workers


def write(path: Path, text: str, *, on_progress: OnProgress) -> Summary:
    """Write a file and report its length, as if each letter were a step."""
    path.write_text(text)
    return {"length": len(text), "history": [{"step": step} for step in range(1, len(text) + 1)]}


def join(output: Path, paths: Sequence[Path], *, on_progress: OnProgress) -> Summary:
    """Write a file that holds others."""
    return write(output, "".join(path.read_text() for path in paths), on_progress=on_progress)


def count(folder: Path, numbers: int, *, on_progress: OnProgress) -> Summary:
    """Write a file for each number that has none yet; the file ``stop`` stops it before the third."""
    folder.mkdir(exist_ok=True)
    left = [number for number in range(numbers) if not (folder / str(number)).exists()]
    for number in left:
        if number == 2 and (folder.parent / "stop").exists():
            raise DataError("stopped")
        (folder / str(number)).touch()
    return {"made": len(left)}


def counted(folder: Path, numbers: int) -> SoFar:
    """Return how many numbers are there."""
    there = len(list(folder.glob("*")))
    return SoFar(f"{there} of {numbers}", there / numbers)


def made(output: Path, work: Any, *given: Any, kind: str = "", needs: Sequence[Path] = (), **more: Any) -> Unit:
    """Return a unit, of the output's name if no kind is given, whose work writes its output."""
    settings = more.pop("settings", {})
    about: dict[str, Any] = {"inputs": tuple(needs), "settings": settings, "work": partial(work, output, *given)}
    return Unit("stage", kind or output.name, output.name if kind else "", output=output, **about | more)


def toys(root: Path, *, first: str = "a", last: str = "b", numbers: int = 3) -> list[Unit]:
    """Return four units: two texts, their join, and a folder that grows."""
    outputs, folder = (root / "first", root / "last"), root / "count"
    grows = {"extent": {"count": {"numbers": numbers}}, "so_far": partial(counted, folder, numbers)}
    return [
        *(made(outputs[i], write, text, kind="text", settings={"text": text}) for i, text in enumerate((first, last))),
        made(root / "join", join, outputs, needs=outputs),
        made(folder, count, numbers, **grows),
    ]


def threads(path: Path, *, on_progress: OnProgress) -> Summary:
    """Write the number of threads that a unit has."""
    path.write_text(os.environ["OMP_NUM_THREADS"])
    return {}


def average(path: Path, *, on_progress: OnProgress) -> Summary:
    """Write a mean of float32, whose rounding depends on the number of threads."""
    import torch

    numbers = torch.rand(2**18, generator=torch.Generator().manual_seed(0))
    return write(path, str(numbers.exp().mean().item()), on_progress=on_progress)


def run(
    root: Path,
    units: Sequence[Unit],
    *,
    processes: int = 1,
    of_each: int | None = None,
    warn: Any = lambda record: [],
    plan: Sequence[Unit] = (),
) -> list[str]:
    """Do what is left, and return the names of the units that were done."""
    (root / "stages").mkdir(parents=True, exist_ok=True)
    done = list[str]()

    def after_unit(record: Record) -> list[str]:
        done.append("-".join(filter(None, (record["kind"], record["subject"]))))
        return list(warn(record))

    console = Console(file=io.StringIO())
    remaining = Remaining.of(units, root)
    workers = Workers(processes, of_each)
    run_units(remaining, workers, console=console, versions={"infalign": "1"}, after_unit=after_unit, plan=plan)
    return sorted(done)


@pytest.mark.parametrize("processes", [1, 2])
def test_units_are_done_once_and_then_only_what_a_change_affects(tmp_path: Path, processes: int) -> None:
    """A second run does nothing; a changed setting redoes its unit and those that read its output."""
    assert run(tmp_path, toys(tmp_path), processes=processes) == ["count", "join", "text-first", "text-last"]
    assert run(tmp_path, toys(tmp_path), processes=processes) == []
    assert run(tmp_path, toys(tmp_path, last="c"), processes=processes) == ["join", "text-last"]
    assert (tmp_path / "join").read_text() == "ac"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    join = [line for line in lines if (line["stage"], line["unit"]) == ("stage", "join")]
    assert [line.get("step", line.get("length")) for line in join] == [1, 2, 2]
    assert {line["unit"] for line in lines if "seconds" in line} == set(records(tmp_path))


def test_a_larger_extent_keeps_what_is_there(tmp_path: Path) -> None:
    """Only the two numbers that are new are made."""
    run(tmp_path, toys(tmp_path))
    assert Remaining.of(toys(tmp_path, numbers=5), tmp_path).todo["count"].because == "count.numbers 3 → 5; 3 of 5"
    assert run(tmp_path, toys(tmp_path, numbers=5)) == ["count"]
    assert records(tmp_path)["count"]["summary"] == {"made": 2}


def test_a_stopped_unit_is_continued(tmp_path: Path) -> None:
    """What the stopped attempt made is kept; steps/test_whole_run.py removes it for other settings."""
    (tmp_path / "stop").touch()
    with pytest.raises(DataError, match="stopped"):
        run(tmp_path, toys(tmp_path))
    assert Remaining.of(toys(tmp_path), tmp_path).todo["count"].because == "2 of 3"
    (tmp_path / "stop").unlink()
    run(tmp_path, toys(tmp_path))
    assert records(tmp_path)["count"]["summary"] == {"made": 1}


def test_what_reads_an_output_that_is_made_again_differently_starts_anew(tmp_path: Path) -> None:
    """As samples of a model that was trained again; what a cluster made of both before either is recorded is kept."""
    model, samples, scores = (tmp_path / name for name in ("model", "samples", "scores"))
    found = list[list[int]]()
    for text, numbers in (("one", 2), ("one", 3), ("other", 3), ("other", 4)):
        extent = {"count": {"numbers": numbers}}
        drawn = made(samples, count, numbers, needs=[model], extent=extent)
        units = [made(model, write, text), drawn, made(scores, count, numbers, needs=[samples], extent=extent)]
        for unit in units[1:] if numbers == 4 else []:
            record_path(tmp_path, unit.name).unlink()
            begin(tmp_path, unit, identify(units)[unit.name])
        run(tmp_path, units)
        found.append([records(tmp_path)[name]["summary"]["made"] for name in ("samples", "scores")])
        if found == [[2, 2], [1, 1]]:
            model.unlink()
    assert found == [[2, 2], [1, 1], [3, 3], [1, 1]]


def test_a_function_may_stop_the_run_after_any_unit(tmp_path: Path) -> None:
    """The unit is recorded, so the next run goes on after it."""

    def refuse(record: Record) -> list[str]:
        raise InfalignError(f"{record['subject']} is short")

    with pytest.raises(InfalignError, match="is short"):
        run(tmp_path, toys(tmp_path)[:1], warn=refuse)
    assert run(tmp_path, toys(tmp_path)[:1]) == []


def test_a_unit_beside_which_nothing_runs_has_the_threads_of_all_processes(tmp_path: Path) -> None:
    """So have both ends of a diamond, and a side has its own alone: also where the other is done, or comes later."""

    start, left, right, end = (tmp_path / name for name in ("start", "left", "right", "end"))
    sides = [made(side, threads, needs=[start]) for side in (left, right)]
    units = [made(start, threads), *sides, made(end, threads, needs=[left, right])]
    expected = {"start": "6", "left": "3", "right": "3", "end": "6"}
    for wanted in (units[:1], units[:2], units):
        run(tmp_path, wanted, processes=2, of_each=3, plan=units)
    assert {name: (tmp_path / name).read_text() for name in expected} == expected
    left.unlink()
    run(tmp_path, units, processes=2, of_each=3)
    assert {name: (tmp_path / name).read_text() for name in expected} == expected


def test_a_run_that_stops_on_its_way_computes_the_numbers_of_a_whole_one(tmp_path: Path) -> None:
    """To the last bit: what is left alone when a run stops early does not get more threads."""

    roots = (tmp_path / "whole", tmp_path / "stopped")
    whole, stopped = ([made(root / "trained", average), made(root / "drawn", write, "text")] for root in roots)
    run(tmp_path / "whole", whole, processes=2, of_each=1)
    for wanted in (stopped[:1], stopped):
        run(tmp_path / "stopped", wanted, processes=2, of_each=1, plan=stopped)
    assert stopped[0].output.read_text() == whole[0].output.read_text()
