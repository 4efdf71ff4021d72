"""The faults that take a moment, as part of the tests; `make test-faults` injects all of them."""

from pathlib import Path

import pytest
from faults.registry import Case, cases, inject
from faults.storage import KILLED

TABLE = Path(__file__).parents[1] / "docs" / "faults.md"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.fault) for case in cases() if case.brief])
def test_a_fault_costs_nothing(case: Case, finished: Path, tmp_path: Path) -> None:
    """What the case checks holds, the exit code is one that the command line documents, and nothing is lost."""
    seen = inject(case, tmp_path / "lab", finished)
    assert seen.code in (0, 1, 2, 3, 4, KILLED)
    assert seen.lost == "nothing"


def test_the_table_lists_every_fault() -> None:
    """At least forty different faults are injected, and the documentation has a row for each and no others."""
    faults = [case.fault for case in cases()]
    assert len(faults) == len(set(faults)) >= 40
    rows = [line.split(" | ")[0].removeprefix("| ") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    assert [row for row in rows if row in faults] == faults
    assert sum(line.startswith("| ") for line in TABLE.read_text(encoding="utf-8").splitlines()) == len(faults) + 2
