"""What `make env` installs is locked: every package of the project at one version, each file with its hash."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKED = re.findall(r"^(\S+)==(\S+)((?:.*\\\n.*)+)", (ROOT / "lock.txt").read_text(encoding="utf-8"), re.MULTILINE)
VERSIONS = {canonicalize_name(name): version for name, version, _ in LOCKED}
OF_TORCH = {"torch"}  # whose build is the user's choice, and what only it requires


def asked() -> list[str]:
    """Return what the project asks for, with the extras of `all` and its tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    return [
        *project["project"]["dependencies"],
        *(line for name in Requirement(extras["all"][0]).extras for line in extras[name]),
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]


def needed(lines: list[str]) -> Iterator[str]:
    """Yield the names of the packages that requirements lead to here, but for torch's."""
    todo, seen = [Requirement(line) for line in lines], set[tuple[str, frozenset[str]]]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        step = (name, frozenset(requirement.extras))
        if name in OF_TORCH or step in seen:
            continue
        seen.add(step)
        yield name
        for line in requires(name) or []:
            further = Requirement(line)
            extras = [{"extra": extra} for extra in ("", *requirement.extras)]
            if further.marker is None or any(further.marker.evaluate(extra) for extra in extras):
                todo.append(further)


def test_every_package_that_the_project_leads_to_is_locked() -> None:
    """What is installed here because of pyproject.toml, at any distance, has its place in lock.txt."""
    try:
        found = set(needed(asked()))
    except PackageNotFoundError as error:
        raise AssertionError(f"{error} is in pyproject.toml and not installed; make env") from error
    assert len(found) > 80
    assert found <= VERSIONS.keys(), found - VERSIONS.keys()


def test_the_lock_has_hashes_and_the_versions_of_the_constraints() -> None:
    """Each package has one or more hashes; no address of a package index is written down."""
    text = (ROOT / "lock.txt").read_text(encoding="utf-8")
    assert len(LOCKED) == len(re.findall("==", re.sub(r"\s;.*", "", text, flags=re.MULTILINE)))
    assert all("--hash=sha256:" in hashes for _, _, hashes in LOCKED)
    assert "://" not in text
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    pinned = {canonicalize_name(name): version for name, version in constraints.items()}
    assert {name: pinned.get(name) for name in VERSIONS} == VERSIONS


def test_torch_has_one_version_wherever_it_is_named() -> None:
    """What `make`, the image and the workflow install is what the constraints say."""
    files = ("constraints.txt", "Makefile", "Dockerfile", ".github/workflows/ci.yml")
    named = {file: set(re.findall(r"torch==([\d.]+)", (ROOT / file).read_text(encoding="utf-8"))) for file in files}
    assert len(named["constraints.txt"]) == 1
    assert all(versions == named["constraints.txt"] for versions in named.values()), named


def test_the_readme_that_goes_with_the_package_leads_to_no_file_of_the_repository() -> None:
    """PyPI shows the README's text under the same headings, without the figure and with links to the web only."""
    built = subprocess.run([sys.executable, "-m", "hatchling", "metadata"], cwd=ROOT, capture_output=True, check=True)
    shown = json.loads(built.stdout)["readme"]["text"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^#.*", shown, re.MULTILINE) == re.findall(r"^#.*", readme, re.MULTILINE)
    assert [link for link in re.findall(r"\]\((.*?)\)", readme) if not link.startswith("https:")]
    assert [link for link in re.findall(r"\]\((.*?)\)", shown) if not link.startswith("https:")] == []
    assert "![" not in shown
