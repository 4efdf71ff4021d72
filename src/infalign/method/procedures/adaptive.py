"""Adaptive N: draw on as long as another draw is worth its price."""

import re

import numpy as np

from infalign.core.errors import ConfigError
from infalign.method.procedures.rewind import RewindAndRepeat

SPELLINGS = ("adaptive:PRICE:N",)
DEAREST = 0.5  # win rates that a second draw gains at most


def adaptive(price: float, n: int) -> RewindAndRepeat:
    """Return the rule that draws on while another draw of the base gains more than its ``price``, ``n`` times at most.

    Over a best so far of rank q another draw gains ∫_q^1 (u − q) du = (1 − q)²/2 of the win rate against one plain
    draw, so it stops at q = 1 − √(2·price) and serves the best. Of all rules that may serve any earlier draw this one
    is best (Weitzman 1979); `infalign.theory.adaptive` has the thresholds for aligned policies and other opponents.
    """
    if not 0.0 < price < DEAREST:
        raise ConfigError(
            f"a price of a draw is between 0 and {DEAREST} win rates, what a second draw can gain; found {price:g}"
        )
    return RewindAndRepeat(float(f"{1.0 - np.sqrt(2.0 * price):.15g}"), n, "best")


def parse(name: str) -> RewindAndRepeat | None:
    """Return the procedure that ``name`` spells, None if it is of another family."""
    match = re.fullmatch(r"adaptive:([-+.e\d]+):(\d+)", name)
    return adaptive(float(match[1]), int(match[2])) if match else None
