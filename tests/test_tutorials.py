"""The tutorials: their code runs, and prints what is stored in them."""

import json
import re
from pathlib import Path
from typing import Any

import notebooks
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a tutorial in a folder of its own: its names, what each cell prints, and what is stored."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> Any:
        notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        return *notebooks.run(notebook), [notebooks.stored(cell) for cell in notebooks.code_cells(notebook)]

    return run


def test_a_procedure_of_ones_own_prints_what_is_stored(ran: Any) -> None:
    """Every cell prints again what it printed, and the estimate has the exact win rate in its interval."""
    names, printed, stored = ran("my_procedure.ipynb")
    assert printed == stored
    assert names["found"].low < names["law"].win_rate(names["mine"]) < names["found"].high


def test_a_reward_of_ones_own_trains_a_policy_that_wins(ran: Any) -> None:
    """The cells print what is stored but for the digits of a training, and the policy beats its reference."""
    names, printed, stored = ran("my_reward_in_trl.ipynb")
    assert [re.sub(r"\d", "0", text) for text in printed] == [re.sub(r"\d", "0", text) for text in stored]
    assert names["procedure"].name == "best-of-4"
    assert names["wins"].low > 0.5
