"""The most that a KL budget can gain on stored rewards, before any policy is trained: for rewards of 0 and 1 pass@N."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

from infalign.core.display import amount, counted, gain, heading, plain_table, ratio, say, share
from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.evaluation.extrapolation import Counts
from infalign.evaluation.intervals import Estimate, estimate
from infalign.evaluation.table_files import read_reward_table
from infalign.evaluation.worth import Worth, worth
from infalign.method.calibration import Array, as_rewards
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN, RankProcedure, Standard, WorstOfN
from infalign.method.procedures.base import cumulated


@dataclass(frozen=True, slots=True)
class Budget:
    """What ``kl`` nats, a mean over prompts with K stored rewards each, can gain by the optimum for a procedure.

    ``worth`` has what is served today, and by ordinary RLHF and the optimum at this KL; None for fewer rollouts than
    the procedure draws. For rewards of 0 and 1 both know every prompt's rate of right responses (`worth`), for others
    the stored rewards, as if there were no other responses. ``silent`` is the share of prompts where all rewards are
    equal. The weights e^{g/β}/Z of a prompt's rollouts are worth ``effective`` of the K, on average.
    """

    metric: str
    prompts: int
    rollouts: int
    silent: float
    largest_kl: float
    kl: float
    beta: float
    effective: float
    worth: Worth | None


def measure_budgets(rewards_PK: ArrayLike, procedure: RankProcedure, kls: Sequence[float]) -> list[Budget]:
    """Return what each KL budget buys. Raises ConfigError for one that cannot be spent, with the largest that can.

    Two values, such as −1 and 1, are a checker's, and are measured as 0 and 1.
    """
    rewards, unit = np.sort(as_rewards(rewards_PK), axis=1), 1.0
    prompts, rollouts = rewards.shape
    metric = f"mean reward of {procedure.name}"
    if (values := np.unique(rewards)).size == 2:
        rewards, unit = (rewards == values[1]).astype(float), float(np.ptp(values))
    if np.isin(rewards, (0.0, 1.0)).all() and isinstance(procedure, BestOfN | WorstOfN):
        metric = f"pass{'@' if isinstance(procedure, BestOfN) else '^'}{procedure.n}"
    silent = float((np.ptp(rewards, axis=1) == 0).mean())
    gains = []
    for kl, limit in zip(kls, _limits(rewards, procedure, kls), strict=True):
        best = optimum(rewards, procedure, kl=kl, objective="reward")
        weights_PK = np.exp(best.log_ratios_PK)
        effective = float((weights_PK.sum(axis=1) ** 2 / (weights_PK**2).sum(axis=1)).mean())
        gains.append(Budget(metric, prompts, rollouts, silent, best.largest_kl, kl, unit * best.beta, effective, limit))
    return gains


def _limits(sorted_PK: Array, procedure: RankProcedure, kls: Sequence[float]) -> Sequence[Worth | None]:
    try:
        today_P = (procedure.weights(sorted_PK) * sorted_PK).sum(axis=1)
    except DataError:  # fewer rollouts than it draws
        return [None] * len(kls)
    if np.isin(sorted_PK, (0.0, 1.0)).all():
        return worth(Counts(sorted_PK.sum(axis=1), sorted_PK.shape[1]), procedure, kls, known=True)

    def served(shaped_for: RankProcedure, kl: float) -> Array:
        laws_PK = optimum(sorted_PK, shaped_for, kl=kl, objective="reward", smoothed=False).probabilities_PK
        return np.asarray((np.diff(procedure.distortion(cumulated(laws_PK)), axis=1) * sorted_PK).sum(axis=1))

    worths = []
    for kl in kls:
        ordinary_P, law_P = served(Standard(), kl), served(procedure, kl)
        values = (today_P, ordinary_P, law_P, law_P - today_P, law_P - ordinary_P)
        worths.append(Worth(kl, *map(estimate, values)))
    return worths


def read_stored_rewards(path: Path, rollouts: int | None) -> Array:
    """Return the rewards of K rollouts of each prompt, (P, K), from a table with the columns prompt_id and reward.

    A table with ``pass_rate`` instead has a row per prompt, the share of its ``rollouts`` that were right. Raises
    DataError for prompts with different numbers of rows, for a pass rate outside [0, 1] and as `read_reward_table`.
    """
    rows: list[tuple[str, Any]] = [(where, row.get("pass_rate")) for where, row in read_rows(path)]
    if any(rate is not None for _, rate in rows):
        if rollouts is None:
            raise DataError(f"{path} has pass rates; give --rollouts K, the number of rollouts per prompt behind them")
        rates_P = np.zeros(len(rows))
        for prompt, (where, rate) in enumerate(rows):
            with suppress(TypeError, ValueError):
                rates_P[prompt] = float(rate)
                if 0 <= rates_P[prompt] <= 1:
                    continue
            raise DataError(f"{where}: pass_rate must be between 0 and 1, found {rate!r}")
        right_P = np.rint(rates_P * rollouts)
        return np.asarray(np.arange(rollouts) >= rollouts - right_P[:, None], float)
    stored_P = [*read_reward_table(path).rewards_by_prompt().values()]
    if (fewest := min(map(len, stored_P))) != (most := max(map(len, stored_P))):
        raise DataError(f"{path} has {fewest} to {most} rewards per prompt; give as many for each")
    rewards_PK = np.stack(stored_P)
    if not np.isin(rewards_PK, (0.0, 1.0)).all() and not np.ptp(rewards_PK, axis=1).any():
        raise DataError(f"{path}: no prompt has two different rewards, so there is nothing to gain; score anew")
    return rewards_PK


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
    if first.worth and first.metric.startswith("pass"):
        limits = (
            f"Upper bounds of {first.metric}, in %, on the training prompts, for a policy that knows the pass rate of "
            "each; a trained policy reaches a part of the gain."
        )
    elif first.worth:
        limits = (
            "Upper bounds from the stored rewards, as if there were no other responses; a trained policy reaches a "
            "part of the gain."
        )
    return [
        f"{limits} Ordinary RLHF: the same for the reward itself, at the same mean KL, served the same way.",
        f"{first.silent:.1%} of the prompts have only one reward value. Beyond {first.largest_kl:.3g} nats "
        "there is nothing to gain.",
    ]
