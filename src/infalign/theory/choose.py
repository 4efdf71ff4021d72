"""Which transformation to train with: the win rate of each when K reference rollouts a prompt calibrate the reward."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from scipy.interpolate import CubicHermiteSpline
from scipy.optimize import minimize_scalar

from infalign.errors import ConfigError, InfalignError
from infalign.method.calibration import Array
from infalign.method.procedures import Served, is_extreme, rewinds
from infalign.method.transforms import Exponential, Identity, Log, Power, Tabulated, Transformation, normalised_beta
from infalign.theory.finite_rollouts import finite_rollouts
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal

RATES = 2.0 ** np.arange(9)  # |t| from which the search for exp:t starts
STEEPEST = 330.0  # the largest |t|: a table holds t·e^t
SIMULATED_ROLLOUTS = 200_000
PROMPTS = (200, 2000)  # the fewest and the most simulated prompts that share these rollouts
TIE_ERRORS, TIE = 2.0, 1e-4  # standard errors of a paired difference, and the last digit that anybody is shown
TABLE_ACCURACY = 1e-10  # the largest error of log f wherever there is mass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one transformation achieves at the KL budget.

    ``win_rate`` is that of calibration on K rollouts, ``limit`` that of exact calibration, ``behind`` the
    distance to the best candidate. The standard errors are those of the simulation, for ``behind`` of the paired
    difference, and 0 where nothing was simulated.
    """

    transform: Transformation
    beta: float  # the weight of the KL for the paper's raw Φ; it spends the budget with K rollouts
    win_rate: float
    standard_error: float
    limit: float
    behind: float
    behind_error: float

    @property
    def ties(self) -> bool:
        """Whether it is as good as the best, within two standard errors or 1e-4."""
        return self.behind <= max(TIE_ERRORS * self.behind_error, TIE)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON, with the name of the transformation."""
        more = {"normalised_beta": normalised_beta(self.transform, self.beta), "ties": self.ties}
        return _columns(self) | {"transform": self.transform.name} | more


@dataclass(frozen=True, slots=True)
class Ranking:
    """Transformations for one procedure and KL budget, ``candidates`` with the best first.

    ``prompts`` is 0 where nothing could be simulated and the order is that of exact calibration.
    """

    procedure: str
    base: str
    kl: float  # nats
    rollouts: int
    prompts: int  # number of simulated prompts
    candidates: tuple[Candidate, ...]
    recommended: Candidate  # the simplest of those that tie with the best
    left_out: dict[str, str]  # transformations that cannot spend the budget, and why

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        more = {"candidates": [candidate.as_dict() for candidate in self.candidates]}
        return _columns(self) | more | {"recommended": self.recommended.as_dict()}


@dataclass(frozen=True, slots=True)
class _Outcome:
    transform: Transformation
    beta: float
    win_rates: Array  # one for each simulated prompt, or the one exact value
    limit: float


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
        if rewinds(self.procedure) or rewinds(self.base):
            law = law_at_kl(transform, kl=self.kl)
            wins = law.win_rate(self.procedure, self.base)
            return _Outcome(transform, law.beta, np.array([wins]), wins)
        found = finite_rollouts(
            transform,
            self.procedure,
            rollouts=self.rollouts,
            kl=self.kl,
            base=self.base,
            prompts=self.prompts,
            seed=self.seed,
        )
        return _Outcome(transform, found.beta, found.win_rates, found.limit)

    def best_exponential(self) -> Exponential:
        """Return the exponential with the largest win rate, its t rounded to two digits."""

        def loss(t: float) -> float:
            try:
                return -float(self.outcome(Exponential(t)).win_rates.mean())
            except ConfigError:
                return 0.0  # the budget is out of reach, so t is worse than any other

        start = min([*RATES, *-RATES], key=loss)
        bounds = (-0.95, min(0.95, float(np.log2(STEEPEST / abs(start)))))
        inside = minimize_scalar(
            lambda octaves: loss(float(start * 2.0**octaves)), bounds=bounds, options={"xatol": 0.01}
        )
        return Exponential(float(f"{start * 2.0**inside.x:.2g}"))


def rank(procedure: Served, *, kl: float, rollouts: int, base: Served | None = None, seed: int = 0) -> Ranking:
    """Return what transformations achieve at ``kl`` nats with K = ``rollouts`` reference rollouts a prompt, best first.

    Candidates: identity, log, the exponentials of the paper, the best exponential, for Best- and Worst-of-N against
    themselves the limit of the optimum at small KL, and the optimum of exact calibration. All see the same simulated
    prompts; the best exponential is searched on others. What finite rollouts cost Rewind-and-Repeat is not known, so
    its ranking is that of exact calibration. Raises ConfigError for a budget that the rollouts cannot spend.
    """
    if rollouts < 1:
        raise ConfigError(f"at least 1 rollout a prompt is needed, found {rollouts}")
    base = base or procedure
    exact = rewinds(procedure) or rewinds(base)
    prompts = int(np.clip(SIMULATED_ROLLOUTS // rollouts, *PROMPTS))
    setting = _Setting(procedure, base, kl, rollouts, prompts, seed)
    outcomes = [setting.outcome(Identity())]  # the identity reaches the largest KL
    best = replace(setting, prompts=prompts // 4, seed=seed + 1).best_exponential()
    rates = dict.fromkeys([*np.copysign([5.0, 10.0], best.t).tolist(), best.t])
    simple: list[Transformation] = [Exponential(t) for t in rates]
    if is_extreme(procedure) and procedure.n > 1 and base == procedure:
        simple.append(Power(procedure.sign * (2 * procedure.n - 1)))
    left_out = {}
    for transform in (*simple, Log(), None):  # the simplest first
        name = transform.name if transform else "optimal"
        try:
            outcomes.append(setting.outcome(transform or optimal(procedure, kl=kl, base=base).transform))
        except InfalignError as error:
            left_out[name] = str(error)
    top = max(outcomes, key=lambda outcome: outcome.win_rates.mean())
    candidates = [_against(top, outcome) for outcome in outcomes]
    return Ranking(
        procedure=procedure.name,
        base=base.name,
        kl=kl,
        rollouts=rollouts,
        prompts=0 if exact else prompts,
        candidates=tuple(sorted(candidates, key=lambda candidate: candidate.behind)),
        recommended=next(candidate for candidate in candidates if candidate.ties),
        left_out=left_out,
    )


def _against(top: _Outcome, outcome: _Outcome) -> Candidate:
    behind = top.win_rates - outcome.win_rates
    return Candidate(
        transform=outcome.transform,
        beta=outcome.beta,
        win_rate=float(outcome.win_rates.mean()),
        standard_error=_standard_error(outcome.win_rates),
        limit=outcome.limit,
        behind=max(0.0, float(behind.mean())),
        behind_error=_standard_error(behind),
    )


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _columns(record: Any) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record)}


def tabulated(transform: Transformation, *, beta: float) -> Tabulated:
    """Return ``transform`` as a table that can be saved, with the same law at the paper's ``beta`` and above it.

    The table is shifted to Φ(1) = 0, which changes no policy. Raises ConfigError for log, which is −∞ at u = 0.
    """
    if isinstance(transform, Tabulated):
        return transform
    unit = normalised_beta(transform, beta)
    v = np.linspace(0.0, 1.0, 17)
    while True:
        drop, slope = transform.drop(v), _slope(transform, v)
        middle = (v[1:] + v[:-1]) / 2
        exact = transform.drop(middle)
        missed = np.abs(CubicHermiteSpline(v, drop, slope)(middle) - exact)
        rough = missed > TABLE_ACCURACY * np.maximum(np.abs(exact), unit)
        if not rough.any():
            return Tabulated(transform.name, v, transform.scale * drop, transform.scale * slope)
        v = np.sort(np.append(v, middle[rough]))


def _slope(transform: Transformation, v: Array) -> Array:
    """Return the derivative of the normalised Φ by v = 1 − u."""
    match transform:
        case Identity():
            return np.full_like(v, -1.0)
        case Exponential(t):
            return np.asarray(-abs(t) * np.exp(min(t, 0.0) - t * v))
        case Power(m):
            return np.asarray(-abs(m) * ((1.0 - v) if m > 0 else v) ** (abs(m) - 1.0))
    raise ConfigError(f"{transform.name} cannot be written as a table; name it in the recipe instead")
