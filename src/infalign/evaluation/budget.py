"""What a KL budget buys on stored rewards, before any policy is trained: for rewards of 0 and 1 pass@N."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

from infalign.core.display import counted, heading, number, plain_table, say
from infalign.core.errors import DataError
from infalign.data.files import read_rows
from infalign.evaluation.table_files import read_reward_table
from infalign.method.calibration import Array, as_rewards
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN, RankProcedure, WorstOfN

CAVEAT = "K rollouts estimate them only roughly, so a policy reaches less; more rollouts narrow the gap."


@dataclass(frozen=True, slots=True)
class Budget:
    """What the optimum for ``procedure`` reaches with ``kl`` nats, a mean over prompts with K stored rewards each.

    ``today`` is what the reference serves on average, unbiased, None for fewer rollouts than the procedure draws.
    ``by_shares`` and ``reached`` are by the shares that training takes, where there are two, (c + ½)/(K + 1).
    ``silent`` is the share of prompts where all rewards are equal. The weights e^{g/β}/Z of a prompt's rollouts are
    worth ``effective`` of the K, on average, and the largest of all, where 1 is usual, is ``heaviest``.
    """

    metric: str
    prompts: int
    rollouts: int
    today: float | None
    by_shares: float
    silent: float
    largest_kl: float
    kl: float
    beta: float
    reached: float
    effective: float
    heaviest: float


def measure_budgets(rewards_PK: ArrayLike, procedure: RankProcedure, kls: Iterable[float]) -> list[Budget]:
    """Return what each KL budget buys. Raises ConfigError for one that cannot be spent, with the largest that can."""
    rewards = as_rewards(rewards_PK)
    checked = bool(np.isin(rewards, (0.0, 1.0)).all())
    metric = f"mean reward of {procedure.name}"
    if checked and isinstance(procedure, BestOfN | WorstOfN):
        metric = f"pass{'@' if isinstance(procedure, BestOfN) else '^'}{procedure.n}"
    try:
        today = float((procedure.weights(rewards) * rewards).sum(axis=1).mean())
    except DataError:  # fewer rollouts than it draws
        today = None
    silent = float((np.ptp(rewards, axis=1) == 0).mean())

    def at(kl: float) -> Budget:
        best = optimum(rewards, procedure, kl=kl, objective="reward")
        weights_PK = np.exp(best.log_ratios_PK)
        return Budget(
            metric=metric,
            prompts=len(rewards),
            rollouts=rewards.shape[1],
            today=today,
            by_shares=best.reference_value,
            silent=silent,
            largest_kl=best.largest_kl,
            kl=best.kl,
            beta=best.beta,
            reached=best.value,
            effective=float((weights_PK.sum(axis=1) ** 2 / (weights_PK**2).sum(axis=1)).mean()),
            heaviest=float(weights_PK.max()),
        )

    return [at(kl) for kl in kls]


def read_stored_rewards(path: Path, rollouts: int | None) -> Array:
    """Return the rewards of K rollouts of each prompt, (P, K), from a table with the columns prompt_id and reward.

    A table with ``pass_rate`` instead has a row per prompt, the share of its ``rollouts`` that were right. Raises
    DataError for prompts with different numbers of rows, for a pass rate outside [0, 1] and as `read_reward_table`.
    """
    rows = [(where, row["pass_rate"]) for where, row in read_rows(path) if "pass_rate" in row]
    if rows:
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
    return np.stack(stored_P)


def print_budgets(budgets: Sequence[Budget], console: Console) -> None:
    """Print a line on the rewards and a row for each budget."""
    first = budgets[0]
    scale, unit, form = (100.0, ", %", ".1f") if first.metric.startswith("pass") else (1.0, "", ".3g")
    served = "–" if first.today is None else number(scale * first.today, form)
    about = f"{counted(first.prompts, 'prompt')} × {first.rollouts} rollouts; {first.metric} today {served}{unit[1:]}"
    heading(console, "What the KL budget gains on these rewards", about)
    table = plain_table("KL,\nnats", f"{first.metric}{unit}", "effective\nrollouts", "heaviest\nrollout")
    for kl, reached, effective, heaviest in budget_rows(budgets):
        table.add_row(f"{kl:.3g}", number(scale * reached, form), f"{effective:.3g}", f"{heaviest:.3g}")
    console.print(table)
    if unit:
        say(console, f"Computed from the shares (c + ½)/(K + 1) for c right of K, as in training. {CAVEAT}", wrap=True)
    say(
        console,
        f"For {first.silent:.1%} of the prompts all rollouts have the same reward. At most {first.largest_kl:.3g} "
        "nats can be spent.",
        wrap=True,
    )


def budget_rows(budgets: Sequence[Budget]) -> list[tuple[float, float, float, float]]:
    """Return KL, what is served, effective rollouts and the heaviest one: of the reference, then of each budget."""
    first = budgets[0]
    reference = (0.0, first.by_shares, float(first.rollouts), 1.0)
    return [reference, *((one.kl, one.reached, one.effective, one.heaviest) for one in budgets)]
