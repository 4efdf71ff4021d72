"""The offline solvers, each against the exact optimum of its method on the language model of enumerable.py.

``python benchmarks/optima/offline_solvers.py [METHOD …]`` trains all of them, or those that are named, and prints how
far each lands from its optimum, and its KL and win rates beside the optimum's. Some four minutes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import enumerable
from enumerable import Enumerable

from infalign.method.calibration import Array
from infalign.method.transforms import Exponential, Identity
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.models.settings import Fit
from infalign.theory.law import law_at_kl
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.solvers.offline import Objective
from infalign.training.solvers.pairs import bonbon, ipo
from infalign.training.solvers.qrpo import qrpo, squared
from infalign.training.solvers.resample import best_of_n_tuning, resampling

TAU = 0.3
EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
K = 512


@dataclass(frozen=True)
class Method:
    """What a solver learns, how it is trained, its population optimum and how near it gets, in nats."""

    objective: Objective
    fit: Fit
    optimum: Callable[[Enumerable], Array]
    within: float = 0.01
    guided: bool = False  # a guide beside the reference is trained, not the reference itself


def fit(epochs: float, batch_size: int) -> Fit:
    """Return how these models are trained."""
    return Fit(epochs=epochs, batch_size=batch_size, learning_rate=3e-3)


METHODS = {
    "qrpo": Method(qrpo(Identity(), TAU), fit(6, 256), lambda case: enumerable.tilted(case, Identity(), TAU)),
    "qrpo squared": Method(
        qrpo(Identity(), TAU, squared), fit(6, 256), lambda case: enumerable.tilted(case, Identity(), TAU)
    ),
    "qrpo guided": Method(
        qrpo(Identity(), TAU), fit(6, 256), lambda case: enumerable.tilted(case, Identity(), TAU), guided=True
    ),
    "ipo": Method(ipo(TAU), fit(10, 128), lambda case: enumerable.tilted(case, Identity(), TAU)),
    "qrpo exp:10": Method(qrpo(EXP10, BETA10), fit(12, 256), lambda case: enumerable.tilted(case, EXP10, BETA10)),
    "qrpo squared exp:10": Method(
        qrpo(EXP10, BETA10, squared), fit(12, 256), lambda case: enumerable.tilted(case, EXP10, BETA10)
    ),
    "resample exp:10": Method(
        resampling(EXP10, BETA10), fit(12, 256), lambda case: enumerable.tilted(case, EXP10, BETA10)
    ),
    "bon-sft n=4": Method(best_of_n_tuning(4), fit(16, 256), lambda case: enumerable.best_of_n(case, 4)),
    "bonbon n=4": Method(bonbon(4), fit(40, 256), lambda case: enumerable.best_worst_optimum(case, 4)),
}


def trained(case: Enumerable, method: Method, folder: Path) -> Array:
    """Train from the reference and return the exact law of the policy that is saved."""
    model, tokenizer = load_policy(case.folder)
    model = add_network_guide(str(case.folder), model, tokenizer) if method.guided else model
    loss = RolloutRegression(method.objective)
    fit_to_rollouts(loss, model, case.rollouts(K), method.fit, enumerable.job_in(folder)).save(tokenizer)
    return case.laws(load_policy(folder / "policy")[0])


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
