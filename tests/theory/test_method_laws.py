"""The laws that methods would learn: none beats the optimum at its KL, and each is what its formula says."""

from dataclasses import replace

import enumerable
import numpy as np
import pytest
from enumerable import Enumerable, kl, win_rate
from method_laws import BUDGETS, METHODS, OPTIMA

from infalign.method.procedures import BestOfN, WorstOfN
from infalign.method.shapings import LSC, PAR, RawPerPrompt


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Enumerable:
    """Make the reference."""
    return enumerable.enumerable(tmp_path_factory.mktemp("enumerable") / "reference")


def uniform(case: Enumerable, size: int) -> Enumerable:
    """Return a case of one prompt with equally probable responses: the continuous model as their number grows."""
    tokens, rewards = [[y] for y in range(size)], np.random.default_rng(0).normal(size=(1, size))
    return replace(case, responses=tokens, log_reference=np.full((1, size), -np.log(size)), rewards=rewards)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [pytest.param(b, marks=[pytest.mark.slow] if b != 1.0 else []) for b in BUDGETS])
@pytest.mark.parametrize("name", METHODS)
def test_no_method_beats_the_optimum(name: str, budget: float, case: Enumerable) -> None:
    """A method's law sums to 1, spends the budget, and wins at most as often as the optimum at that KL."""
    law = METHODS[name](case, budget)
    assert np.exp(law).sum(axis=1) == pytest.approx(1.0, abs=1e-12)
    assert kl(law, case.log_reference) == pytest.approx(budget, abs=1e-6)
    for procedure in (BestOfN(4), WorstOfN(4)):
        best = win_rate(case, OPTIMA[procedure.name](case, budget), procedure)
        assert win_rate(case, law, procedure) <= best + 1e-9


@pytest.mark.parametrize("procedure", [BestOfN(4), WorstOfN(4)], ids=lambda procedure: procedure.name)
@pytest.mark.parametrize("beta", [0.1, 0.01, 0.001])
def test_the_optimum_has_the_gradient_of_its_objective(
    procedure: BestOfN | WorstOfN, beta: float, case: Enumerable
) -> None:
    """Where W − β·KL is largest, log π/π_ref is the gradient of W over β, plus a constant."""
    for model, law in zip(case.finite(), enumerable.optimum(case, procedure, beta), strict=True):
        log_z = np.log(model.reference) + model.gradient(np.exp(law), procedure) / beta - law
        assert np.ptp(log_z) < 1e-7


def test_shapings_are_the_library_s(case: Enumerable) -> None:
    """Over equally probable responses, the exact shapings are the library's with the responses as references."""
    even = uniform(case, 21)
    references = np.sort(even.rewards[0])
    for exact, shaping in (
        (enumerable.standardized, RawPerPrompt()),
        (enumerable.preference, PAR()),
        (enumerable.log_sigmoid, LSC(0.85)),
    ):
        assert exact(even)[0] == pytest.approx(shaping(even.rewards[0], references))
