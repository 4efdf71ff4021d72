"""Advantages for the best of k rollouts."""

import torch
import verifiers.v1 as vf
from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
from prime_rl.orchestrator.algo.routing import assign_advantages

from .pkpo import pass_at_k


class PassAtKAlgorithm(Algorithm):
    """pass@k of rewards of 0 and 1 (arXiv:2505.15201); rollouts of a group that failed are left out of it."""

    def __init__(self, config, policy_pool):
        super().__init__(config, policy_pool)
        self.k = config.k

    async def score_group(self, episodes: list[vf.Episode]) -> None:
        """Give every trace its advantage. Raises ValueError for a group of fewer than k."""
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        advantages = pass_at_k(torch.tensor([trace.reward for trace in traces]), self.k)
        for trace, advantage in zip(traces, advantages.tolist(), strict=True):
            assign_advantages(trace, advantage)
