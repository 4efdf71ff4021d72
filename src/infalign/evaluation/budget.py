"""The most that a KL budget can gain on stored rewards of 0 and 1, before any policy is trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console

from infalign.core.display import amount, counted, gain, heading, plain_table, ratio, say, share
from infalign.core.errors import DataError
from infalign.evaluation.extrapolation import Counts
from infalign.evaluation.intervals import Estimate
from infalign.evaluation.worth import Worth, worth
from infalign.method.calibration import Array
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN, RankProcedure, WorstOfN


@dataclass(frozen=True, slots=True)
class Budget:
    """What ``kl`` nats, a mean over prompts with K stored rewards each, can gain by the optimum for a procedure.

    ``worth`` has what is served today, and by ordinary RLHF and the optimum at this KL; None for fewer rollouts than
    the procedure draws. Both know every prompt's rate of right responses. ``silent`` is the share of prompts where all
    rewards are equal. The weights e^{g/β}/Z of a prompt's rollouts are worth ``effective`` of the K, on average.
    """

    metric: str
    prompts: int
    rollouts: int
    silent: float
    largest_kl: float
    kl: float
    effective: float
    worth: Worth | None


def measure_budgets(rewards_PK: Array, procedure: RankProcedure, kls: Sequence[float]) -> list[Budget]:
    """Return what each KL budget buys on rewards of 0 and 1. Raises ConfigError for one that cannot be spent."""
    prompts, rollouts = rewards_PK.shape
    metric = f"mean reward of {procedure.name}"
    if isinstance(procedure, BestOfN | WorstOfN):
        metric = f"pass{'@' if isinstance(procedure, BestOfN) else '^'}{procedure.n}"
    silent = float((np.ptp(rewards_PK, axis=1) == 0).mean())
    try:
        procedure.weights(rewards_PK)
    except DataError:  # fewer rollouts than it draws
        limits: Sequence[Worth | None] = [None] * len(kls)
    else:
        limits = worth(Counts(rewards_PK.sum(axis=1), rollouts), procedure, kls, known=True)
    gains = []
    for kl, limit in zip(kls, limits, strict=True):
        best = optimum(rewards_PK, procedure, kl=kl, objective="reward")
        weights_PK = np.exp(best.log_ratios_PK)
        effective = float((weights_PK.sum(axis=1) ** 2 / (weights_PK**2).sum(axis=1)).mean())
        gains.append(Budget(metric, prompts, rollouts, silent, best.largest_kl, kl, effective, limit))
    return gains


def print_budgets(budgets: Sequence[Budget], console: Console) -> None:
    """Print a row for each budget, and what its numbers are."""
    first = budgets[0]
    about = f"{first.metric}, {counted(first.prompts, 'prompt')} × {first.rollouts} rollouts"
    heading(console, "The most that a KL budget can gain", about)
    unit, points = (", %", ",\npoints") if first.metric.startswith("pass") else ("", "")
    columns = (f"ordinary\nRLHF{unit}", f"optimal{unit}", f"difference{points}", "effective\nrollouts")
    table = plain_table("KL,\nnats", *columns)
    for row in budget_rows(budgets):
        table.add_row(*row)
    console.print(table)
    for sentence in about_budgets(first):
        say(console, sentence, wrap=True)


def budget_rows(budgets: Sequence[Budget]) -> list[tuple[str, ...]]:
    """Return KL, what ordinary RLHF and the optimum serve, their difference, and effective rollouts; first today's."""
    first, forms = budgets[0], (share, share, gain)
    if not first.metric.startswith("pass"):
        forms = (partial(amount, digits=3), partial(amount, digits=3), partial(ratio, digits=3))

    def row(kl: str, effective: float, *limits: Estimate | None) -> tuple[str, ...]:
        shown = ("–" if e is None else form(e.as_dict()) for form, e in zip(forms, limits, strict=True))
        return (kl, *shown, f"{effective:.3g}")

    today = first.worth.today if first.worth else None
    rows = [row("0 (reference)", first.rollouts, today, today, None)]
    for one in budgets:
        limits = (one.worth.ordinary, one.worth.law, one.worth.difference) if one.worth else [None] * 3
        rows.append(row(f"{one.kl:.3g}", one.effective, *limits))
    return rows


def about_budgets(first: Budget) -> list[str]:
    """Return what the numbers are, in sentences."""
    limits = f"{first.metric} cannot be estimated from {first.rollouts} rollouts per prompt; raise rollout.k."
    if first.worth:
        unit = ", in %," if first.metric.startswith("pass") else ""
        limits = (
            f"Upper bounds of {first.metric}{unit} on the training prompts, for a policy that knows the pass rate of "
            "each; a trained policy reaches a part of the gain."
        )
    return [
        f"{limits} Ordinary RLHF: the same for the reward itself, at the same mean KL, served the same way.",
        f"{first.silent:.1%} of the prompts have only one reward value. Beyond {first.largest_kl:.3g} nats "
        "there is nothing to gain.",
    ]
