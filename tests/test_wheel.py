"""The wheel is whole: who has only it, not the repository, has all that commands name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infalign.recipe.built_in import built_in, find

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_has_the_recipes_and_runs_one(tmp_path: Path) -> None:
    """From an empty folder the recipes are listed and printed, and a small run of the demo ends with its report."""
    wheels, site, empty = (tmp_path / name for name in ("wheels", "site", "empty"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT], check=True)
    (wheel,) = wheels.glob("infalign-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    empty.mkdir()

    def run(*words: str) -> str:
        command, environment = [sys.executable, "-m", "infalign", *words], os.environ | {"PYTHONPATH": str(site)}
        found = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        return found.stdout

    listed = run("recipes")
    for name, (about, *_) in built_in().items():
        assert f"{name}\n  {about}\n" in listed
        assert run("recipes", name) == find(name).read_text(encoding="utf-8")
    changes = [
        "data.sources.0.sums=8000",
        "rollout={prompts: 64, k: 6, max_new_tokens: 4}",
        "evaluate={prompts: 6, samples: 8, max_n: 8, truth: reward}",
        "report_to=[]",
        "allow_worthless=true",  # 384 rollouts are one batch, and its only step has learning rate 0
    ]
    run("run", "demo", *(word for change in changes for word in ("--set", change)))
    assert (empty / "runs" / "demo" / "report.html").is_file()
