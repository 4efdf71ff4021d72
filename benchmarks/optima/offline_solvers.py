"""The offline solvers, each against the exact optimum of its method on the language model of enumerable.py.

``python benchmarks/optima/offline_solvers.py [METHOD …]`` trains all of them, or those that are named, and prints how
far each lands from its optimum, and its KL and win rates beside the optimum's. Some four minutes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import enumerable
import numpy as np
from enumerable import Enumerable
from transformers import AutoModelForCausalLM, AutoTokenizer

from infalign import Exponential, Law, best_of, law_at_kl, parse_transform, tilted
from infalign.training.offline_trainer import (
    RolloutRegression,
    fit_to_rollouts,
)  # without the strength that `fit` picks
from infalign.training.solvers import read_solver  # whose losses are proved

TAU = 0.3
EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
K = 512


@dataclass(frozen=True)
class Method:
    """A solver and the law that it learns, how it is trained, its population optimum and how near it gets, in nats."""

    solver: dict[str, Any]  # as in a recipe
    law: Callable[[np.ndarray], Law]  # of rewards (P, K)
    fit: Any
    optimum: Callable[[Enumerable], np.ndarray]
    within: float = 0.01
    guided: bool = False  # a guide beside the reference is trained, not the reference itself


def fit(epochs: float, batch_size: int) -> Any:
    """Return how these models are trained."""
    return read_solver(beta=1.0, fit={"epochs": epochs, "batch_size": batch_size, "learning_rate": 3e-3}).fit


def identity(case: Enumerable) -> np.ndarray:
    """Return the population optimum of the identity."""
    return enumerable.tilted(case, parse_transform("identity"), TAU)


def steep(case: Enumerable) -> np.ndarray:
    """Return the population optimum of exp:10."""
    return enumerable.tilted(case, EXP10, BETA10)


by_rank = partial(tilted, shaping="identity", beta=TAU)
by_exp10 = partial(tilted, shaping=EXP10, beta=BETA10 / EXP10.scale)
best_of_4 = partial(best_of, n=4)
QRPO = {"solver": "qrpo", "transform": "exp:10", "beta": 1.0}  # the law says what is learned
BEST, BEST_AND_WORST = (partial(law, n=4) for law in (enumerable.best_of_n, enumerable.best_worst_optimum))
METHODS = {
    "qrpo": Method(QRPO, by_rank, fit(6, 256), identity),
    "qrpo squared": Method(QRPO | {"loss": "squared"}, by_rank, fit(6, 256), identity),
    "qrpo guided": Method(QRPO, by_rank, fit(6, 256), identity, guided=True),
    "ipo": Method({"solver": "ipo", "beta": TAU}, by_rank, fit(10, 128), identity),
    "qrpo exp:10": Method(QRPO, by_exp10, fit(12, 256), steep),
    "qrpo squared exp:10": Method(QRPO | {"loss": "squared"}, by_exp10, fit(12, 256), steep),
    "resample exp:10": Method(QRPO | {"solver": "resample"}, by_exp10, fit(12, 256), steep),
    "bon-sft n=4": Method({"solver": "bon-sft", "n": 4}, best_of_4, fit(16, 256), BEST),
    "bonbon n=4": Method({"solver": "bonbon", "n": 4}, best_of_4, fit(40, 256), BEST_AND_WORST),
}


def trained(case: Enumerable, method: Method, folder: Path) -> np.ndarray:
    """Train from the reference and return the exact law of the policy that is saved."""
    model, tokenizer = (kind.from_pretrained(case.folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    if method.guided:
        guide = read_solver(**method.solver, guide={"trunk": "reference"}).trained_guide
        model = guide.beside(model, tokenizer, {"reference": str(case.folder)})
    rollouts = case.rollouts(K)
    law = method.law(np.array([row["reward"] for row in rollouts]).reshape(-1, K))
    loss = RolloutRegression(read_solver(**method.solver).objective(law))
    fit_to_rollouts(loss, model, rollouts, law, method.fit, enumerable.job_in(folder)).save(tokenizer)
    return case.laws(AutoModelForCausalLM.from_pretrained(folder / "policy"))


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
