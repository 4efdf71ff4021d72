"""The β that spends a KL: one root finder for laws over rollouts, over classes and of continuous ranks."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from infalign.core.errors import ConfigError

LOWEST_LOG_BETA = -690.0  # of values with range 1; quotients by a smaller β overflow
SMALLEST_KL = 1e-300  # so that it has a logarithm
XTOL = 1e-13
JUMP = 1e-9  # relative excess over the budget beyond which the KL jumps over it


def check_strength(kl: float | None, beta: float | None) -> None:
    """Raise ConfigError unless either a KL or a positive, finite β is given."""
    if (kl is None) == (beta is None):
        raise ConfigError("give exactly one of kl and beta")
    if beta is not None and not 0 < beta < np.inf:
        raise ConfigError(f"beta must be positive and finite, found {beta}")


class Root(NamedTuple):
    """A log β and the KL there; it spends the budget unless no β does: ``found`` is False at the end of the range."""

    log_beta: float
    kl: float
    found: bool


def find_log_beta(
    kl_at: Callable[[float], float],
    kl: float,
    *,
    start: float = 0.0,
    step: float = 1.0,
    within: tuple[float, float] = (LOWEST_LOG_BETA, np.inf),
) -> Root:
    """Return the log β at which ``kl_at``, which falls with it, is ``kl`` nats, by steps that double, then brentq.

    Where the KL jumps over the budget it is the largest below it.
    """

    @cache  # a function may refine its grid from call to call, and the sign must not change
    def excess(log_beta: float) -> float:
        return float(np.log(max(kl_at(log_beta), SMALLEST_KL) / kl))

    inside = outside = float(np.clip(start, *within))
    sign = float(np.sign(excess(inside)))
    while sign and np.sign(excess(outside)) == sign:
        if outside == within[sign > 0]:
            return Root(outside, kl_at(outside), False)
        inside, outside, step = outside, float(np.clip(outside + sign * step, *within)), 2.0 * step
    root = float(brentq(excess, inside, outside, xtol=XTOL, rtol=1e-14)) if sign else inside
    if excess(root) > JUMP:
        root += 10.0 * (XTOL + 1e-14 * abs(root))
    return Root(root, kl_at(root), True)
