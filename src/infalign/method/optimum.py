"""The optimal policy for rewards that tie, such as a checker's 0 and 1 (docs/derivations.md, rewards that tie).

A prompt's K reference rollouts have m distinct rewards v_1 < … < v_m with shares p_j. The optimum keeps the reference's
distribution among equal rewards and moves only the masses q_j. A procedure that looks at ranks serves class j with
probability h(F_j) − h(F_{j−1}), F_j = q_1 + … + q_j, so the objective is J(q) = Σ_j (h(F_j) − h(F_{j−1}))·w_j, and the
optimum of J − β·KL has q_j ∝ p_j·exp(g_j/β). The transformed reward is g_j = −Σ_{i=j}^{m−1} h′(F_i)(w_{i+1} − w_i).
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Literal, NamedTuple, Self, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.optimize.elementwise import find_root
from scipy.special import betaln, logsumexp, xlogy

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array, as_rewards, calibrate, places, reward_rows, stacked
from infalign.method.laws import Law, of_rewarded
from infalign.method.procedures import RankProcedure, Served, as_procedure, looks_at_ranks
from infalign.method.procedures.base import cumulated
from infalign.method.roots import check_strength, find_log_beta
from infalign.method.shapings import NotByRank

Goal = Literal["reward", "win-rate"]
Pair = tuple[float, float]  # the rewards of a failure and of a success
PRIORS = np.log(1e-3), np.log(1e3)  # of the parameters of one that is fitted
JEFFREYS = (0.5, 0.5)  # a Beta prior of a prompt's rate of success
GRID = np.linspace(0.0, 1.0, 129)  # where it is seen whether h is convex
# Where it is not: a scan for stationary points, as shares of the way from the best class alone to the reference.
ENDS = np.geomspace(1e-12, 0.01, 32)
SCAN = np.concatenate([ENDS, np.linspace(0.02, 0.98, 62), 1.0 - ENDS[::-1]])
SLACK = 1e-9  # of a bracket, nats


@dataclass(frozen=True, slots=True)
class Optimal(NotByRank):
    """The transformed reward of the optimum for a procedure at ``beta``, as a shaping.

    The class of a reward is found among its prompt's references; between and beyond them the reward has the derivative
    of J in a response of its own there. Where there is a ``pair``, and all references are one of it, the second c of K
    times, the shares are those of (c + ½)/(K + 1) successes: 0 of 32 does not mean that there are none. Where J has two
    local optima, prompts whose references are ``raised`` (`_digest`) have the one with more KL, which is not the best.
    """

    procedure: RankProcedure
    beta: float
    objective: Goal = "reward"
    pair: Pair | None = None
    raised: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """All that it is: ``optimal:reward:best-of-8:0.04:0.0:1.0``, β before the pair and what is raised, if any."""
        raised = ["raised", ",".join(sorted(self.raised))] if self.raised else []
        numbers = map(repr, (self.beta, *(self.pair or ())))
        return ":".join(["optimal", self.objective, self.procedure.name, *numbers, *raised])

    @classmethod
    def parse(cls, name: str, procedure: RankProcedure | None = None) -> "Optimal | None":
        """Return what has this name; None for another form of one. Raises ConfigError for an unknown procedure.

        A ``procedure`` is taken instead of the one that is named: a user's own has a name without its folder.
        """
        number = r":([-+.\de]+)"
        form = rf"optimal:(reward|win-rate):(.+?){number}(?:{number}{number})?(?::raised:([\da-f,]+))?"
        if (match := re.fullmatch(form, name)) is None:
            return None
        objective, named, beta, failure, success, raised = match.groups()
        pair = None if failure is None else (float(failure), float(success))
        served, digests = procedure or by_ranks(named), frozenset(raised.split(",") if raised else ())
        return cls(served, float(beta), cast(Goal, objective), pair, digests)

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        """Return g of the ``rewards``, of any shape, of one prompt with sorted references."""
        rewards, references_K = as_rewards(rewards), as_rewards(reference_rewards_K)
        calibrate(rewards, references_K)  # raises for what is not finite, too few or not sorted
        laws, solved = _solved_law(self, references_K.tobytes())
        return laws.at(rewards, 0, solved)

    def worth(self, rewards_K: Array) -> Array:
        """Return w of each of a prompt's rollouts: its reward, or how often it wins against what is served of all."""
        if self.objective == "reward":
            return rewards_K
        ranks = np.stack(places(rewards_K[None])) / rewards_K.size
        return np.asarray(self.procedure.distortion(ranks).mean(axis=0)[0])


@lru_cache(maxsize=16_384)
def _solved_law(shaping: Optimal, sorted_references: bytes) -> "tuple[Classes, _Solved]":
    """Return the law of one prompt and its optimum; a pair has K + 1 laws, however many prompts there are."""
    references_K = np.frombuffer(sorted_references)
    laws = Classes.of([references_K], shaping.procedure, shaping.objective, shaping.pair)
    return laws, laws.solve(shaping.beta, np.array([_digest(references_K) in shaping.raised]))


def _digest(sorted_references: Array) -> str:
    return blake2b((sorted_references + 0.0).tobytes(), digest_size=8).hexdigest()  # −0 + 0 is 0


@dataclass(frozen=True, slots=True, eq=False)
class Optimum(Law):
    """The law of the optimal policy on stored rewards, at one β for all prompts.

    ``largest_kl`` is what its KL stays below. ``value`` is the mean of J, for 0/1 rewards and Best-of-N pass@N.
    """

    largest_kl: float
    value: float
    shaping: Optimal

    @property
    def procedure(self) -> RankProcedure:
        """The procedure that it is the optimum for."""
        return self.shaping.procedure


@of_rewarded
def optimum(
    rewards_PK: ArrayLike | Iterable[ArrayLike],
    procedure: Served | str,
    *,
    kl: float | None = None,
    beta: float | None = None,
    objective: Goal | None = None,
    smoothed: bool = True,
) -> Optimum:
    """Return the policy that maximizes the mean of J − β·KL on K stored rewards of each of P prompts, exact for ties.

    K may differ between prompts; a table of `read_rewards` is taken too. Give ``beta``, or the mean ``kl`` in nats,
    which may leave prompts where all rewards are equal at 0. ``objective`` is the expected served reward or the win
    rate against the reference served alike; for 0/1 rewards they have the same optima (β of the win rate is half as
    large) and the first is the default. The share of c successes of K, where rewards have two values, is
    (c + ½)/(K + 1): a prompt without a success is trained on too, and the law over its rollouts leaves out the mass of
    what none of them is. Not ``smoothed`` it is c/K.

    Where no β spends ``kl``, as Worst-of-N can have it, β is the smallest that spends less. Below 95 % of ``kl``, other
    local optima, with more KL, then replace the best ones, by gain per nat, as long as the budget lasts; prompts with
    equal rewards stay together. If that leaves it below 95 %, a UserWarning says so.

    Raises ConfigError for a budget that cannot be spent, with the largest, and for graded rewards without an objective;
    DataError for rewards that are not finite.

    >>> o = optimum([[0, 0, 0, 0, 1]], "best-of-4", beta=0.5, smoothed=False)
    >>> round(float(o.probabilities_PK[0, -1]), 6), round(o.kl, 6)  # logit q = logit p + N(1 − q)^(N − 1)/β
    (0.463074, 0.174683)
    """
    served = by_ranks(procedure)
    rewards = reward_rows(rewards_PK)
    if objective not in (None, *(known := get_args(Goal))):
        raise ConfigError(f"unknown objective {objective!r}; known: {', '.join(known)}")
    values = np.unique(np.concatenate(rewards))
    if objective is None and values.size > 2:
        raise ConfigError(
            "rewards have more than two values, so name the objective, reward or win-rate; in a recipe, "
            "transform: optimal:reward or optimal:win-rate"
        )
    objective = objective or "reward"
    check_strength(kl, beta)
    low, high = values.tolist() if values.size == 2 else (0.0, 1.0)  # also where all are 0, or all 1
    pair = (low, high) if smoothed and np.isin(values, (low, high)).all() else None
    references = [np.sort(row) for row in rewards]
    laws = Classes.of(references, served, objective, pair)
    found_beta = float(beta) if beta is not None else laws.beta_at(float(kl or 0.0))
    solved, raised, shaping = laws.solve(found_beta), None, Optimal(served, found_beta, objective, pair)
    if kl is not None and laws.mean(solved.kl) < 0.95 * kl:
        raised = laws.raised(found_beta, kl)
        solved = laws.solve(found_beta, raised)
        digests = (_digest(row) for row, law in zip(references, laws.of_prompt, strict=True) if raised[law])
        shaping = replace(shaping, raised=frozenset(digests))
    log_z = logsumexp(solved.g / found_beta, b=laws.p, axis=1)
    rows = zip(rewards, laws.of_prompt, strict=True)
    log_ratios_PK = stacked([laws.at(row, law, solved) / found_beta - log_z[law] for row, law in rows])
    spent, largest_kl, value = map(laws.mean, (solved.kl, -np.log(laws.p[:, -1]), solved.value))
    if kl is not None and spent < 0.95 * kl:
        after = laws.mean(laws.solve(found_beta * (1.0 - 1e-9), raised).kl)
        warnings.warn(
            f"of a KL of {kl:.3g} nats only {spent:.3g} are spent, as on these rewards the optimum for {served.name} "
            f"jumps from there to {after:.3g}",
            stacklevel=1,  # so that it is shown once
        )
    return Optimum(log_ratios_PK, stacked(rewards), shaping, found_beta, spent, "classes", largest_kl, value)


def left_out(law: Law) -> Law:
    """Return a law whose log-ratios are the optimum's by what a prompt's *other* rollouts tell of its rate.

    For a checker's rewards p is then (c + a)/(K − 1 + a + b), with c successes of the others and a Beta(a, b) prior
    that fits the successes of all prompts: the probability that a rollout is right, given the rewards of the others. So
    e^T has the mean 1 over rollouts. A rate that the rollout itself is part of says less of both outcomes: it leaves
    mass that belongs to no rollout, which a network moves to tokens that none of them has. Laws for other rewards stay
    as they are.
    """
    shaping = law.shaping
    if not isinstance(shaping, Optimal) or shaping.pair is None:
        return law
    rows = [np.sort(row) for row in law.rewards_PK]
    counts_P, sizes_P = [np.sum(row == shaping.pair[1]) for row in rows], [row.size for row in rows]
    others = [row[:-1] for row in rows] + [row[1:] for row in rows]  # of a success, and of a failure
    laws = Classes.of(others, shaping.procedure, shaping.objective, shaping.pair, fitted_prior(counts_P, sizes_P))
    raised = np.zeros(len(laws.p), bool)
    raised[laws.of_prompt] = [_digest(row) in shaping.raised for row in rows] * 2
    solved = laws.solve(shaping.beta, raised)
    log_z = logsumexp(solved.g / shaping.beta, b=laws.p, axis=1)
    up, down = (solved.g[laws.of_prompt] / shaping.beta - log_z[laws.of_prompt, None])[:, [-1, 0]].T
    targets = [np.where(row == shaping.pair[1], up[i], down[len(rows) + i]) for i, row in enumerate(law.rewards_PK)]
    return replace(law, log_ratios_PK=stacked(targets))


def fitted_prior(counts_P: ArrayLike, sizes_P: ArrayLike) -> tuple[float, float]:
    """Return a and b of the Beta prior under which ``counts_P`` successes of ``sizes_P`` are likeliest."""
    counts, sizes = np.asarray(counts_P), np.asarray(sizes_P)

    def cost(logs: Array) -> float:
        a, b = np.exp(logs)
        return -float(np.mean(betaln(counts + a, sizes - counts + b) - betaln(a, b)))

    a, b = np.exp(minimize(cost, np.log(JEFFREYS), bounds=[PRIORS] * 2).x)
    return float(a), float(b)


def by_ranks(procedure: Served | str, what: str = "the optimum") -> RankProcedure:
    """Return a procedure by rank. Raises ConfigError, which says ``what`` needs one, for another."""
    served = as_procedure(procedure)
    if not looks_at_ranks(served):
        raise ConfigError(f"{what} needs a procedure by rank, not {served.name}")
    return served


class _Solved(NamedTuple):
    """The optimum of each law: the masses q (L, m) of its classes, KL (L,), J (L,), and g (L, m)."""

    q: Array
    kl: Array
    value: Array
    g: Array


@dataclass(frozen=True, slots=True)
class Classes:
    """Distinct laws of rewards: the shares ``p`` of m classes in ascending order, and their ``values`` and ``w``.

    A law with fewer classes has some of p = 0 in front, with the value of its first one.
    """

    p: Array  # (L, m)
    values: Array  # (L, m)
    w: Array  # (L, m)
    of_prompt: NDArray[np.intp]  # (P,)
    procedure: RankProcedure
    objective: Goal

    @classmethod
    def of(
        cls,
        sorted_rows: Sequence[Array],
        procedure: RankProcedure,
        objective: Goal,
        pair: Pair | None,
        prior: tuple[float, float] = JEFFREYS,
    ) -> Self:
        """Return the laws of prompts with sorted rewards, smoothed by a Beta prior where these are of a ``pair``."""
        classes: list[tuple[Array, Array]] = []
        sizes, of_prompt = np.array([row.size for row in sorted_rows]), np.empty(len(sorted_rows), np.intp)
        for size in np.unique(sizes):
            own = np.flatnonzero(sizes == size)
            rows, which = np.unique(np.stack([sorted_rows[int(i)] for i in own]), axis=0, return_inverse=True)
            of_prompt[own] = len(classes) + which.ravel()
            classes += [_classes(row, pair, prior) for row in rows]
        width = max(len(shares) for _, shares in classes)
        values = np.stack([np.pad(each, (width - len(each), 0), mode="edge") for each, _ in classes])
        p = np.stack([np.pad(each, (width - len(each), 0)) for _, each in classes])
        w = values
        if objective == "win-rate":
            up_to = procedure.distortion(cumulated(p))
            w = (up_to[:, 1:] + up_to[:, :-1]) / 2.0
            w = np.where(p > 0, w, np.take_along_axis(w, (p > 0).argmax(axis=1)[:, None], axis=1))
        return cls(p, values, w, of_prompt, procedure, objective)

    def solve(self, beta: float, raised: NDArray[np.bool_] | None = None) -> _Solved:
        """Return the optimum of every law at ``beta``; of those ``raised``, (L,), the local one above it, if any."""
        best = np.log(self.p[:, -1])
        if (np.diff(self.procedure.density(GRID)) >= 0).all():  # h is convex, so J is concave
            law, low, high = np.arange(len(self.p)), best - SLACK, np.full(len(self.p), SLACK)
        else:
            law, low, high = self._brackets(beta, best)
        log_z = find_root(partial(self._rest, beta=beta), (low, high), args=(law,), tolerances={"xatol": 1e-15}).x
        q, g = self._masses(log_z, law, beta)
        q /= q.sum(axis=1, keepdims=True)
        kl = xlogy(q, q / np.where(self.p[law] > 0, self.p[law], 1.0)).sum(axis=1)
        value = (np.diff(self.procedure.distortion(cumulated(q)), axis=1) * self.w[law]).sum(axis=1)  # J
        last = np.append(np.diff(np.sort(law)) > 0, True)
        chosen = np.lexsort((value - beta * kl, law))[last]  # of each law the best, which is its last
        if raised is not None:
            above = raised[law] & (value > value[chosen][law])
            chosen = np.lexsort((value - beta * kl, above, law))[last]
        return _Solved(q[chosen], kl[chosen], value[chosen], g[chosen])

    def raised(self, beta: float, kl: float) -> NDArray[np.bool_]:
        """Return which laws to raise at ``beta``, (L,): by gain per nat, as long as their mean KL is at most ``kl``."""
        best, above = self.solve(beta), self.solve(beta, np.ones(len(self.p), bool))
        nats, gain = above.kl - best.kl, above.value - best.value
        share, left = np.bincount(self.of_prompt) / self.of_prompt.size, kl - self.mean(best.kl)
        raised, other = np.zeros(len(self.p), bool), np.flatnonzero(nats > 0)
        for law in other[np.argsort(-gain[other] / nats[other], kind="stable")]:
            raised[law] = share[law] * nats[law] <= left
            left -= share[law] * nats[law] * raised[law]
        return raised

    def mean(self, of_laws: Array) -> float:
        return float(of_laws[self.of_prompt].mean())

    def beta_at(self, kl: float) -> float:
        """Return the β of the largest mean KL up to ``kl``; raises ConfigError for a budget that cannot be spent."""
        largest = self.mean(-np.log(self.p[:, -1]))
        if not 0 < kl < largest:
            raise ConfigError(
                f"a KL of {kl:g} nats cannot be spent on these rewards; it must be positive and below "
                f"{largest:.4g}, the mean of −log of the share of a prompt's best reward"
            )
        start = float(np.log(np.ptp(self.w, axis=1).max() or 1.0))
        root = find_log_beta(lambda x: self.mean(self.solve(float(np.exp(x))).kl), kl, start=start)
        if not root.found:
            raise ConfigError(f"{kl:g} nats for {self.procedure.name} cannot be computed; lower the KL")
        return float(np.exp(root.log_beta))

    def at(self, rewards: Array, law: int, solved: _Solved) -> Array:
        """Return the derivative of J in a response with each of ``rewards``, by the optimum of one law."""
        first = int((self.p[law] > 0).argmax())
        values, w, g = self.values[law, first:], self.w[law, first:], solved.g[law, first:]
        below = cumulated(solved.q[[law], first:])[0]  # F_0 = 0, F_1, …, F_m = 1
        place = np.searchsorted(values, rewards)  # of the first class that is not below
        known = np.append(values, np.nan)[place] == rewards
        worth = rewards
        if self.objective == "win-rate":
            worth = self.procedure.distortion(cumulated(self.p[[law], first:])[0])[place]
        above = np.append(g, 0.0)[place] - self.procedure.density(below[place]) * (np.append(w, w[-1])[place] - worth)
        return np.where(known, np.append(g, 0.0)[place], above)

    def _masses(self, log_z: Array, law: NDArray[np.intp], beta: float) -> tuple[Array, Array]:
        """Return q and g of laws whose normalizer is known, both (…, m), from the best class down."""
        p, rises = self.p[law].T.copy(), np.diff(self.w[law]).T.copy()
        q, g = np.empty_like(p), np.zeros_like(p)
        left, scaled = np.ones(len(law)), np.exp(-log_z)
        for j in reversed(range(len(p))):
            q[j] = p[j] * np.exp(g[j] / beta) * scaled
            left = left - q[j]
            if j:
                g[j - 1] = g[j] - self.procedure.density(np.minimum(np.maximum(left, 0.0), 1.0)) * rises[j - 1]
        return q.T, g.T

    def _rest(self, log_z: Array, law: NDArray[np.intp], beta: float) -> Array:
        """Return 1 − Σ q, which is 0 for a stationary point."""
        rest = 1.0 - self._masses(log_z.ravel(), law.ravel(), beta)[0].sum(axis=1)
        return np.asarray(rest.reshape(log_z.shape))

    def _brackets(self, beta: float, best: Array) -> tuple[NDArray[np.intp], Array, Array]:
        """Return laws and brackets of all stationary points that a scan finds."""
        inner = best[:, None] * (1.0 - SCAN)
        log_z = np.concatenate([best[:, None] - SLACK, inner, np.full((len(best), 1), SLACK)], axis=1)
        every = np.broadcast_to(np.arange(len(best))[:, None], log_z.shape)
        positive = self._rest(log_z, every, beta) > 0
        law, point = np.nonzero(positive[:, 1:] != positive[:, :-1])
        return law, log_z[law, point], log_z[law, point + 1]


def _classes(rewards_K: Array, pair: Pair | None, prior: tuple[float, float]) -> tuple[Array, Array]:
    """Return the distinct rewards of a prompt and their shares."""
    if pair is not None and np.isin(rewards_K, pair).all():
        share = ((rewards_K == pair[1]).sum() + prior[0]) / (rewards_K.size + sum(prior))
        return np.array(pair), np.array([1.0 - share, share])
    values, counts = np.unique(rewards_K, return_counts=True)
    return values, counts / rewards_K.size
