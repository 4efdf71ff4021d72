"""What each method would learn at the same KL if it could be any distribution, in exact arithmetic.

``python benchmarks/optima/method_laws.py`` prints the win rates of all methods, under Best-of-4 and Worst-of-4 at three
KL budgets, on the language model of enumerable.py. Some 15 seconds.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import enumerable
import numpy as np
import torch
from enumerable import Enumerable, at_kl, tilted_by, token_tilted, transformed
from scipy.stats import qmc

from infalign import BestOfN, Exponential, WorstOfN, parse_transform

BUDGETS = 0.5, 1.0, 2.0  # nats, the mean over prompts
GROUP = 8
OTHERS = qmc.Sobol(GROUP - 1, rng=0).random_base2(12)  # with others the win rates differ by some 10⁻⁴
Law = Callable[[Enumerable, float], np.ndarray]  # of a case and a budget


def tilt(values: Callable[[Enumerable], np.ndarray]) -> Law:
    """Return the tilt of the reference by values, with β for the budget."""
    return lambda case, budget: at_kl(case, partial(tilted_by, case, values(case)), budget)


def calibrated(transform: Any) -> Law:
    """Return what CTRL learns: the tilt by Φ(C)."""
    return tilt(partial(transformed, transform=transform))


def optimum(procedure: BestOfN | WorstOfN) -> Law:
    """Return what maxk learns, with one β for all prompts."""
    return lambda case, budget: at_kl(case, partial(enumerable.optimum, case, procedure), budget)


def grpo(transform: Any) -> Law:
    """Return what GRPO learns without group std, and with its KL's bias corrected; the mean with self only scales β."""
    return lambda case, budget: at_kl(case, partial(token_tilted, case, transformed(case, transform)), budget)


def shipped(transform: Any, others: np.ndarray = OTHERS) -> Law:
    """Return what GRPO learns as TRL ships it, but for β > 0."""
    return lambda case, budget: enumerable.group_normalised(case, transformed(case, transform), budget, others)[0]


OPTIMA = {procedure.name: optimum(procedure) for procedure in (BestOfN(4), WorstOfN(4))}
METHODS: dict[str, Law] = {
    **{f"maxk {name}": law for name, law in OPTIMA.items()},
    "exp:10": calibrated(Exponential(10.0)),
    "exp:-10": calibrated(Exponential(-10.0)),
    "identity, ipo": calibrated(parse_transform("identity")),
    "log": calibrated(parse_transform("log")),
    "bon-sft": lambda case, budget: at_kl(case, partial(enumerable.best_of_n, case), budget, between=(1.0, 200.0)),
    "bonbon n=4": lambda case, budget: at_kl(
        case, lambda margin: enumerable.best_worst_optimum(case, 4, margin=margin), budget, between=(1.0, 60.0)
    ),
    "bond": enumerable.bond,
    "grpo exp:10": grpo(Exponential(10.0)),
    "grpo exp:-10": grpo(Exponential(-10.0)),
    "grpo shipped exp:10": shipped(Exponential(10.0)),
    "grpo shipped exp:-10": shipped(Exponential(-10.0)),
    "raw": tilt(lambda case: case.rewards),
    "raw-prompt": tilt(enumerable.standardized),
    "par": tilt(enumerable.preference),
    "lsc:0.85": tilt(enumerable.log_sigmoid),
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    columns = [f"{name} at {budget:g}" for name in OPTIMA for budget in BUDGETS]
    print(f"| method, KL in nats | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    with tempfile.TemporaryDirectory() as folder:
        case = enumerable.enumerable(Path(folder) / "reference")
        for name, method in METHODS.items():
            rows = [enumerable.row(case, method(case, budget)) for budget in BUDGETS]
            cells = [f"{row[column]:.4f}" for column in (1, 2) for row in rows]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
