"""The tutorials: their code runs, and prints what is stored in them."""

import json
import re
from pathlib import Path
from typing import Any

import notebooks
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"


@pytest.fixture
def tutorial(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a tutorial in a folder of its own; return its names, what it prints and what is stored, a text a cell."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((FOLDER / request.param).read_text(encoding="utf-8"))
    names, printed = notebooks.run(notebook)
    return names, printed, [notebooks.stored(cell) for cell in notebooks.code_cells(notebook)]


@pytest.mark.parametrize("tutorial", ["my_procedure.ipynb"], indirect=True)
def test_a_procedure_of_ones_own_prints_what_is_stored(tutorial: Any) -> None:
    """Every cell prints again what it printed, and the estimate has the exact win rate in its interval."""
    names, printed, stored = tutorial
    assert printed == stored
    assert names["found"].low < names["law"].win_rate(names["mine"]) < names["found"].high


@pytest.mark.parametrize("tutorial", ["my_reward_in_trl.ipynb"], indirect=True)
def test_a_reward_of_ones_own_trains_a_policy_that_wins(tutorial: Any) -> None:
    """The cells print what is stored but for the digits of a training, and the policy beats its reference."""
    names, printed, stored = tutorial
    assert [re.sub(r"\d", "0", text) for text in printed] == [re.sub(r"\d", "0", text) for text in stored]
    assert names["procedure"].name == "best-of-4"
    assert names["wins"].low > 0.5
