"""The optimal policy for majority vote: one prompt with finitely many answers, each worth something.

InfAlign's Theorem 1 for a procedure that looks at answers: with V(π) = Σ_y T_π(y)·value(y), the policy that maximises
V − β·KL has log π/π_ref = R/β − log Z, R(y) = ∂V/∂π(y). pass@k needs no model of its own: selected by the truth, the
win rate of Best-of-k is (1 + pass@k − the reference's)/2, so `FiniteModel` with rewards 0 and 1 has its optimum.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.procedures.majority import MajorityVote

STEP = 1e-30  # of the complex step, which has no cancellation: the gradient is exact to rounding
SETTLED = 1e-10  # of the gradient by the logs of the probabilities
TILT = 3.0  # of the starts that favour one answer each, in nats


@dataclass(frozen=True, slots=True)
class AnswerOptimum:
    """The best policy over answers; ``residual`` is the largest violation of its equation, in nats, times π."""

    policy: Array  # (Y,)
    beta: float
    kl: float  # nats
    value: float
    residual: float


@dataclass(frozen=True, eq=False)
class AnswerModel:
    """One prompt: the ``reference`` probability of each answer and what it is ``worth``, for example 1 if it is right.

    Raises DataError unless the probabilities are positive and sum to 1 and the worths are finite, both (Y,).
    """

    reference: Array
    worth: Array

    def __post_init__(self) -> None:
        reference, worth = np.array(self.reference, float), np.array(self.worth, float)
        if reference.ndim != 1 or reference.shape != worth.shape or not reference.size:
            raise DataError(f"an answer needs one probability and one worth, found {reference.shape}, {worth.shape}")
        if not ((reference > 0).all() and abs(reference.sum() - 1.0) < 1e-9 and np.isfinite(worth).all()):
            raise DataError("the probabilities of answers must be positive and sum to 1, and their worths finite")
        object.__setattr__(self, "reference", reference)
        object.__setattr__(self, "worth", worth)

    def value(self, policy: Array, procedure: MajorityVote) -> float:
        """Return V = Σ_y T_π(y)·worth(y)."""
        return float(procedure.served(policy) @ self.worth)

    def gradient(self, policy: Array, procedure: MajorityVote) -> Array:
        """Return R(y) = ∂V/∂π(y), (Y,)."""
        nudged = np.asarray(policy) + 1j * STEP * np.eye(self.reference.size)
        gradient: Array = (procedure.served(nudged) @ self.worth).imag / STEP
        return gradient

    def optimum(self, procedure: MajorityVote, *, beta: float) -> AnswerOptimum:
        """Return the policy with the largest V − ``beta``·KL that BFGS finds from the reference and from each answer.

        Raises ConfigError unless beta is positive and finite.
        """
        if not (beta > 0 and np.isfinite(beta)):
            raise ConfigError(f"the KL weight beta must be positive and finite, found {beta}")

        def loss(log_ratio: Array) -> tuple[float, Array]:
            log_ratio = self._normalised(log_ratio)
            policy = self.reference * np.exp(log_ratio)
            pull = self.gradient(policy, procedure) - beta * log_ratio
            return beta * float(policy @ log_ratio) - self.value(policy, procedure), policy * (policy @ pull - pull)

        starts = [np.zeros(self.reference.size), *(TILT * np.eye(self.reference.size))]
        found = [minimize(loss, start, jac=True, method="BFGS", options={"gtol": SETTLED}) for start in starts]
        log_ratio = self._normalised(min(found, key=lambda one: float(one.fun)).x)
        policy = self.reference * np.exp(log_ratio)
        misfit = log_ratio - self._normalised(self.gradient(policy, procedure) / beta)
        return AnswerOptimum(
            policy,
            beta,
            float(policy @ log_ratio),
            self.value(policy, procedure),
            float(np.max(policy * np.abs(misfit))),
        )

    def _normalised(self, log_ratio: Array) -> Array:
        return np.asarray(log_ratio - logsumexp(log_ratio, b=self.reference))
