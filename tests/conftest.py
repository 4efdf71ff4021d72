"""What several test files use."""

import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

import micro
import pytest
from filelock import FileLock
from hypothesis import settings

from infalign.recipe.settings import Recipe

# Why a test may be skipped, and what makes it run. On a machine that `.ci/run` has prepared only the first seven may.
SKIPS = {
    "the real preference data is absent": "INFALIGN_DATA, the folder with it",
    "reads /proc": "Linux",
    "a process is told of its parent's death by Linux alone": "Linux",
    "make test-frameworks installs": "make test-frameworks: they pin other packages than lock.txt",
    "inspect_ai is not installed": "make test-logs: it pins other packages than lock.txt",
    "inspect_ai is installed": "make env",
    "mlflow is installed": "make env",
    "chromium and chromedriver are not installed": "apt-get install chromium chromium-driver",
    "needs the extra rlvr": "make rlvr",
    "needs infalign[train]": "make env",
}
LISTED = tuple(SKIPS)[: 7 if os.environ.get("INFALIGN_PREPARED") else None]

settings.register_profile("repeatable", derandomize=True, deadline=None)  # no luck, and no clock on a busy machine
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that train models, so that none of the workers is left alone with one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("training", "steps"))


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup() -> None:
    """Let torch compute in one thread, also after a test that asked for more; a test without torch loads none."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test fail that is skipped for a reason which is not listed."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(LISTED):
            report.outcome, report.longrepr = "failed", f"skipped, which tests/conftest.py does not list: {reason}"
    return report


@pytest.fixture
def main() -> Any:
    """Return the function that runs a command line in this process and returns exit code, stdout and stderr."""
    return micro.infalign


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a byte-level tokenizer."""
    return micro.tokenizer()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the directory of a whole run from data to report, done once for all workers; tests only read it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "finished"
    with FileLock(f"{folder}.lock"):
        if not (folder / "run" / "report.html").exists():
            folder.mkdir(exist_ok=True)
            micro.finish(folder)
    return folder / "run"


@pytest.fixture(scope="session")
def calibrated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory whose prompts are calibrated; its reward is gold."""
    folder = tmp_path_factory.mktemp("calibrated")
    recipe = Recipe.model_validate(micro.given(folder / "run", micro.write_policy(folder / "policy")))
    micro.done(recipe, until="calibrate")
    return folder / "run"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny random policy."""
    return micro.write_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return an `Enumerable`: a reference whose responses can be listed."""
    import enumerable

    return enumerable.enumerable(tmp_path_factory.mktemp("enumerable") / "reference")


@pytest.fixture(scope="session")
def browser() -> Any:
    """Return a headless Chromium that keeps its console and network logs."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()
