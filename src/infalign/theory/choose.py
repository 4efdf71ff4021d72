"""Which transformation to train with: what each wins when K reference rollouts per prompt calibrate the reward.

K rollouts are a price that depends on the policy. One that is free on every prompt and *memorizes* the ranks Ĉ of its
rollouts also learns their noise (`theory.finite_rollouts`). A network that *generalizes*, from many prompts, learns the
mean E[Φ(Ĉ) | u], a smoother Φ (`smoothed`). Real ones lie between, so the recommendation is good under both.
"""

from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import xlog1py, xlogy

from infalign.core.errors import ConfigError, InfalignError
from infalign.method.calibration import Array
from infalign.method.procedures import Extreme, Served, as_procedure, distortion, rewinds
from infalign.method.procedures.base import log_choose
from infalign.method.transforms import LARGEST_M, Exponential, Identity, Log, Power, Tabulated, Transformation, at_ranks
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps
from infalign.theory.law import check_kl, law_at_kl
from infalign.theory.optimum import rank_optimum

RATES = 2.0 ** np.arange(9)  # |t| from which the search for exp:t starts
STEEPEST = 330.0  # the largest |t|: a table holds t·e^t
SIMULATED_ROLLOUTS = 200_000
MAX_ROLLOUTS = 100_000  # per prompt; more take too much memory
PROMPTS = (200, 2000)  # the fewest and the most simulated prompts that share these rollouts
SEARCHED = 4  # times fewer prompts in the search for the best exponentials
TIE_ERRORS = 2.0  # standard errors of a paired difference
ACCURACY, SMALLEST_BETA = 1e-7, 1e-150  # the largest error of log f where there is mass, at a normalized β from this on
TIE = 1e-3  # share of what is left to win, 1 − W, that is as good as none


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one transformation wins at the KL budget.

    ``memorizing`` and ``generalizing`` are the win rates of the two limits for K rollouts, ``limit`` that of exact
    ranks. ``behind`` is the larger of the distances to the best candidate under either limit. The standard errors are
    those of the simulation, for ``behind`` of the paired difference, and 0 where nothing was simulated.
    """

    transform: Transformation
    memorizing: float | None  # None for Rewind-and-Repeat, for which it is not known
    standard_error: float
    generalizing: float
    limit: float
    behind: float
    behind_error: float
    ties: bool  # whether ``behind`` is the smallest, within twice ``behind_error`` or a thousandth of 1 − W


@dataclass(frozen=True, slots=True)
class Ranking:
    """Transformations for one procedure and KL budget, ``candidates`` with the best first."""

    procedure: str
    base: str
    kl: float  # nats
    rollouts: int
    prompts: int  # number of simulated prompts, 0 where memorizing is not known
    candidates: tuple[Candidate, ...]
    recommended: Candidate  # the simplest of those that tie with the best
    left_out: dict[str, str]  # transformations that cannot spend the budget, and why

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON, transformations by name."""

        def named(one: Candidate) -> dict[str, Any]:
            return asdict(one) | {"transform": one.transform.name}

        return asdict(self) | {"candidates": [*map(named, self.candidates)], "recommended": named(self.recommended)}


@dataclass(frozen=True)
class _Outcome:
    transform: Transformation
    memorizing: Array  # one win rate for each simulated prompt; empty where it is not known
    generalizing: float

    @cached_property
    def both(self) -> Array:
        """The mean win rates of the limits that are known."""
        return np.append(self.memorizing.mean() if self.memorizing.size else [], self.generalizing)


@dataclass(frozen=True, slots=True)
class _Setting:
    """The question that every candidate answers."""

    procedure: Served
    base: Served
    kl: float
    rollouts: int
    prompts: int
    seed: int

    def outcome(self, transform: Transformation) -> _Outcome:
        """Return what ``transform`` achieves. Raises ConfigError if it cannot spend the budget."""
        memorizing = np.empty(0)
        if not (rewinds(self.procedure) or rewinds(self.base)):
            gaps = simulated_gaps(self.rollouts, prompts=self.prompts, seed=self.seed)
            memorizing = finite_rollouts(transform, self.procedure, gaps, kl=self.kl, base=self.base).win_rates
        law = law_at_kl(smoothed(transform, self.rollouts), kl=self.kl)
        return _Outcome(transform, memorizing, law.win_rate(self.procedure, self.base))

    def best_exponentials(self) -> list[Exponential]:
        """Return the exponentials that lose least under both limits and under each, their t rounded to two digits."""
        tried: dict[float, Array] = {}

        def wins(t: float) -> Array:
            if t not in tried:
                try:
                    tried[t] = self.outcome(Exponential(t)).both
                except ConfigError:  # the budget is out of reach, so t is worse than any other
                    tried[t] = np.zeros(1 if rewinds(self.procedure) or rewinds(self.base) else 2)
            return tried[t]

        for sign in (1.0, -1.0):
            for gentle, steep in pairwise(sign * RATES):  # win rates rise with |t| and then fall
                if (wins(float(steep)) < wins(float(gentle))).all():
                    break
        most = np.max(list(tried.values()), axis=0)

        def nearby(worst: Any) -> Exponential:
            start = min(tried, key=worst)
            bounds = (-0.95, min(0.95, float(np.log2(STEEPEST / abs(start)))))
            inside = minimize_scalar(lambda x: worst(float(start * 2.0**x)), bounds=bounds, options={"xatol": 0.05})
            return Exponential(float(f"{start * 2.0**inside.x:.2g}"))

        aims = [lambda t: float((most - wins(t)).max()), *(lambda t, i=i: -float(wins(t)[i]) for i in range(most.size))]
        return [nearby(aim) for aim in aims]


def choose(
    procedure: Served | str, *, kl: float, rollouts: int = 32, base: Served | str | None = None, seed: int = 0
) -> Ranking:
    """Return what transformations achieve at ``kl`` nats with K = ``rollouts`` rollouts per prompt, best first.

    Candidates: identity, log, the exponentials of the paper, the best exponentials, for Best- and Worst-of-N against
    themselves the limit of the optimum at small KL, and the optimum of exact calibration. All see the same simulated
    prompts; the best exponentials are searched on others. What memorizing costs Rewind-and-Repeat is not known, so its
    ranking is that of the other limit. Raises ConfigError for a budget that the rollouts cannot spend.

    >>> choose("best-of-4", kl=0.5).recommended.transform.name
    'exp:11'
    """
    procedure, base = as_procedure(procedure), as_procedure(base or procedure)
    for served in (procedure, base):
        distortion(served)  # refused now if it has no law
    check_kl(kl)
    if not 2 <= rollouts <= MAX_ROLLOUTS:
        raise ConfigError(f"calibration takes 2 to {MAX_ROLLOUTS:,} rollouts per prompt, found {rollouts}")
    prompts = int(np.clip(SIMULATED_ROLLOUTS // rollouts, *PROMPTS))
    setting = _Setting(procedure, base, kl, rollouts, prompts, seed)
    outcomes = [setting.outcome(Identity())]  # the identity reaches the largest KL
    exponentials = replace(setting, prompts=prompts // SEARCHED, seed=seed + 1).best_exponentials()
    rates = dict.fromkeys([*np.copysign([5.0, 10.0], exponentials[0].t).tolist(), *(one.t for one in exponentials)])
    tried: dict[str, Any] = {one.name: one for one in map(Exponential, rates)}
    if isinstance(procedure, Extreme) and 1 < procedure.n <= LARGEST_M / 2 and base == procedure:
        power = Power(procedure.sign * (2 * procedure.n - 1))
        tried[power.name] = power
    tried |= {"log": Log(), "optimal": partial(rank_optimum, procedure, kl=kl, base=base)}
    left_out = {}
    for name, one in tried.items():  # the simplest first
        try:
            outcomes.append(setting.outcome(one().transform if isinstance(one, partial) else one))
        except InfalignError as error:
            left_out[name] = str(error)
    candidates = _compared(outcomes, setting)
    return Ranking(
        procedure=procedure.name,
        base=base.name,
        kl=kl,
        rollouts=rollouts,
        prompts=prompts if outcomes[0].memorizing.size else 0,
        candidates=tuple(sorted(candidates, key=lambda candidate: candidate.behind)),
        recommended=next(candidate for candidate in candidates if candidate.ties),
        left_out=left_out,
    )


@cache
def best_named(procedure: str, kl: float, rollouts: int) -> str:
    """Return the name of the transformation that loses least; the optimum of exact ranks has none. Raises as `choose`.

    >>> best_named("best-of-4", 0.5, 100)
    'exp:13'
    """
    candidates = choose(procedure, kl=kl, rollouts=rollouts).candidates
    return next(one.transform.name for one in candidates if not isinstance(one.transform, Tabulated))


def _compared(outcomes: list[_Outcome], setting: _Setting) -> list[Candidate]:
    most = np.max([outcome.both for outcome in outcomes], axis=0)
    behinds = [float((most - outcome.both).max()) for outcome in outcomes]
    top, left = max(outcomes, key=lambda outcome: outcome.both[0]), float((1.0 - most).min())
    candidates = []
    for outcome, behind in zip(outcomes, behinds, strict=True):
        error = _standard_error(top.memorizing - outcome.memorizing)
        law = law_at_kl(outcome.transform, kl=setting.kl)
        candidates.append(
            Candidate(
                transform=outcome.transform,
                memorizing=float(outcome.memorizing.mean()) if outcome.memorizing.size else None,
                standard_error=_standard_error(outcome.memorizing),
                generalizing=outcome.generalizing,
                limit=law.win_rate(setting.procedure, setting.base),
                behind=behind,
                behind_error=error,
                ties=behind - min(behinds) <= max(TIE_ERRORS * error, TIE * left),
            )
        )
    return candidates


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) else 0.0


def smoothed(transform: Transformation, rollouts: int) -> Tabulated:
    """Return E[Φ(Ĉ) | u] = Σ_c C(K, c)·u^c·(1−u)^{K−c}·Φ(c/K) with K = ``rollouts``, shifted to Φ(1) = 0.

    This is what regression on Φ(Ĉ) converges to in a network that sees the rank u of a response and many prompts: the
    noise of each prompt's references averages out, and Φ is left smoothed over 1/√K. Φ(0) is as `at_ranks` has it.
    """
    phi = at_ranks(transform, np.arange(rollouts, -1, -1) / rollouts, rollouts)  # of the ranks 1, 1 − 1/K, …, 0
    drops = phi - phi[0]

    def chance(v: Array, draws: int) -> Array:
        lost, v = np.arange(draws + 1), v[:, None]
        return np.asarray(np.exp(log_choose(draws, lost) + xlogy(lost, v) + xlog1py(draws - lost, -v)))

    def drop_and_slope(v: Array) -> tuple[Array, Array]:
        return chance(v, rollouts) @ drops, rollouts * (chance(v, rollouts - 1) @ np.diff(drops))

    unit = SMALLEST_BETA * float(np.ptp(drops))
    knots = v = np.linspace(0.0, 1.0, 17)
    heights, slopes = drop, slope = drop_and_slope(v)
    start, end = (np.stack([v, drop, slope])[:, piece] for piece in (slice(-1), slice(1, None)))
    while start.size:  # the pieces that may still be rough
        middle, width = (start[0] + end[0]) / 2, end[0] - start[0]
        cubic = (start[1] + end[1]) / 2 + width * (start[2] - end[2]) / 8
        drop, slope = drop_and_slope(middle)
        rough = np.abs(cubic - drop) > ACCURACY * np.maximum(np.abs(drop), unit)
        inner = np.stack([middle, drop, slope])[:, rough]
        knots, heights, slopes = (np.append(*pair) for pair in zip((knots, heights, slopes), inner, strict=True))
        start, end = np.append(start[:, rough], inner, axis=1), np.append(inner, end[:, rough], axis=1)
    order = np.argsort(knots)
    scale = transform.scale
    return Tabulated(f"smoothed:{transform.name}", knots[order], scale * heights[order], scale * slopes[order])
