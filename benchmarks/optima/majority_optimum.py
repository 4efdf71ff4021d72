"""The optimal policy for majority vote: one prompt with finitely many answers, each worth something.

InfAlign's Theorem 1 for a procedure that looks at answers: with V(π) = Σ_y T_π(y)·worth(y), the policy with the largest
V at its KL has log π/π_ref = R/β − log Z, R(y) = ∂V/∂π(y). pass@k needs no model of its own: selected by the truth, the
win rate of Best-of-k is (1 + pass@k − the reference's)/2, so `FiniteModel` with rewards 0 and 1 has its optimum.
"""

from typing import Any

import numpy as np
from finite_model import FiniteOptimum, best_at_kl, checked_responses
from numpy.typing import ArrayLike


def vote_gradient(policy: np.ndarray, worth: np.ndarray, procedure: Any) -> np.ndarray:
    """Return R(y) = ∂V/∂π(y), (Y,)."""
    n = (
        procedure.n
    )  # V is a polynomial of this degree in π(y): its values on a circle have its derivative as their mean
    circle = np.exp(2j * np.pi * np.arange(n + 1) / (n + 1))
    around = procedure.served(policy + circle[:, None, None] / (2 * n) * np.eye(policy.size)) @ worth
    return np.asarray((circle.conj() @ around).real * 2 * n / (n + 1))


def optimal_answers(reference: ArrayLike, worth: ArrayLike, procedure: Any, *, kl: float) -> FiniteOptimum:
    """Return the policy over answers with the largest V at ``kl`` nats that is found from a tilt to each answer.

    Each answer has a probability under the ``reference`` and is worth something, for example 1 if it is right. Raises
    DataError unless the probabilities are positive and sum to 1, and ConfigError for a budget out of reach.
    """
    reference, worth = checked_responses(reference, worth, "worth")
    return best_at_kl(
        reference,
        lambda policy: float(procedure.served(policy) @ worth),
        lambda policy: vote_gradient(policy, worth, procedure),
        np.eye(reference.size),
        kl,
    )
