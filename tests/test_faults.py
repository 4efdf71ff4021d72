"""Faults that are injected into a real run: all of them by `make test-faults`, those that take a moment as tests."""

from pathlib import Path

import pytest
from faults.lab import KILLED, Lab, Seen
from faults.registry import Fault, faults, page

TABLE = Path(__file__).parents[1] / "docs" / "faults.md"
INSTANCES = [
    pytest.param(kind, name, id=f"{kind.what}: {name}", marks=() if name in kind.brief else pytest.mark.fault)
    for kind in faults()
    for name in kind.instances
]


@pytest.mark.parametrize(("kind", "name"), INSTANCES)
def test_a_fault_costs_nothing(kind: Fault, name: str, finished: Path, tmp_path: Path) -> None:
    """What the fault's function checks holds, the exit code is the table's, and whoever must act is told."""
    seen = kind.instances[name](Lab(tmp_path, finished)) or Seen(0)
    assert seen.code == kind.code, seen
    assert seen.said or kind.code in (0, KILLED)


def test_the_table_is_that_of_the_faults() -> None:
    """docs/faults.md has a row for each of at least sixty kinds, of 25 words at most, and no others."""
    assert TABLE.read_text(encoding="utf-8") == page()
    assert len({kind.what for kind in faults()}) == len(faults()) >= 60
    assert [kind.row for kind in faults() if len(f"{kind.what} {kind.seen}".split()) > 25] == []
