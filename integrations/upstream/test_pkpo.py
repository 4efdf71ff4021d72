"""What a trainer's own suite would run beside `pkpo.py`."""

from itertools import combinations

import pytest
import torch
from pkpo import pass_at_k, pass_at_k_of_batch


@pytest.mark.parametrize("rewards", [[0.0, 0, 1, 0, 1], [0.25, -1, 3, 0.5, 0.5, 2], [0.0] * 4, [1.0] * 4])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_an_advantage_is_what_a_response_adds_to_the_sets_of_k(rewards: list[float], k: int) -> None:
    """Counted set by set: the maximum, less that of the others."""
    sets = list(combinations(range(len(rewards)), k))
    added = [0.0] * len(rewards)
    for chosen in sets:
        for i in chosen:
            added[i] += max(rewards[j] for j in chosen) - max(rewards[j] for j in chosen if j != i)
    expected = [len(rewards) * total / len(sets) for total in added]
    assert pass_at_k(torch.tensor(rewards), k).tolist() == pytest.approx(expected, abs=1e-6)


def test_groups_are_by_prompt_and_padding_has_no_advantage() -> None:
    """Rewards lie at the last token, advantages at all tokens of a response."""
    rewards = torch.tensor([[0.0, 1], [0, 0], [0, 0], [1, 0], [0, 1]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [1, 1]])
    found, _ = pass_at_k_of_batch(rewards, mask, ["a", "b", "a", "b", "pad0"], 2)
    assert found.tolist() == [[2, 2], [0, 0], [0, 0], [2, 0], [0, 0]]


@pytest.mark.parametrize("k", [1, 4])
def test_a_group_that_is_too_small_is_an_error(k: int) -> None:
    """So is k = 1, for which no response is left to compare with."""
    with pytest.raises(ValueError, match=f"pass@{k} needs 2 <= k <= responses per prompt; one prompt has 3"):
        pass_at_k(torch.zeros(3), k)
