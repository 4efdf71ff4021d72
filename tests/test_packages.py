"""What `make env` installs is locked: every package of the project at one version, each file with its hash."""

import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKED = re.findall(r"^(\S+)==(\S+)((?:.*\\\n.*)+)", (ROOT / "lock.txt").read_text(encoding="utf-8"), re.MULTILINE)
VERSIONS = {canonicalize_name(name): version for name, version, _ in LOCKED}


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
