"""The offline solvers, each against the exact optimum of its method on the language model of enumerable.py.

``python benchmarks/optima/offline_solvers.py [METHOD …]`` calls `fit` for all of them, or those that are named, and
prints how far each lands from its optimum, and its KL and win rates beside the optimum's. Some four minutes.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import enumerable
import numpy as np
from enumerable import Enumerable

from infalign import BestOfN, Exponential, Law, best_of, fit, law_at_kl, optimum, parse_transform, tilted

TAU, FOUR = 0.3, BestOfN(4)
EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
K = 512


@dataclass(frozen=True)
class Method:
    """The settings of `fit` and the law that it gets, the population optimum and how near it ends to it, in nats."""

    settings: Mapping[str, Any]
    law: Callable[[np.ndarray], Law]  # of rewards (P, K)
    optimum: Callable[[Enumerable], np.ndarray]
    within: float = 0.01


def given(epochs: float, batch_size: int, solver: str = "qrpo", **settings: Any) -> Mapping[str, Any]:
    """Return settings of `fit`."""
    return {"epochs": epochs, "batch_size": batch_size, "learning_rate": 3e-3, "solver": solver, **settings}


def identity(case: Enumerable) -> np.ndarray:
    """Return the population optimum of the identity."""
    return enumerable.tilted(case, parse_transform("identity"), TAU)


def steep(case: Enumerable) -> np.ndarray:
    """Return the population optimum of exp:10."""
    return enumerable.tilted(case, EXP10, BETA10)


by_rank = partial(tilted, shaping="identity", beta=TAU)
by_exp10 = partial(tilted, shaping=EXP10, beta=BETA10 / EXP10.scale)
best_of_4 = partial(best_of, n=4)
served_by_4 = partial(optimum, procedure=FOUR, beta=0.1, objective="win-rate")
BEST, BEST_AND_WORST = (partial(law, n=4) for law in (enumerable.best_of_n, enumerable.best_worst_optimum))
SERVED_BY_4 = partial(enumerable.optimum, procedure=FOUR, beta=0.1)
METHODS = {
    "qrpo": Method(given(6, 256), by_rank, identity),
    "qrpo squared": Method(given(6, 256, loss="squared"), by_rank, identity),
    "qrpo guided": Method(given(6, 256, guide={"trunk": "reference"}), by_rank, identity),
    "ipo": Method(given(10, 128, "ipo"), by_rank, identity),
    "qrpo exp:10": Method(given(12, 256), by_exp10, steep),
    "qrpo squared exp:10": Method(given(12, 256, loss="squared"), by_exp10, steep),
    "resample exp:10": Method(given(12, 256, "resample"), by_exp10, steep),
    "snips best-of-4": Method(given(80, 3 * K, "snips"), served_by_4, SERVED_BY_4),
    "bon-sft n=4": Method(given(16, 256, "bon-sft", n=4), best_of_4, BEST),
    "bonbon n=4": Method(given(40, 256, "bonbon", n=4), best_of_4, BEST_AND_WORST),
}


def trained(case: Enumerable, method: Method) -> np.ndarray:
    """Return the exact law of what `fit` makes of the reference, which spends up to the KL of the optimum."""
    law = method.law(np.array([row["reward"] for row in case.rollouts(K)]).reshape(-1, K))
    law = replace(law, kl=enumerable.kl(method.optimum(case), case.log_reference))
    return case.laws(fit(str(case.folder), case.drawn(K), law, **method.settings).model)


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
