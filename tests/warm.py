"""A process that has loaded the slow packages, and becomes the command in a fork of its own as often as it is asked.

Loading torch and transformers takes longer than most commands of the tests.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from infalign.pipeline.workers import prepare_process

LOADED = (
    "infalign.cli",
    "infalign.steps.whole_run",
    "infalign.training.offline_trainer",
    "infalign.evaluation.kl",
    "datasets",
)


def run(command: Path, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Python to its end, as `subprocess.run` does; an ``environment`` has a process of its own.

    Without one, what packages read from the environment when they are loaded is of the first call.
    """
    with tempfile.TemporaryDirectory() as folder:
        texts = [Path(folder) / name for name in ("stdout", "stderr")]
        process = _process(environment and frozenset(environment.items()))
        surroundings = {"folder": str(Path.cwd()), "environment": dict(environment or os.environ)}
        asked = {"command": str(command), "words": words, "texts": list(map(str, texts))} | surroundings
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess([command, *words], code, *(text.read_text("utf-8") for text in texts))


@cache
def _process(environment: frozenset[tuple[str, str]] | None) -> Any:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__], env=environment and dict(environment), **pipes)
    atexit.register(process.__exit__, None, None, None)
    return process


def _become(command: str, words: list[str], texts: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(texts, 1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [command, *words]
    runpy.run_path(command, run_name="__main__")


if __name__ == "__main__":
    prepare_process(threads=1)
    for module in LOADED:
        __import__(module)
    for line in sys.stdin:
        # It ends as multiprocessing has it: the interpreter takes a second or two to forget what was loaded.
        child = multiprocessing.get_context("fork").Process(target=_become, kwargs=json.loads(line))
        child.start()
        child.join()
        print(child.exitcode, flush=True)
