"""Advantages of a group have, over all groups that a policy can draw, the gradient of their objective."""

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.group_advantages import advantages
from infalign.method.procedures import BestOfN, WorstOfN
from infalign.training.solvers.maxk import WinOverServed

POLICY, SIZE = np.array([0.3, 0.1, 0.4, 0.2]), 4
CHECKED, GRADED = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.5, 1.0, 0.0, 0.5])  # responses of equal reward tie


def of_the_extreme(k: int, sign: float) -> Callable[[Array, Array], float]:
    """Return E[max of k draws], or of the minimum with sign −1, as a function of policy and rewards."""

    def value(policy: Array, rewards: Array) -> float:
        sets = product(range(len(policy)), repeat=k)
        return sum(policy[list(one)].prod() * sign * (sign * rewards[list(one)]).max() for one in sets)

    return value


def maximum_likelihood(policy: Array, rewards: Array) -> float:
    """Return log of the pass rate, its series cut off after SIZE − 1 terms."""
    p = float(policy @ rewards)
    return -sum((1 - p) ** j / j for j in range(1, SIZE))


@pytest.mark.parametrize("rewards", [CHECKED, GRADED])
@pytest.mark.parametrize(
    ("objective", "value"),
    [
        ("rloo", of_the_extreme(1, 1.0)),
        ("pass@2", of_the_extreme(2, 1.0)),
        ("best-of-3", of_the_extreme(3, 1.0)),
        ("pass@4", of_the_extreme(4, 1.0)),
        ("pass^3", of_the_extreme(3, -1.0)),
        ("worst-of-2", of_the_extreme(2, -1.0)),
        ("maxrl", maximum_likelihood),
    ],
)
def test_the_gradient_is_that_of_the_objective(objective: str, value: Any, rewards: Array) -> None:
    """In the logits, by enumeration of all groups; of maxrl for rewards 0 and 1."""
    if objective == "maxrl" and rewards is GRADED:
        return

    def at(logits: Array) -> float:
        weights = np.exp(logits)
        return value(weights / weights.sum(), rewards)

    logits = np.log(POLICY)
    exact = np.array([(at(logits + step) - at(logits - step)) / 2e-5 for step in 1e-5 * np.eye(4)])
    found = np.zeros(4)
    for group in map(list, product(range(4), repeat=SIZE)):
        shares = advantages(rewards[group], [0] * SIZE, objective)
        found += POLICY[group].prod() * (shares[:, None] * (np.eye(4)[group] - POLICY)).mean(axis=0)
    assert found == pytest.approx(exact, abs=1e-8)


def test_groups_may_be_mixed_and_of_any_size() -> None:
    """Each group has what it has alone, in the order of the responses, as an array or a tensor."""
    rewards, groups = np.array([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]), np.array([3, 8, 3, 3, 8, 8, 8])
    for objective in ("pass@2", "rloo", "maxrl", "grpo"):
        found = advantages(rewards, groups, objective)
        for group in (3, 8):
            here = groups == group
            assert found[here] == pytest.approx(advantages(rewards[here], groups[here], objective))
        assert advantages(torch.tensor(rewards), torch.tensor(groups), objective).tolist() == pytest.approx(found)


def test_grpo_is_trls() -> None:
    """Mean and standard deviation of the sample, and its epsilon; a group without difference has no advantage."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert advantages(rewards.numpy(), np.zeros(5), "grpo") == pytest.approx(expected.numpy(), abs=1e-6)
    assert not advantages([1.0] * 4, [0] * 4, "grpo").any()


def test_what_cannot_be_computed_is_refused() -> None:
    """An unknown objective, too few responses, other shapes, NaN, and negative rewards of maxrl."""
    with pytest.raises(ConfigError, match="unknown objective 'pass8'; known: pass@K"):
        advantages([0.0, 1.0], [0, 0], "pass8")
    with pytest.raises(DataError, match="pass@3 needs at least 3 responses per group; one group has 2"):
        advantages([0.0, 1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1, 1], "pass@3")
    for rewards in ([0.0], [np.nan, 1.0]):
        with pytest.raises(DataError, match="one finite reward and one group per response"):
            advantages(rewards, [0, 0], "rloo")
    with pytest.raises(DataError, match="non-negative"):
        advantages([-1.0, 1.0], [0, 0], "maxrl")


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32])
def test_what_is_not_floating_has_floating_advantages(kind: torch.dtype) -> None:
    """Of the default type; arrays and lists have float64, and gradients of rewards do not matter."""
    rewards, groups = torch.tensor([0, 0, 1, 1, 0], dtype=kind).requires_grad_(kind.is_floating_point), torch.zeros(5)
    for objective, right in (("rloo", [-0.5, -0.5, 0.75, 0.75, -0.5]), ("pass@3", [0.0, 0.0, 1.5, 1.5, 0.0])):
        found = advantages(rewards, groups, objective)
        assert found.dtype == (kind if kind.is_floating_point else torch.float32)
        assert found.tolist() == pytest.approx(right)
        for other in (rewards.tolist(), [bool(r) for r in rewards.tolist()], np.array([0, 0, 1, 1, 0], np.uint8)):
            assert advantages(other, groups, objective).tolist() == pytest.approx(right)


def test_large_groups_have_finite_advantages() -> None:
    """pass@2048 of 4,096, of which one is right, against its probability to be drawn; pass@100,000 of 100,001."""
    one = np.eye(1, 4096)[0]
    assert advantages(one, [0] * 4096, "pass@2048") == pytest.approx(4096 * 0.5 * one, rel=1e-10)
    most = advantages(np.eye(1, 100_001)[0], [0] * 100_001, "pass@100000")
    assert most[0] == pytest.approx(100_000, rel=1e-9)


@pytest.mark.parametrize("procedure", [BestOfN(1), BestOfN(3), WorstOfN(2)])
def test_the_win_rate_over_what_is_served_is_the_mean_over_all_sets_of_references(procedure: Any) -> None:
    """It is counted over every set of N references, ties one half, and is u^N in the limit; N of fewer is refused."""
    references = np.array([0.0, 1.0, 1.0, 2.0, 5.0])
    extreme = max if isinstance(procedure, BestOfN) else min
    for reward in (-1.0, 1.0, 1.5, 9.0):
        served = np.array([extreme(chosen) for chosen in combinations(references, procedure.n)])
        counted = np.mean((reward > served) + 0.5 * (reward == served))
        assert WinOverServed(procedure)(reward, references) == pytest.approx(counted)
    exact = 0.3**procedure.n if isinstance(procedure, BestOfN) else 1 - 0.7**procedure.n
    assert WinOverServed(procedure)(5999.5, np.arange(20000.0)) == pytest.approx(exact, abs=2e-4)
    with pytest.raises(DataError):
        WinOverServed(procedure)(0.0, references[: procedure.n - 1])
