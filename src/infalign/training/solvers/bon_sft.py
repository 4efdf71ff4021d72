"""Fine-tuning on the best of n rollouts."""

from typing import Literal

from infalign.method.procedures import BestOfN
from infalign.training.solvers.base import ToBestOfN
from infalign.training.solvers.offline import Objective, Offline, weighted_likelihood


def best_of_n_tuning(n: int) -> Objective:
    """Return the average over all sets of n among the K rollouts, whose optimum is Best-of-n; ties share their weight.

    Its weights raise DataError for fewer than n rollouts.
    """
    return weighted_likelihood(lambda rewards_K: BestOfN(n).weights(rewards_K[None])[0] * rewards_K.size)


class Settings(ToBestOfN, Offline):
    """Fine-tuning on the best of n."""

    solver: Literal["bon-sft"]

    def objective(self, beta: float) -> Objective:
        """Return its objective."""
        return best_of_n_tuning(self.n)
