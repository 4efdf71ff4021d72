"""Advantages for the best of k responses: pass@k of rewards of 0 and 1 (Walder and Karkhanis, arXiv:2505.15201)."""

from collections.abc import Sequence
from math import comb
from typing import Any

import torch


def pass_at_k(rewards: torch.Tensor, k: int) -> torch.Tensor:
    """Return the advantages of one group of n responses: n × the mean, over all sets of k of them, of what each adds.

    What it adds to a set is the maximum's fall without it. In the mean over a group, advantage × ∇ log π is an unbiased
    estimate of the gradient of E[max of k]. They are not to be centered or divided by their deviation.
    """
    n = len(rewards)
    if not 2 <= k <= n:
        raise ValueError(f"pass@{k} needs 2 <= k <= responses per prompt; one prompt has {n}")
    values, order = rewards.double().sort()
    # Below a given maximum, value j is the second largest in comb(j, k - 2) of the comb(n, k) sets.
    seconds = torch.tensor([comb(j, k - 2) / comb(n, k) for j in range(n)]).to(values)
    below = seconds * values
    gains = (seconds.cumsum(0) - seconds) * values - (below.cumsum(0) - below)
    return torch.empty_like(values).scatter(0, order, n * gains).to(rewards.dtype)


def pass_at_k_of_batch(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, both (batch, length); ``index`` names the prompt of each row, or is padding."""
    scores = token_level_rewards.sum(dim=-1)
    advantages = torch.zeros_like(scores)
    for prompt in {name for name in map(str, index) if not name.startswith("pad")}:
        rows = [row for row, name in enumerate(index) if str(name) == prompt]
        advantages[rows] = pass_at_k(scores[rows], k)
    per_token = advantages[:, None] * response_mask
    return per_token, per_token
