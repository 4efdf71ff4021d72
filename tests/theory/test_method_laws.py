"""The laws that methods would learn: none beats the optimum at its KL, and each is what its formula says."""

from dataclasses import replace
from typing import Any

import enumerable
import numpy as np
import pytest
from enumerable import Enumerable, kl, win_rate
from method_laws import BUDGETS, METHODS, OPTIMA

from infalign.method.procedures import BestOfN, WorstOfN
from infalign.method.shapings import LSC, PAR, RawPerPrompt


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
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
def test_the_optimum_has_the_gradient_of_its_objective(procedure: Any, beta: float, case: Enumerable) -> None:
    """Where W − β·KL is largest, log π/π_ref is the gradient of W over β, plus a constant."""
    for model, law in zip(case.finite(), enumerable.optimum(case, procedure, beta), strict=True):
        log_z = np.log(model.reference) + model.gradient(np.exp(law), procedure) / beta - law
        assert np.ptp(log_z) < 1e-7


def test_shapings_are_the_library_s(case: Enumerable) -> None:
    """Over equally probable responses, the exact shapings are the library's with the responses as references."""
    tokens, rewards = [[y] for y in range(21)], np.random.default_rng(0).normal(size=(1, 21))
    even = replace(case, responses=tokens, log_reference=np.full((1, 21), -np.log(21)), rewards=rewards)
    references = np.sort(rewards[0])
    for exact, shaping in (
        (enumerable.standardized, RawPerPrompt()),
        (enumerable.preference, PAR()),
        (enumerable.log_sigmoid, LSC(0.85)),
    ):
        assert exact(even)[0] == pytest.approx(shaping(even.rewards[0], references))
