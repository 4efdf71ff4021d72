"""Several methods compared in one run directory: what is shared, and what is written."""

import io
from pathlib import Path
from typing import Any

import micro
import pytest
from rich.console import Console

from infalign.compare.comparison import compare_methods
from infalign.pipeline.pending import pending
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.results import read_results
from infalign.steps import whole_run
from infalign.steps.run import Run

pytestmark = pytest.mark.slow
FIRST, BUDGETS = ["qrpo", "bon-sft"], [0.1, 0.2]  # both budgets are nearest to the best of two


def recipe(root: Path, *overrides: str) -> Recipe:
    """Return a recipe whose run trains an offline and an on-policy policy and takes the gold for its judge."""
    root.mkdir(parents=True, exist_ok=True)
    settings = micro.settings(root / "run") | {"judge": micro.GOLD, "procedure": "best-of-2"}
    del settings["policies"]["plain"], settings["gold"]
    for policy in settings["policies"].values():
        policy["fit"] = policy["fit"] | {"epochs": 4, "learning_rate": 1.2e-2}  # enough to spend the budgets
    fixed = ["compute.processes=1", "report_to=[]"]
    return load_recipe(micro.write(root / "recipe.yaml", settings), [*fixed, *overrides])


def compare(root: Path, methods: list[str], budgets: list[float] = BUDGETS) -> tuple[Path, list[str]]:
    """Return the folder of a comparison and the names of the units that were done for it."""
    console = Console(file=io.StringIO(), width=200)
    folder = compare_methods(recipe(root), methods=methods, budgets=budgets, console=console)
    return folder, [line.split()[1] for line in console.file.getvalue().splitlines() if line.startswith("✓")]


def contents(root: Path) -> dict[str, bytes]:
    """Return all that a run leaves for its reader and the records of its units."""
    files = [root / name for name in ("results.json", "report.html", "recipe.yaml", "calibrated.parquet")]
    return {str(path): path.read_bytes() for path in [*files, *sorted((root / "stages").glob("*.json"))]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run, a comparison in its directory and one with more methods: folder, units done, files before."""
    root = tmp_path_factory.mktemp("compare")
    whole_run.run_recipe(recipe(root), console=Console(file=io.StringIO()))
    before = contents(root / "run")
    folder, done_first = compare(root, FIRST)
    first = read_results(folder)
    _, done_final = compare(root, [*FIRST, "rloo"])
    return {"root": root, "before": before, "first": first, "done": [done_first, done_final], "folder": folder}


def test_a_comparison_trains_and_evaluates_its_own_policies_only(finished: dict[str, Any]) -> None:
    """All that the run and earlier comparisons have done is used; two budgets with one n share a policy."""
    names = ["qrpo-0.1", "qrpo-0.2", "bon-sft-n2"]
    for done, new in zip(finished["done"], (names, ["rloo-0.1", "rloo-0.2"]), strict=True):
        assert sorted(done) == sorted(work for name in new for work in (f"train-{name}", *micro.evaluation(name)))
    assert list(finished["first"]["policies"]) == names


def test_the_run_itself_does_not_change(finished: dict[str, Any]) -> None:
    """Results, report, recipe and every record of the run are as before, and the run has nothing left to do."""
    assert {path: Path(path).read_bytes() for path in finished["before"]} == finished["before"]
    run = Run.of(recipe(finished["root"]))
    assert pending(whole_run.units(run), run.layout.root) == {}


def test_a_comparison_has_results_and_a_report_of_its_policies(finished: dict[str, Any]) -> None:
    """Its folder has what a run has: all numbers, the first method's gains at one KL, the figures."""
    folder = finished["folder"]
    results, page = read_results(folder), (folder / "report.html").read_text()
    assert list(results["policies"]) == ["qrpo-0.1", "qrpo-0.2", "bon-sft-n2", "rloo-0.1", "rloo-0.2"]
    assert all(f">{name}<" in page for name in results["policies"])
    methods = [results["policies"][name]["method"] for name in ("qrpo-0.1", "bon-sft-n2", "rloo-0.1")]
    assert results["matched"]["first"] == methods[0]
    assert results["matched"]["judges"]["judge"]["gain_over"].keys() <= {*methods[1:]}
    assert (folder / "figures" / "win-rate-by-kl-reward.png").read_bytes().startswith(b"\x89PNG")
