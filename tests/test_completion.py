"""What TAB offers, asked of a real shell with the script that ``infalign --install-completion`` installs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infalign import cli
from infalign.recipe.built_in import built_in

NAMES = {recipe.name for recipe in built_in()}
DRIVER = """\
source ~/.bashrc
while IFS= read -r line; do
    IFS=' ' read -r -a COMP_WORDS <<< "infalign $line"
    [[ $line == *' ' || -z $line ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _infalign
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home of nobody's, in which the command installs what it installs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_real_bash_completes_commands_options_recipes_runs_and_keys(main: Any, home: Path) -> None:
    """After the installation every kind of word is completed, with what is there at that moment."""
    assert main("--install-completion", "--shell", "bash")[0] == 0
    for file in ("runs/mine/.infalign", "my.yaml", "other/deep/one.yml", "rows.jsonl", ".hidden/no.yaml"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    expected = {
        "wi": {"win-rate"},
        "run demo --dr": {"--dry-run"},
        "run ": NAMES | {"my.yaml", "other/deep/one.yml", "runs/mine"},
        "run ./o": {"./other/deep/one.yml"},
        "run ~/m": {"~/my.yaml"},
        "recipes d": {"demo"},
        "status runs/": {"runs/mine"},
        "serve ": {"runs/mine"},
        "run demo --set rollout.k": {"rollout.k"},
        "recipes --explain policies.NAME.fit.lora.": {
            f"policies.NAME.fit.lora.{key}" for key in ("rank", "alpha", "layers")
        },
        "init --data ": {"world", "rows.jsonl"},
        "export runs/mine --to ": {"trl", "verl", "openrlhf"},
        "choose --stored my": {"my.yaml"},
    }
    asked = subprocess.run(
        ["bash", "-c", DRIVER],
        input="\n".join(expected) + "\n",
        capture_output=True,
        text=True,
        cwd=home,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
    )
    offered = (set(line.replace("\\~", "~").split()) for line in asked.stdout.splitlines())
    assert dict(zip(expected, offered, strict=True)) == expected
    assert asked.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_with_every_command(shell: Any, main: Any, home: Path) -> None:
    """The file has all commands, and the shell itself, where there is one, reads it."""
    script = home / "completions"
    assert main("--install-completion", "--shell", shell, "--output", script)[0] == 0
    text = script.read_text(encoding="utf-8")
    assert [name for name in cli.app if not name.startswith("-") and name not in text] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True)
