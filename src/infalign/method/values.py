"""What a response is worth on its way: V_t = log E[e^T | its first t tokens], with T = log π*/π_ref of the whole.

π*(y_t | y_<t) / π_ref(y_t | y_<t) = e^{V_t − V_{t−1}}, and V_0 = 0, V = T at the end: the differences are what each
token adds to T. V_t is known as well as the rank can be read from t tokens, all of them too (docs/theory.md, what each
token is worth).
"""

import numpy as np
from scipy.special import ndtr

from infalign.method.calibration import Array

POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def log_values(read_L: Array, rho_L: Array, targets_K: Array) -> Array:
    """Return V = log E[e^T | reading], shape (L,), in nats.

    A reading is standard normal, and its correlation with the normal score of the rank is ``rho_L``; both are taken to
    be jointly normal. ``targets_K`` are the T of the K rollouts of the prompt, in any order: T by rank is their
    quantile function, linear between mid-ranks.
    """
    ranks = ndtr(rho_L[:, None] * read_L[:, None] + np.sqrt(1.0 - rho_L[:, None] ** 2) * POINTS)
    middle = (np.arange(targets_K.size) + 0.5) / targets_K.size
    found: Array = np.log(np.exp(np.interp(ranks, middle, np.sort(targets_K))) @ WEIGHTS)
    return found


def token_targets(read_L: Array, rho_L: Array, targets_K: Array) -> Array:
    """Return what each of L tokens adds to V, shape (L,).

    The end is read like all before it: what its states do not tell of T is no token's doing, and as a target of the
    last one it would be noise.
    """
    return np.diff(log_values(read_L, rho_L, targets_K), prepend=0.0)
