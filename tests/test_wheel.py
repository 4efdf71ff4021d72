"""The wheel is whole: who has only it, not the repository, has all that commands name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infalign.recipe.built_in import built_in

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with nothing but what the wheel installs; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("infalign-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run(site: Path, *words: str, cwd: Path) -> str:
    """Run the installed package's command in ``cwd`` and return what it prints."""
    command = [sys.executable, "-m", "infalign", *words]
    environment = os.environ | {"PYTHONPATH": str(site)}
    found = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
def test_the_wheel_has_the_recipes_and_runs_one(installed: Path, tmp_path: Path) -> None:
    """From an empty folder the recipes are listed and printed, and a small run of the demo ends with its report."""
    listed = run(installed, "recipes", cwd=tmp_path)
    for recipe in built_in():
        assert f"{recipe.name}\n  {recipe.about}\n" in listed
        assert run(installed, "recipes", recipe.name, cwd=tmp_path) == recipe.path.read_text(encoding="utf-8")
    changes = [
        "data.sources.0.sums=2000",
        "rollout={prompts: 16, k: 6, max_new_tokens: 4}",
        "evaluate={prompts: 6, samples: 8, max_n: 8, truth: reward}",
        "report_to=[]",
        "allow_worthless=true",  # 96 rollouts are one batch of 128, and the only step has learning rate 0
    ]
    run(installed, "run", "demo", *(word for change in changes for word in ("--set", change)), cwd=tmp_path)
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
