"""Order-statistic credit, against enumeration."""

from itertools import combinations, product

import numpy as np
import pytest
from finite_model import FiniteModel

from infalign.core.errors import DataError
from infalign.method.calibration import Array
from infalign.method.group_advantages import credit, served_win_rate
from infalign.method.procedures import BestOfN, WorstOfN

PROCEDURES = [BestOfN(1), BestOfN(2), BestOfN(3), WorstOfN(2), WorstOfN(3)]


@pytest.mark.parametrize("procedure", PROCEDURES[1:])
@pytest.mark.parametrize("ties", [False, True])
def test_credit_is_the_mean_over_all_sets_of_what_a_response_adds(procedure: BestOfN | WorstOfN, ties: bool) -> None:
    """Each response's credit equals the enumeration of all sets that hold it, with and without ties."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, (5, 6)).astype(float) if ties else rng.normal(size=(5, 6))
    extreme = max if isinstance(procedure, BestOfN) else min
    sets = list(combinations(range(6), procedure.n))
    for row, found in zip(values, credit(values, procedure), strict=True):
        added = np.zeros(6)
        for chosen in sets:
            for i in chosen:
                added[i] += extreme(row[list(chosen)]) - extreme(row[[j for j in chosen if j != i]])
        assert found == pytest.approx(6 * added / len(sets))


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_the_gradient_is_that_of_the_win_rate(procedure: BestOfN | WorstOfN) -> None:
    """Averaged over all groups that a policy can draw, credit times score is the exact gradient in the logits."""
    reference, policy = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.3, 0.1, 0.4, 0.2])
    model = FiniteModel(reference, np.array([2.0, 0.0, 3.0, 1.0]))

    def win_rate(logits: Array) -> float:
        weights = np.exp(logits)
        return model.win_rate(weights / weights.sum(), procedure)

    exact = np.array(
        [(win_rate(np.log(policy) + step) - win_rate(np.log(policy) - step)) / 2e-5 for step in 1e-5 * np.eye(4)]
    )
    values = np.array([model.win_rate(point, type(procedure)(1), procedure) for point in np.eye(4)])
    size, gradient = 3, np.zeros(4)
    for group in product(range(4), repeat=size):
        shares = credit(values[list(group)][None], procedure)[0]
        scores = np.eye(4)[list(group)] - policy
        gradient += policy[list(group)].prod() * (shares[:, None] * scores).mean(0)
    assert gradient == pytest.approx(exact, abs=1e-8)


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_the_win_rate_over_what_is_served_is_the_mean_over_all_sets_of_references(
    procedure: BestOfN | WorstOfN,
) -> None:
    """It is counted over every set of N references, ties one half, and is u^N in the limit."""
    references = np.array([0.0, 1.0, 1.0, 2.0, 5.0])
    extreme = max if isinstance(procedure, BestOfN) else min
    for reward in (-1.0, 1.0, 1.5, 9.0):
        served = np.array([extreme(chosen) for chosen in combinations(references, procedure.n)])
        counted = np.mean((reward > served) + 0.5 * (reward == served))
        assert served_win_rate(reward, references, procedure) == pytest.approx(counted)
    many = np.arange(20000.0)
    exact = 0.3**procedure.n if isinstance(procedure, BestOfN) else 1 - 0.7**procedure.n
    assert served_win_rate(5999.5, many, procedure) == pytest.approx(exact, abs=2e-4)


def test_too_few_references_are_refused() -> None:
    """Best-of-4 of three references does not exist."""
    with pytest.raises(DataError):
        served_win_rate(0.0, np.arange(3.0), BestOfN(4))
