"""What a KL budget buys on stored rewards."""

import numpy as np
import pytest

from infalign.core.display import share
from infalign.evaluation.extrapolation import Counts
from infalign.evaluation.measures import pass_at_k
from infalign.evaluation.worth import budget_rows, measure_budgets, worth
from infalign.method.procedures import BestOfN

CHECKED = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], float)


def test_what_a_budget_buys() -> None:
    """Silent prompts, the most that can be spent, the weights, and the limits of policies that know the rates."""
    (found,) = measure_budgets(CHECKED, BestOfN(2), [0.1])
    assert (found.metric, found.silent, found.kl) == ("pass@2", 0.5, 0.1)
    shares = (CHECKED.sum(axis=1) + 0.5) / 5
    assert found.largest_kl == pytest.approx(-np.log(shares).mean())
    assert 3 < found.effective < 4
    assert found.worth == worth(Counts([0, 1, 2, 4], 4), "best-of-2", [0.1], known=True)[0]
    rows = budget_rows([found])
    assert [row[0] for row in rows] == ["0 (reference)", "0.1"]
    assert rows[0][1] == rows[0][2] == share(pass_at_k(CHECKED, 2).as_dict())
    assert measure_budgets(CHECKED, BestOfN(8), [0.1])[0].worth is None
