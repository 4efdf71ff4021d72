"""The offline solvers, each against the exact optimum of its method on the language model of enumerable.py.

``python benchmarks/optima/offline_solvers.py [METHOD …]`` trains all of them, or those that are named, and prints how
far each lands from its optimum, and its KL and win rates beside the optimum's. Some four minutes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import enumerable
import numpy as np
from enumerable import Enumerable

from infalign.method.calibration import Array
from infalign.method.laws import Law, best_of
from infalign.method.transforms import Exponential, Identity
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.models.settings import Fit
from infalign.theory.aims import tilted
from infalign.theory.law import law_at_kl
from infalign.training.objectives import Objective
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.solvers.pairs import bonbon, ipo
from infalign.training.solvers.qrpo import qrpo, squared
from infalign.training.solvers.resample import weighted_likelihood

TAU = 0.3
EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
K = 512


@dataclass(frozen=True)
class Method:
    """What a solver learns of which law, how it is trained, its population optimum and how near it gets, in nats."""

    objective: Objective
    law: Callable[[Array], Law]  # of rewards (P, K)
    fit: Fit
    optimum: Callable[[Enumerable], Array]
    within: float = 0.01
    guided: bool = False  # a guide beside the reference is trained, not the reference itself


def fit(epochs: float, batch_size: int) -> Fit:
    """Return how these models are trained."""
    return Fit(epochs=epochs, batch_size=batch_size, learning_rate=3e-3)


def identity(case: Enumerable) -> Array:
    """Return the population optimum of the identity."""
    return enumerable.tilted(case, Identity(), TAU)


def steep(case: Enumerable) -> Array:
    """Return the population optimum of exp:10."""
    return enumerable.tilted(case, EXP10, BETA10)


by_rank = partial(tilted, shaping="identity", beta=TAU)
by_exp10 = partial(tilted, shaping=EXP10, beta=BETA10 / EXP10.scale)
best_of_4 = partial(best_of, n=4)
METHODS = {
    "qrpo": Method(qrpo(), by_rank, fit(6, 256), identity),
    "qrpo squared": Method(qrpo(squared), by_rank, fit(6, 256), identity),
    "qrpo guided": Method(qrpo(), by_rank, fit(6, 256), identity, guided=True),
    "ipo": Method(ipo(TAU), by_rank, fit(10, 128), identity),
    "qrpo exp:10": Method(qrpo(), by_exp10, fit(12, 256), steep),
    "qrpo squared exp:10": Method(qrpo(squared), by_exp10, fit(12, 256), steep),
    "resample exp:10": Method(weighted_likelihood(), by_exp10, fit(12, 256), steep),
    "bon-sft n=4": Method(weighted_likelihood(), best_of_4, fit(16, 256), lambda case: enumerable.best_of_n(case, 4)),
    "bonbon n=4": Method(bonbon(4), best_of_4, fit(40, 256), lambda case: enumerable.best_worst_optimum(case, 4)),
}


def trained(case: Enumerable, method: Method, folder: Path) -> Array:
    """Train from the reference and return the exact law of the policy that is saved."""
    model, tokenizer = load_policy(case.folder)
    model = add_network_guide(str(case.folder), model, tokenizer) if method.guided else model
    loss, rollouts = RolloutRegression(method.objective), case.rollouts(K)
    law = method.law(np.array([row["reward"] for row in rollouts]).reshape(-1, K))
    fit_to_rollouts(loss, model, rollouts, law, method.fit, enumerable.job_in(folder)).save(tokenizer)
    return case.laws(load_policy(folder / "policy")[0])


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
