"""What training on stored verdicts can be worth: the served value at a KL, for ordinary RLHF and for a procedure's law.

A prompt has an unknown rate of right responses; c of K are stored. Training shifts the log odds of a right response by
what depends on c and K, as the optimum takes (c + ½)/(K + 1) for the rate, or, where a policy knows it, on the rate.
Value and KL of that policy on new responses are functions of the rate, so luck in c is no gain.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
from rich.console import Console
from scipy.special import rel_entr

from infalign.core.display import amount, counted, gain, heading, plain_table, ratio, say, share
from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.extrapolation import RATES, Counts
from infalign.evaluation.intervals import Estimate
from infalign.method.calibration import Array
from infalign.method.optimum import Classes, by_ranks, optimum
from infalign.method.procedures import BestOfN, RankProcedure, Standard, WorstOfN

BETAS = np.exp(np.linspace(8.0, -10.0, 49))


@dataclass(frozen=True, slots=True)
class Worth:
    """What is served, for Best-of-N pass@N: today, and by policies at a mean KL of up to ``kl`` nats.

    ``ordinary`` is trained on the verdicts, ``law`` on the rewards of the optimum for the procedure; ``gain`` is law
    less today, ``difference`` law less ordinary.
    """

    kl: float
    today: Estimate
    ordinary: Estimate
    law: Estimate
    gain: Estimate
    difference: Estimate


def worth(
    counts: Counts,
    procedure: RankProcedure | str,
    kls: Sequence[float],
    *,
    known: bool = False,
    confidence: float = 0.95,
) -> list[Worth]:
    """Return what policies trained on these verdicts could have on new responses to the prompts, at each of ``kls``.

    They are the optima on stored rewards, as training has them, and lose nothing; on-policy training, which sees the
    current rate, and policies that generalize can have more, up to those that have ``known`` the rate of every prompt.
    Means are by a mixture that takes rates below 1/(2K) as 0, so they err to the low side. Limits hold for all rates of
    what was fitted; the lower one of a difference is up to 1.5 points too high where all prompts have one rate.
    Raises DataError for fewer responses than the procedure draws; ConfigError for a procedure that is not by rank, and
    a KL that is negative or not finite.
    """
    served = by_ranks(procedure, "what training is worth")
    if not all(0.0 <= kl < np.inf for kl in kls):
        raise ConfigError(f"a KL must be finite and not negative, found {list(kls)}")
    right = [(np.arange(n) >= n - np.arange(n + 1)[:, None]).astype(float) for n in counts.sizes.tolist()]
    exact = np.concatenate([(served.weights(some) * some).sum(axis=1) for some in right])
    base = counts.of_rate(exact[:, None])
    today = counts.estimate(exact, base, confidence=confidence)
    trained = [_Trained(counts, shaped_for, served, known=known) for shaped_for in (Standard(), served)]
    worths = []
    for kl in kls:
        ordinary, law = (policies.at(kl) for policies in trained)
        values = [counts.estimate(exact, value, confidence=confidence) for value in (ordinary, law)]
        gains = law - base, law - ordinary
        more = [counts.estimate(0.0 * exact, gain, least=-1.0, confidence=confidence) for gain in gains]
        worths.append(Worth(kl, today, *values, *more))
    return worths


class _Trained:
    """Policies that training gives with the optimum's rewards for one procedure, served by another."""

    def __init__(
        self, counts: Counts, shaped_for: RankProcedure, served: RankProcedure, *, known: bool = False
    ) -> None:
        self.counts, self.served = counts, served
        taken = np.clip(RATES, *RATES[[1, -2]]) if known else (counts.c + 0.5) / (counts.n + 1)
        shifts = _shifts(tuple(taken.tolist()), cast(Hashable, shaped_for))
        self.shifts = shifts[:, None] if known else shifts[..., None]  # (β, X, RATES), one of them of length 1
        by_rate = np.array([self._by_rate(shift) for shift in self.shifts])
        self.values, self.kls = (counts.shares @ by_rate @ counts.mixture).T  # means over prompts, by β

    def _by_rate(self, shift_XR: Array) -> tuple[Array, Array]:
        """Return the served value and the KL by the rate: means over what may be stored."""
        wrong = (1.0 - RATES) * np.exp(-shift_XR)
        q = np.divide(RATES, RATES + wrong, out=np.zeros_like(wrong), where=RATES > 0.0)
        kl = rel_entr(q, RATES) + rel_entr(1.0 - q, 1.0 - RATES)
        return self.counts.of_rate(1.0 - self.served.distortion(1.0 - q)), self.counts.of_rate(kl)

    def at(self, kl: float) -> Array:
        """Return the value by the rate at ``kl``, or at what can be spent, less the price of what exceeds it.

        The price is what a nat adds. So a mean KL that is off, as rates are not those of the mixture, changes little.
        Where the KL jumps between two β, some prompts have the policy of the one and some that of the other.
        """
        if not (more := self.kls > kl).any():
            return self._by_rate(self.shifts[-1])[0]
        above = max(1, int(np.argmax(more)))  # the first KL is 0 but for rounding
        between = slice(above - 1, above + 1)
        (nats,), (gained,) = np.diff(self.kls[between]), np.diff(self.values[between])
        share = (kl - self.kls[above - 1]) / nats
        shares = np.array([1.0 - share, share])
        one = self._by_rate(np.tensordot(shares, self.shifts[between], 1))
        some = np.tensordot(shares, [self._by_rate(shift) for shift in self.shifts[between]], 1)  # either, by prompt
        priced = [value - gained / nats * (spent - kl) for value, spent in (one, some)]
        return np.asarray(max(priced, key=lambda value_R: self.counts.shares @ value_R @ self.counts.mixture))


@lru_cache(maxsize=64)
def _shifts(rates: tuple[float, ...], procedure: Any) -> Array:
    """Return what optima add to the log odds of a right response of a prompt with each rate, (β, rates)."""
    taken = np.array(rates)
    shares, verdicts = np.stack([1.0 - taken, taken], axis=1), np.tile([0.0, 1.0], (taken.size, 1))
    laws = Classes(shares, verdicts, verdicts, np.arange(taken.size), procedure, "reward")
    return np.stack([0.0 * taken, *(-laws.solve(beta).g[:, 0] / beta for beta in BETAS)])


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
