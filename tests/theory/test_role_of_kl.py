"""Why the policy's own KL is regularised and not that of what is served (docs/theory.md, role of the KL).

The setting is log-linear: π_θ(y|x) = exp(θ·φ(x, y) − A_x(θ)). SFT on data p minimises L(θ) = −E_p log π_θ =
E_x A_x(θ) − θ·E_p φ, so its minimiser, the reference policy π_ref, has the moments of the data: E_π_ref φ = E_p φ. This
makes, for every θ and whether or not p is itself log-linear,

    L(θ) − L(θ_ref) = E_x KL(π_ref ‖ π_θ)    (the Pythagorean identity),

and so, for every reward and β, the regularised reward optimisation min KL(π_ref‖π_θ) − E_π_θ r/β and the multi-task
objective min L(θ) − E_π_θ r/β differ by a constant: they have the same minimiser. With the KL of RLHF, KL(π_θ‖π_ref),
the Hessian at θ_ref is the same, E_x Cov φ, so the minimisers agree to first order in 1/β and differ in second.
Regularising what is served, KL(T(π_ref)‖T(π_θ)) or its reverse, has another Hessian: its minimiser leaves θ_ref in
another direction, which no choice of β makes up for.
"""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp, xlogy

from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, RankProcedure, WorstOfN

PROMPTS, RESPONSES, FEATURES = 3, 7, 4
RNG = np.random.default_rng(5)
PHI = RNG.normal(size=(PROMPTS, RESPONSES, FEATURES))
REWARD = np.sort(RNG.normal(size=(PROMPTS, RESPONSES)), axis=1)  # ascending, so that a CDF is a running sum
DATA = RNG.dirichlet(np.ones(RESPONSES), size=PROMPTS)  # of SFT; no θ has it


def log_policy(theta: Array) -> Array:
    """Return log π_θ, shape (PROMPTS, RESPONSES)."""
    logits = PHI @ theta
    log_pi: Array = logits - logsumexp(logits, axis=1, keepdims=True)
    return log_pi


def kl(p: Array, q: Array) -> float:
    """Return E_x KL(p‖q)."""
    return float((xlogy(p, p) - xlogy(p, q)).sum(axis=1).mean())


def sft(theta: Array) -> float:
    """Return the SFT loss −E_p log π_θ."""
    return -float((DATA * log_policy(theta)).sum(axis=1).mean())


def reward(theta: Array) -> float:
    """Return E_π_θ r."""
    return float((np.exp(log_policy(theta)) * REWARD).sum(axis=1).mean())


def served(theta: Array, procedure: RankProcedure) -> Array:
    """Return T(π_θ)."""
    cdf = np.cumsum(np.exp(log_policy(theta)), axis=1)
    edges = np.clip(np.concatenate([np.zeros((PROMPTS, 1)), cdf], axis=1), 0.0, 1.0)
    return np.diff(procedure.distortion(edges), axis=1)


def minimiser(loss: Callable[[Array], float], start: Array) -> Array:
    """Return the θ near ``start`` that minimises ``loss``, with a gradient by central differences."""

    def gradient(theta: Array) -> Array:
        steps = 1e-5 * np.eye(FEATURES)
        return np.array([loss(theta + step) - loss(theta - step) for step in steps]) / 2e-5

    found = minimize(loss, start, jac=gradient, method="BFGS", options={"gtol": 1e-9, "xrtol": 1e-13})
    for _ in range(3):  # Newton's last digits
        hessian = np.array([gradient(found.x + s) - gradient(found.x - s) for s in 1e-4 * np.eye(FEATURES)]) / 2e-4
        found.x = found.x - np.linalg.solve(hessian, gradient(found.x))
    return np.asarray(found.x)


REFERENCE = minimiser(sft, np.zeros(FEATURES))
PI_REF = np.exp(log_policy(REFERENCE))


def test_the_sft_loss_is_the_kl_to_the_reference_up_to_a_constant() -> None:
    """L(θ) − L(θ_ref) = KL(π_ref‖π_θ) for every θ, although the data are not log-linear."""
    assert kl(DATA, PI_REF) > 0.1
    for theta in np.random.default_rng(0).normal(scale=2.0, size=(50, FEATURES)):
        assert sft(theta) - sft(REFERENCE) == pytest.approx(kl(PI_REF, np.exp(log_policy(theta))), abs=1e-8)


@pytest.mark.parametrize("beta", [0.3, 1.0, 10.0])
def test_regularising_the_policy_is_multi_tasking(beta: float) -> None:
    """Reward optimisation regularised by KL(π_ref‖π_θ) and multi-tasking SFT + reward have the same minimiser."""
    multi_task = minimiser(lambda theta: sft(theta) - reward(theta) / beta, REFERENCE)
    regularised = minimiser(lambda theta: kl(PI_REF, np.exp(log_policy(theta))) - reward(theta) / beta, REFERENCE)
    assert np.linalg.norm(multi_task - REFERENCE) > 0.05 / beta
    assert regularised == pytest.approx(multi_task, abs=1e-6)


def test_the_kl_of_rlhf_agrees_to_first_order() -> None:
    """With KL(π_θ‖π_ref) the minimiser differs from multi-tasking by O(1/β²), a quarter whenever β doubles."""
    moves, gaps = [], []
    for beta in (20.0, 40.0, 80.0):
        multi_task = minimiser(lambda theta, beta=beta: sft(theta) - reward(theta) / beta, REFERENCE)
        rlhf = minimiser(
            lambda theta, beta=beta: kl(np.exp(log_policy(theta)), PI_REF) - reward(theta) / beta, REFERENCE
        )
        moves.append(float(np.linalg.norm(multi_task - REFERENCE)))
        gaps.append(float(np.linalg.norm(multi_task - rlhf)))
    assert moves[0] / moves[1] == pytest.approx(2.0, rel=0.1)
    assert [gaps[0] / gaps[1], gaps[1] / gaps[2]] == pytest.approx([4.0, 4.0], rel=0.1)
    assert gaps[2] < 0.05 * moves[2]


@pytest.mark.parametrize("procedure", [BestOfN(4), WorstOfN(4)])
@pytest.mark.parametrize("reverse", [False, True])
def test_regularising_what_is_served_is_something_else(procedure: RankProcedure, reverse: bool) -> None:
    """With the KL between T(π_θ) and T(π_ref) the minimiser leaves the reference in another direction, at every β."""
    served_ref = served(REFERENCE, procedure)

    def spent(theta: Array) -> float:
        now = served(theta, procedure)
        return kl(now, served_ref) if reverse else kl(served_ref, now)

    for beta in (20.0, 80.0):
        multi_task = minimiser(lambda theta, beta=beta: sft(theta) - reward(theta) / beta, REFERENCE) - REFERENCE
        other = minimiser(lambda theta, beta=beta: spent(theta) - reward(theta) / beta, REFERENCE) - REFERENCE
        cosine = multi_task @ other / np.linalg.norm(multi_task) / np.linalg.norm(other)
        assert cosine < 0.99
        assert np.linalg.norm(other - multi_task) > 0.2 * np.linalg.norm(multi_task)
